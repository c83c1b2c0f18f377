"""Vectors for routers in other languages: the events that engines send in each dialect, and the answers required of an
index.

Each dialect has a folder with

- `worker-0.msgpack`, `worker-1.msgpack` (`.jsonl` in Dynamo's dialects): the batches of an engine, one after the other;
- `batches.jsonl`: the batches in order of arrival: worker, rank, number, file, first byte, number of bytes, number of
  events;
- `queries.jsonl`: the queries: the number of batches before each, the token ids of its prompt, and the leading blocks
  that each worker holds;
- `capture.jsonl`: the same events as a capture, which `check` reads.

Its subfolders have more sets of the same files: `ranks` with two data-parallel ranks per engine, `near` with hashes
that agree in a part, `keys` with prompts that carry the adapter, salt and multimodal items which the dialect can
express, and in vLLM's newest dialect sets of hybrid models.

One subject: a set of vectors, from its traffic to its files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from pytest_kvmock.contrib.vectors.hybrid_vectors import PROFILE as HYBRID_PROFILE
from pytest_kvmock.contrib.vectors.hybrid_vectors import about_engine, hybrid_engines, hybrid_steps
from pytest_kvmock.contrib.vectors.near_vectors import NamedBlocks, near_steps
from pytest_kvmock.engines.backends import BackendSpec, EngineProfile, speaker_of
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.servers.capture.capture_file import CaptureFile
from pytest_kvmock.servers.capture.capturing_journal import CapturingJournal
from pytest_kvmock.servers.capture.lines import CaptureError, header, version
from pytest_kvmock.servers.capture.payload_file import write_payloads
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import BlockTokens, KvCacheEvent, RouterEvent, StorageTier
from pytest_kvmock.values.long_runs import long_run
from pytest_kvmock.values.prompt_keys import EventExtra, PromptKeys
from pytest_kvmock.values.tokens import Prompt
from pytest_kvmock.wire.codec.batcher import KvWire
from pytest_kvmock.wire.codec.digests import StreamDigests
from pytest_kvmock.wire.codec.table import find_dialect, known_dialects

VERSION: Final = 1
"""The version of the format of vectors."""

_PROFILE: Final = EngineProfile(block_size=4, num_blocks=12, workers=2)
_RANKS: Final = 2
_STEPS: Final = 24
_VOCABULARY: Final = 30_000
_ADAPTERS: Final = ("adapter-a", "adapter-b")
_SALTS: Final = ("tenant-1", "tenant-2")
_IMAGES: Final = (("1c" * 32, 2), ("2d" * 32, 5))
"""Identifiers in vLLM's form, 64 hexadecimal digits, each with its offset: the same image at two offsets makes two
blocks in vLLM, and one in Dynamo."""

README: Final = """\
# Vectors of KV events

Written by pytest-kvmock {version}. Two engines of {blocks} blocks of {size} tokens publish KV events; a router subscribes to
both. `index.json` lists the dialects. In the folder of each:

- `worker-0{suffix}`, `worker-1{suffix}`: the batches of each engine, one after the other: msgpack says where each ends
  (in Dynamo's dialects: JSON, an event a line, in `.jsonl`).
- `batches.jsonl`: the batches in the order in which they arrive: `worker`, `dp_rank`, `seq` (its number on the wire, from 0
  for each rank), `file` with its `offset` and `size` there, `events`.
- `queries.jsonl`: `after` this number of lines of `batches.jsonl`, a prompt of these `tokens` has `overlap` leading
  blocks on each worker; a worker without any is absent. `local_hashes` are those of Dynamo (XXH3-64, seed 1337) for
  its whole blocks.
- `capture.jsonl`: the same events as a capture.

Folders in it have further sets of these files; `sets` of `index.json` lists them.

- `ranks`: each engine has {ranks} data-parallel ranks with a cache of its own each. Rank 1 is in `worker-0-dp1{suffix}`, as it
  has a socket of its own; some dialects leave the rank of a batch nil. `by_rank` of a query has the leading blocks of each
  worker by rank, `overlap` the most of them.
- `near`: hashes agree in their low 32, 53 or 63 bits, their high 32, or as floats of 64 bits: those of tokens, as `local_hashes`
  of a query shows them, and the names of blocks. An index that keeps only a part of a hash takes two blocks for one. Blocks are
  named by hand: but for Dynamo's dialects, their names do not follow from their tokens.
- `keys`: prompts carry what the dialect has a field for. `keys` of a query has `lora_name`, `cache_salt` and `multimodal`
  (identifier, first token, tokens) where they are given, and `local_hashes` respects them. `extra_keys` has for each whole block
  what vLLM hashes with its tokens, as on the wire: the adapter, [identifier, offset] of each multimodal item, in the first
  block the salt. Prompts of other keys share no block. Dialects without such a field have no such set.

- `vllm_gpt_oss`, `vllm_qwen3_next`, `vllm_kimi_k3`, `full_first`: engines of hybrid models, with several cache groups. Each group
  publishes a Stored of its own; `groups` of the set in `index.json` lists them, with `hash_unit` and `alignment`,
  which no event has. `overlap` of a query has the leading blocks that the attention group holds, and `reusable` the
  tokens that each engine would reuse. An index is right that answers for each worker at most `overlap`, and at least
  `reusable` divided by `block_size`, rounded down; one that is exact answers that. Every prompt ends within a block.

Copies count: where an engine stores a block twice and removes it once, the block is still there.
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt, and the answer required of an index.

    Attributes:
        after: number of batches that have arrived.
        prompt: the queried prompt.
        blocks: its leading blocks by worker and rank.
        reusable: for a hybrid model, the tokens that each worker would reuse.
    """

    after: int
    prompt: Prompt
    blocks: dict[tuple[int, int], int]
    reusable: dict[Any, int] | None = None

    def line(self, block_size: int, *, ranks: bool, keyed: bool) -> dict[str, Any]:
        """Return the query as a line of its file.

        Args:
            block_size: tokens per block.
            ranks: whether to include the answer of each rank.
            keyed: whether to include the keys that the prompt carries.
        """
        overlap: dict[str, int] = {}
        by_rank: dict[str, dict[str, int]] = {}
        for (worker, rank), blocks in sorted(self.blocks.items()):
            overlap[str(worker)] = max(blocks, overlap.get(str(worker), 0))
            by_rank.setdefault(str(worker), {})[str(rank)] = blocks
        local = self.prompt.block_hashes(block_size)
        line: dict[str, Any] = {"after": self.after, "tokens": list(self.prompt.tokens or ()), "local_hashes": local}
        line["overlap"] = overlap
        if self.reusable is not None:
            line["reusable"] = {str(worker): tokens for worker, tokens in sorted(self.reusable.items())}
        if ranks:
            line["by_rank"] = by_rank
        if keyed:
            keys = self.prompt.keys or PromptKeys()
            line["keys"] = keys.given
            line["extra_keys"] = [keys.block_keys(position, block_size) for position in range(len(local))]
        return line


@dataclass(frozen=True, slots=True)
class _Set:
    """One set of vectors of a dialect.

    Attributes:
        name: name of its subfolder; empty: the folder of the dialect itself.
        ranks: data-parallel ranks of each engine.
        keys: what prompts may carry.
        near: whether two engines publish hashes that agree in a part.
        engine: the engine of a hybrid model, in place of the dialect's usual engine.
    """

    name: str = ""
    ranks: int = 1
    keys: tuple[str, ...] = ()
    near: bool = False
    engine: BackendSpec | None = None


class _Collector:
    """A sink that writes the events of one worker in a dialect, and records the arrival of each batch of a rank."""

    def __init__(self, worker: int, wire: KvWire, arrivals: list[tuple[int, int, int]]) -> None:
        self._worker, self._wire, self._arrivals = worker, wire, arrivals
        self._pending: list[RouterEvent] = []

    def publish(
        self,
        event: KvCacheEvent,
        storage_tier: StorageTier = StorageTier.DEVICE,
        token_ids: BlockTokens | None = None,
        extra: EventExtra | None = None,
    ) -> None:
        """Keep an event for the batch."""
        self._pending.append(RouterEvent(self._worker, event, storage_tier, token_ids, extra))

    def flush(self) -> None:
        """Make a batch for each rank from the events since the last one, as an engine's step does."""
        pending, self._pending = self._pending, []
        before = len(self._wire.batches)
        with self._wire.step():
            for event in pending:
                self._wire.publish(event)
        events = Counter(event.event.dp_rank for event in pending)
        for batch in self._wire.batches[before:]:
            self._arrivals.append((self._worker, batch.dp_rank, events[batch.dp_rank]))


def write_vectors(
    directory: str | Path,
    *,
    dialects: Collection[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> list[str]:
    """Write vectors into a directory; files with the same names are replaced.

    Args:
        directory: the directory; created if missing.
        dialects: names of dialects; None: all that have an event for an emptied cache.
        seed: seed of the traffic. The same seed gives the same bytes.
        progress: called with the name of each dialect before it is written.

    Returns:
        The names of the dialects.

    Raises:
        CaptureError: a file cannot be written.
        ValueError: a dialect is unknown, or has no event for an emptied cache.
        ImportError: msgspec is not installed.
    """
    home = Path(directory)
    made = [name for name, row in known_dialects().items() if row.clears]
    rows = [find_dialect(name) for name in (made if dialects is None else dict.fromkeys(dialects))]
    for row in rows:
        if not row.clears:
            raise ValueError(
                f"vectors have a Cleared, which dialect {row.name!r} cannot write; they are made of {', '.join(made)}"
            )
    about = []
    with long_run():
        for row in rows:
            if progress is not None:
                progress(row.name)
            about.append(_write_dialect(home / row.name, row, seed))
    profile = {"block_size": _PROFILE.block_size, "num_blocks": _PROFILE.num_blocks, "workers": _PROFILE.workers}
    index = {"kvmock_vectors": VERSION, "made_by": f"pytest-kvmock {version()}", "seed": seed, **profile}
    _write_text(home / "index.json", json.dumps({**index, "dialects": about}, indent=2) + "\n")
    sizes = {"version": version(), "blocks": _PROFILE.num_blocks, "size": _PROFILE.block_size, "ranks": _RANKS}
    _write_text(home / "README.md", README.format(**sizes, suffix=".msgpack"))
    return [row.name for row in rows]


def _write_dialect(home: Path, dialect: Dialect, seed: int) -> dict[str, Any]:
    """Write the folder of a dialect; return its entry in `index.json`."""
    spec = speaker_of(dialect)
    keys = _keys_carried(spec, dialect)
    about = {"name": dialect.name, "models": dialect.models, "engine": spec.models, "hashes": dialect.hashes}
    about |= _write_set(home, _Set(), spec, dialect, seed)
    others = [_Set("ranks", ranks=_RANKS), _Set("near", near=True)] + [_Set("keys", keys=keys)] * bool(keys)
    others += [_Set(name, engine=each) for name, each in hybrid_engines(dialect).items()]
    sets = []
    for each in others:
        found = _write_set(home / each.name, each, each.engine or spec, dialect, seed)
        more = {"keys": list(keys)} if each.keys else {} if each.engine is None else about_engine(each.engine)
        sets.append({"name": each.name, **found, **more})
    return {**about, "sets": sets}


def _write_set(home: Path, which: _Set, spec: BackendSpec, dialect: Dialect, seed: int) -> dict[str, Any]:
    """Write a set into its folder; return the names of the workers' files, and the numbers of batches and queries."""
    engine = {"backend": spec.name, "models": spec.models, "dialect": dialect.name}
    profile = (_PROFILE if which.engine is None else HYBRID_PROFILE).replace(seed=seed, dp_size=which.ranks)
    with CaptureFile(home / "capture.jsonl", header(engine, seed)) as file:
        harness = RouterHarness(profile, None, name="vectors", journal=CapturingJournal(file, lambda _: spec.name))
        wires: dict[int, KvWire] = {}
        arrivals: list[tuple[int, int, int]] = []
        collectors = []
        for worker in range(profile.workers):
            wires[worker] = KvWire(dialect, ranks=which.ranks, digests=_digests(spec, dialect, which))
            collectors.append(_Collector(worker, wires[worker], arrivals))
            harness.add_sink(collectors[-1], worker_id=worker)
        if which.near:
            queries = _near_traffic(harness, dialect, collectors, arrivals)
        else:
            harness.inside.use_backend(spec)
            name = f"vectors:{seed}:{which.name}" if which.name else f"vectors:{seed}"
            if which.engine is not None:
                queries = _hybrid_traffic(harness, collectors, arrivals, name)
            else:
                queries = _traffic(harness, collectors, arrivals, Random(name), which)  # noqa: S311 - mock data
        harness.assert_no_event_errors()
    suffix = ".msgpack" if dialect.is_msgpack else ".jsonl"
    places = {}
    for worker, wire in wires.items():
        for rank in range(which.ranks):
            path = home / f"worker-{worker}{f'-dp{rank}' if rank else ''}{suffix}"
            payloads = [batch.payload for batch in wire.batches if batch.dp_rank == rank]
            places[worker, rank] = path.name, write_payloads(path, payloads)
    batches, numbers = [], Counter[tuple[int, int]]()
    for worker, rank, events in arrivals:
        seq = numbers[worker, rank]
        numbers[worker, rank] += 1
        name, of_file = places[worker, rank]
        offset, size = of_file[seq]
        line = {"worker": worker, "dp_rank": rank, "seq": seq, "file": name, "offset": offset, "size": size}
        batches.append({**line, "events": events})
    _write_lines(home / "batches.jsonl", batches)
    size = profile.block_size
    lines = [query.line(size, ranks=which.ranks > 1, keyed=bool(which.keys)) for query in queries]
    _write_lines(home / "queries.jsonl", lines)
    files = [name for name, _ in places.values()]
    return {"workers": files, "batches": len(batches), "queries": len(queries)}


def _keys_carried(spec: BackendSpec, dialect: Dialect) -> tuple[str, ...]:
    """Return the keys of prompts that the engine's block names depend on, and that a router can read in the dialect."""
    fields = {*(field.name for field in dialect.stored), *dialect.metadata}
    on_wire = {
        "lora_name": "lora_name" in fields,
        "cache_salt": not fields.isdisjoint(("cache_salt", "extra_keys")),
        "multimodal": "extra_keys" in fields,
    }
    able = spec.prompt_keys
    return tuple(key for key, has in on_wire.items() if key in able and (has or not dialect.is_msgpack))


def _digests(spec: BackendSpec, dialect: Dialect, which: _Set) -> dict[int, StreamDigests]:
    """Return the digests that a dialect with whole digests needs; they follow from the engine's options, or from the
    given block names.
    """
    if dialect.hashes != "bytes":
        return {}
    if which.near:
        return {0: StreamDigests(NamedBlocks(near_steps(dialect, _PROFILE.block_size)))}
    return {rank: StreamDigests.of_manager(_manager(spec, rank)) for rank in range(which.ranks)}


def _manager(spec: BackendSpec, dp_rank: int) -> Any:
    """Return a manager of one block, to read the traits of its engine."""
    return spec.make(num_blocks=1, block_size=_PROFILE.block_size, dp_rank=dp_rank, sink=None)


def _traffic(
    harness: RouterHarness, collectors: Sequence[_Collector], arrivals: Sequence[Any], rng: Random, which: _Set
) -> list[Query]:
    """Let the engines serve prompts that share prefixes, and evict; query some of them after each step."""
    size = harness.profile.block_size
    queries: dict[tuple[object, ...], Query] = {}
    prompts: list[Prompt] = []

    def flush() -> None:
        for collector in collectors:
            collector.flush()

    def ask(*asked: Prompt) -> None:
        flush()
        for each in (other for prompt in asked for other in (prompt, *_with_one_key_less(prompt))):
            scores = harness.inside.reference.find_matches(each.block_hashes(size)).scores
            query = Query(len(arrivals), each, {key: blocks for key, blocks in scores.items() if blocks})
            queries.setdefault((query.after, each.tokens, each.keys), query)

    flush()  # some engines publish at their start
    for step in range(_STEPS):
        before = rng.choice(prompts) if prompts and rng.random() < 0.6 else Prompt([])
        shared = before.tokens or ()
        kept = list(shared[: size * rng.randrange(len(shared) // size + 1)]) if shared else []
        fresh = _fresh(size * rng.randint(1, 4) + rng.randrange(size), rng)
        tokens = [*kept, *fresh][: size * (harness.profile.num_blocks - 2)]
        prompt = _with_keys(tokens, before, which.keys, rng)
        prompts.append(prompt)
        dp_rank = rng.randrange(which.ranks) if which.ranks > 1 else 0
        worker = harness.worker(step % len(collectors) if step % 3 else 0, dp_rank=dp_rank)
        if step == _STEPS * 2 // 3:
            worker.clear()
            ask(*prompts[-3:])
        worker.serve(prompt)
        asked = [prompt, rng.choice(prompts)]
        if which.keys:  # the same tokens for another tenant
            asked.append(_with_keys(tokens, Prompt([]), which.keys, rng))
        ask(*asked)
        if step == _STEPS // 3:
            _serve_twice(worker, ask, _with_keys(_fresh(3 * size, rng), Prompt([]), which.keys, rng), rng)
    return [*queries.values()]


def _near_traffic(
    harness: RouterHarness, dialect: Dialect, collectors: Sequence[_Collector], arrivals: Sequence[Any]
) -> list[Query]:
    """Let the engines publish hashes that agree in a part; query prompts of both after each event."""
    size = harness.profile.block_size
    sinks = [harness.make_sink(worker_id=worker, chained=False) for worker in range(len(collectors))]
    queries = []
    for step in near_steps(dialect, size):
        sinks[step.worker].publish(step.data, token_ids=step.tokens)
        collectors[step.worker].flush()
        for prompt in step.asked:
            scores = harness.inside.reference.find_matches(prompt.block_hashes(size)).scores
            queries.append(Query(len(arrivals), prompt, {key: blocks for key, blocks in scores.items() if blocks}))
    return queries


def _hybrid_traffic(
    harness: RouterHarness, collectors: Sequence[_Collector], arrivals: Sequence[Any], seed: str
) -> list[Query]:
    """Let engines of a hybrid model serve; query after each step the held blocks and the reusable tokens."""
    size = harness.profile.block_size
    queries: dict[tuple[object, ...], Query] = {}
    for step in hybrid_steps(seed):
        worker = harness.worker(step.worker)
        requests = [worker.prefill(prompt) for prompt in step.prompts]
        for request in requests:
            request.decode(step.outputs)
            request.finish()
        if not requests:
            worker.clear()
        collectors[step.worker].flush()
        for prompt in step.asked:
            scores = harness.inside.reference.find_matches(prompt.block_hashes(size)).scores
            held = {key: blocks for key, blocks in scores.items() if blocks}
            query = Query(len(arrivals), prompt, held, harness.reusable(prompt))
            queries.setdefault((query.after, prompt.tokens), query)
    return [*queries.values()]


def _serve_twice(worker: KvWorker, ask: Callable[[Prompt], None], prompt: Prompt, rng: Random) -> None:
    """Open two requests on one prompt, and evict the blocks that each leaves; then serve a prompt that continues it.
    Query after each step.

    vLLM computes the last block of the second request again, and publishes a copy; other engines share the block.
    """
    num_blocks, size = worker.manager.num_blocks, worker.manager.block_size
    requests = [worker.prefill(prompt), worker.prefill(prompt)]
    ask(prompt)
    for request in requests:
        request.finish()
        worker.serve(_fresh(size * (num_blocks - worker.manager.num_active_blocks), rng))
        ask(prompt)
    keys = {} if prompt.keys is None else prompt.keys.given
    for blocks in (0, 2):
        prompt = Prompt([*(prompt.tokens or ()), *_fresh(blocks * size, rng)], **keys)
        worker.serve(prompt)
        ask(prompt)


def _fresh(count: int, rng: Random) -> list[int]:
    """Return `count` random tokens."""
    return [rng.randrange(_VOCABULARY) for _ in range(count)]


def _with_keys(tokens: list[int], before: Prompt, able: Collection[str], rng: Random) -> Prompt:
    """Return a prompt with some keys; half of the time, with those of the prompt whose tokens it shares.

    Prompts that share tokens have the same adapter: SGLang up to 0.5.22 gives the blocks of two adapters the same
    names, so that no index can tell which one is held.
    """
    if not able:
        return Prompt(tokens)
    given: dict[str, Any] = {} if before.keys is None else before.keys.given
    adapter = given.get("lora_name") if before.tokens else rng.choice((None, *_ADAPTERS))
    if not given or rng.random() < 0.5:
        image, offset = rng.choice(_IMAGES)
        item = (image, offset, rng.randint(1, 6))
        drawn = {
            "lora_name": adapter,
            "cache_salt": rng.choice((None, *_SALTS)),
            "multimodal": (item,) * rng.randrange(2),
        }
        given = {name: value for name, value in drawn.items() if name in able}
    items = [item for item in given.get("multimodal", ()) if item[1] + item[2] <= len(tokens)]
    return Prompt(tokens, **{**given, "multimodal": items})


def _with_one_key_less(prompt: Prompt) -> Iterator[Prompt]:
    """Yield the prompt without each of its keys: a router must keep these prompts apart."""
    given = {} if prompt.keys is None else prompt.keys.given
    for left_out in given:
        yield Prompt(prompt.tokens, **{key: value for key, value in given.items() if key != left_out})


def _write_lines(path: Path, lines: Sequence[Any]) -> None:
    _write_text(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise CaptureError(f"{path}: cannot be written: {error.strerror or error}") from None
