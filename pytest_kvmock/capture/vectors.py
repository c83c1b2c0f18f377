"""Vectors for routers in other languages: what engines send in each dialect, and what an index must answer after it.

A folder a dialect, with

- `worker-0.msgpack`, `worker-1.msgpack` (`.jsonl` in Dynamo's dialects): the batches of an engine, one after the other;
- `batches.jsonl`: in which order they arrive: worker, number, first byte, how many bytes, how many events;
- `queries.jsonl`: after how many of those batches a prompt is asked for, its token ids, and how many of its leading blocks
  each worker holds;
- `capture.jsonl`: the same events as a capture, which `check` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from pytest_kvmock.backends import BackendSpec, EngineProfile, backend_spec
from pytest_kvmock.capture.capture_file import CaptureFile
from pytest_kvmock.capture.capturing_ledger import CapturingLedger
from pytest_kvmock.capture.lines import CaptureError, header, version
from pytest_kvmock.capture.payload_file import write_payloads
from pytest_kvmock.events import BlockTokens, KvCacheEvent, RouterEvent, StorageTier
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.prompt_keys import EventExtra
from pytest_kvmock.tokens import Prompt, block_hashes
from pytest_kvmock.wire.batcher import KvWire
from pytest_kvmock.wire.digests import StreamDigests
from pytest_kvmock.wire.table import Dialect, find_dialect, known_dialects

VERSION: Final = 1
"""The version of the format of vectors."""

_PROFILE: Final = EngineProfile(block_size=4, num_blocks=12, workers=2)
_STEPS: Final = 24
_VOCABULARY: Final = 30_000

README: Final = """\
# Vectors of KV events

Written by pytest-kvmock {version}. Two engines of {blocks} blocks of {size} tokens publish KV events; a router subscribes to
both. `index.json` lists the dialects. In the folder of each:

- `worker-0{suffix}`, `worker-1{suffix}`: the batches of each engine, one after the other: msgpack says where each ends
  (in Dynamo's dialects: JSON, an event a line, in `.jsonl`).
- `batches.jsonl`: the batches in the order in which they arrive: `worker`, `seq` (its number on the wire), `offset` and
  `size` in the file of that worker, `events`.
- `queries.jsonl`: `after` so many lines of `batches.jsonl`, a prompt of these `tokens` has `overlap` leading blocks on each
  worker; a worker without any is absent. `local_hashes` are those of Dynamo (XXH3-64, seed 1337) for its whole blocks.
- `capture.jsonl`: the same events as a capture.

Copies count: where an engine stores a block twice and removes it once, the block is still there.
"""


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt, and what an index must answer.

    Attributes:
        after: how many batches have arrived.
        tokens: the token ids.
        local_hashes: Dynamo's hash of each whole block.
        overlap: leading blocks by worker.
    """

    after: int
    tokens: Sequence[int]
    local_hashes: Sequence[int]
    overlap: dict[Any, int]


class _Collector:
    """A sink that writes the events of one worker in a dialect, and notes when each batch came."""

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
        """Make a batch of what was published since the last one, as an engine's step does."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        with self._wire.step():
            for event in pending:
                self._wire.publish(event)
        self._arrivals.append((self._worker, len(self._wire.batches) - 1, len(pending)))


def write_vectors(
    directory: str | Path,
    *,
    dialects: Collection[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> list[str]:
    """Write vectors into a directory; what stood there under the same names is replaced.

    Args:
        directory: where; it is made if there is none.
        dialects: names of dialects; None: all.
        seed: of the traffic. The same seed gives the same bytes.
        progress: told the name of each dialect before it is written.

    Returns:
        The names of the dialects.

    Raises:
        CaptureError: a file cannot be written.
        ValueError: an unknown dialect.
        ImportError: msgspec is not installed.
    """
    home = Path(directory)
    rows = [find_dialect(name) for name in (known_dialects() if dialects is None else dict.fromkeys(dialects))]
    about = []
    for row in rows:
        if progress is not None:
            progress(row.name)
        about.append(_write_dialect(home / row.name, row, seed))
    profile = {"block_size": _PROFILE.block_size, "num_blocks": _PROFILE.num_blocks, "workers": _PROFILE.workers}
    index = {"kvmock_vectors": VERSION, "made_by": f"pytest-kvmock {version()}", "seed": seed, **profile}
    _write_text(home / "index.json", json.dumps({**index, "dialects": about}, indent=2) + "\n")
    sizes = {"version": version(), "blocks": _PROFILE.num_blocks, "size": _PROFILE.block_size}
    _write_text(home / "README.md", README.format(**sizes, suffix=".msgpack"))
    return [row.name for row in rows]


def _write_dialect(home: Path, dialect: Dialect, seed: int) -> dict[str, Any]:
    """Write the folder of a dialect; return what the index says of it."""
    spec = backend_spec(dialect.backend)
    engine = {"backend": spec.name, "models": spec.models, "dialect": dialect.name}
    with CaptureFile(home / "capture.jsonl", header(engine, seed)) as file:
        harness = RouterHarness(
            _PROFILE.replace(seed=seed), None, name="vectors", ledger=CapturingLedger(file, lambda _: spec.name)
        )
        wires: dict[int, KvWire] = {}
        arrivals: list[tuple[int, int, int]] = []
        collectors = []
        for worker in range(_PROFILE.workers):
            wires[worker] = KvWire(dialect, digests=_digests(spec, dialect))
            collectors.append(_Collector(worker, wires[worker], arrivals))
            harness.add_sink(collectors[-1], worker_id=worker)
        harness.use_backend(spec)
        queries = _traffic(harness, collectors, arrivals, Random(f"vectors:{seed}"))  # noqa: S311 - mock data
        harness.assert_no_event_errors()
    suffix = ".msgpack" if dialect.is_msgpack else ".jsonl"
    places = {
        worker: write_payloads(home / f"worker-{worker}{suffix}", wire.payloads) for worker, wire in wires.items()
    }
    batches = []
    for worker, seq, events in arrivals:
        offset, size = places[worker][seq]
        batches.append({"worker": worker, "seq": seq, "offset": offset, "size": size, "events": events})
    _write_lines(home / "batches.jsonl", batches)
    _write_lines(
        home / "queries.jsonl",
        [
            {
                "after": query.after,
                "tokens": list(query.tokens),
                "local_hashes": list(query.local_hashes),
                "overlap": {str(worker): blocks for worker, blocks in query.overlap.items()},
            }
            for query in queries
        ],
    )
    return {
        "name": dialect.name,
        "models": dialect.models,
        "engine": spec.models,
        "hashes": dialect.hashes,
        "workers": [f"worker-{worker}{suffix}" for worker in wires],
        "batches": len(batches),
        "queries": len(queries),
    }


def _digests(spec: BackendSpec, dialect: Dialect) -> dict[int, StreamDigests]:
    """What a dialect of whole digests needs; they follow from the engine's options alone."""
    if dialect.hashes != "bytes":
        return {}
    return {0: StreamDigests.of_manager(spec.make(num_blocks=1, block_size=_PROFILE.block_size, dp_rank=0, sink=None))}


def _traffic(
    harness: RouterHarness, collectors: Sequence[_Collector], arrivals: Sequence[Any], rng: Random
) -> list[Query]:
    """Have the engines serve prompts that share prefixes, and evict; ask for some of them after each step."""
    size = harness.profile.block_size
    queries: list[Query] = []
    prompts: list[list[int]] = []
    for collector in collectors:  # some engines publish as they begin
        collector.flush()
    for step in range(_STEPS):
        before = rng.choice(prompts) if prompts and rng.random() < 0.6 else []
        kept = before[: size * rng.randrange(len(before) // size + 1)] if before else []
        fresh = [rng.randrange(_VOCABULARY) for _ in range(size * rng.randint(1, 4) + rng.randrange(size))]
        tokens = [*kept, *fresh][: size * (harness.profile.num_blocks - 2)]
        prompts.append(tokens)
        worker = harness.worker(step % len(collectors) if step % 3 else 0)
        if step == _STEPS * 2 // 3:
            worker.clear()
        worker.serve(Prompt(tokens))
        for collector in collectors:
            collector.flush()
        for asked in (tokens, rng.choice(prompts)):
            overlap = {worker: blocks for worker, blocks in harness.overlap(asked).items() if blocks}
            queries.append(Query(len(arrivals), asked, block_hashes(asked, size), dict(sorted(overlap.items()))))
    return queries


def _write_lines(path: Path, lines: Sequence[Any]) -> None:
    _write_text(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise CaptureError(f"{path}: cannot be written: {error.strerror or error}") from None
