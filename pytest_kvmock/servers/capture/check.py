"""Event hygiene of a file: the events of a capture are judged again, as when they arrived.

One subject: the way from a file to its problems. Three kinds of files are read: captures; JSON lines of Dynamo, each a
`RouterEvent` or a `KvCacheEvent`; and payloads of a dialect, one after the other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from pytest_kvmock.engines.backends import backend_spec, known_backends, recorded_backend, speaker_of
from pytest_kvmock.engines.vllm.vllm_manager import VllmManager
from pytest_kvmock.oracle.hygiene import entries
from pytest_kvmock.oracle.hygiene.content import DynamoChain
from pytest_kvmock.oracle.hygiene.injection import Injection
from pytest_kvmock.oracle.hygiene.ledger import Ledger
from pytest_kvmock.oracle.hygiene.log import EventLog
from pytest_kvmock.oracle.hygiene.problem import Problem
from pytest_kvmock.oracle.hygiene.report import problems_text
from pytest_kvmock.oracle.hygiene.rules import RULES
from pytest_kvmock.oracle.hygiene.stream import Stream
from pytest_kvmock.oracle.hygiene.stream_spec import Residency, StreamSpec, check_residency
from pytest_kvmock.servers.capture.injected import InjectedFaults
from pytest_kvmock.servers.capture.lines import HEADER, KINDS, VERSION, CaptureError, entry_of, event_of, key_of
from pytest_kvmock.servers.capture.payload_file import split_payloads
from pytest_kvmock.servers.capture.printed_events import TAKES, is_printed, printed_payloads
from pytest_kvmock.values.checks import check_integer, is_integer, unknown_text
from pytest_kvmock.values.dialect import Dialect
from pytest_kvmock.values.events import KvCacheEvent, RouterEvent, StorageTier, Stored, StreamKey
from pytest_kvmock.values.hashed_blocks import Chain
from pytest_kvmock.values.long_runs import long_run
from pytest_kvmock.wire.codec.decoding import decode
from pytest_kvmock.wire.codec.event_names import NEWEST, EventNames, NameChain, hasher_of, hashers
from pytest_kvmock.wire.codec.table import find_dialect, known_dialects

MOST_UNREADABLE: Final = 10
"""Maximum number of unreadable messages that a report lists."""

Progress = Callable[[int, int], object]
"""Called from time to time with the number of read bytes and of events."""

_EVERY: Final = 20_000  # lines or batches


@dataclass(slots=True)
class Checked:
    """The findings in a file.

    Attributes:
        path: the file.
        log: the events, with their problems.
        header: the header of a capture; empty if the file is no capture.
        unreadable: the errors in messages of a wire, one line each.
        notes: what could not be judged, one line each.
        complete: whether the capture has its last line.
        allow: rules whose breaches are ignored.
        counts_injected: whether results of faults that a test injected count like other problems.
        faults: the faults that the test injected, in order.
    """

    path: Path
    log: EventLog = field(default_factory=EventLog)
    header: Mapping[str, Any] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    allow: frozenset[str] = frozenset()
    counts_injected: bool = False
    faults: list[Injection] = field(default_factory=list)

    @property
    def problems(self) -> list[Problem]:
        """The errors and warnings that stand by themselves, except those that are allowed or injected."""
        return [each for each in self._standing if each.fault is None or self.counts_injected]

    @property
    def injected(self) -> list[Problem]:
        """The errors and warnings that result from faults that the test injected."""
        return [each for each in self._standing if each.fault is not None]

    @property
    def _standing(self) -> list[Problem]:
        return [each for each in self.log.problems if each.cause is None and each.rule not in self.allow]

    @property
    def errors(self) -> list[Problem]:
        """The errors among the problems."""
        return [problem for problem in self.problems if problem.is_error]

    @property
    def warnings(self) -> list[Problem]:
        """The warnings among the problems."""
        return [problem for problem in self.problems if not problem.is_error]

    @property
    def is_clean(self) -> bool:
        """Whether everything could be read and there is no error."""
        return not self.errors and not self.unreadable

    def text(self, *, warnings: bool = False) -> str:
        """Return the report.

        Args:
            warnings: whether to show warnings like errors; False: only their numbers.
        """
        workers = {(entry.event.worker_id, entry.event.event.dp_rank) for entry in self.log}
        about = [f"{self.log.total:,} event{'s' * (self.log.total != 1)}"]
        about.append(f"{len(workers):,} stream{'s' * (len(workers) != 1)}")
        engine = self.header.get("engine")
        about += [str(text) for key in ("models", "endpoint") if isinstance(engine, dict) and (text := engine.get(key))]
        about += [f"test {self.header['test']}"] if self.header.get("test") else []
        lines = [f"{self.path}: {', '.join(about)}"]
        lines += [f"note: {note}" for note in self.notes]
        if not self.complete:
            lines.append("note: the capture has no last line: its writer was stopped")
        if self.unreadable:
            count = len(self.unreadable)
            lines.append(f"{count:,} message{'s' * (count != 1)} of the wire with something wrong:")
            lines += [f"  {text}" for text in self.unreadable[:MOST_UNREADABLE]]
            lines += [f"  and {count - MOST_UNREADABLE:,} more"] * (count > MOST_UNREADABLE)
        shown = self.problems if warnings else self.errors
        if shown:
            lines.append(problems_text(shown))
        if self.warnings and not warnings:
            lines.append(f"warnings: {_counted(self.warnings)}")
        expected = [] if self.counts_injected else self.injected
        if expected:
            kinds = Counter(fault.kind for fault in self.faults)
            faults = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
            lines.append(f"injected by the test: {_counted(expected)}; faults: {faults}")
        if not shown and not self.unreadable:
            lines.append("no errors" if self.warnings or expected else "clean" if self.log.total else "no events")
        return "\n".join(lines)


def _counted(problems: Collection[Problem]) -> str:
    """Return the number of problems of each rule, as text."""
    counts = Counter(problem.rule for problem in problems)
    return ", ".join(f"{counts[rule]:,} {rule}" for rule in RULES if rule in counts)


def check_file(
    path: str | Path,
    *,
    dialect: str | Dialect | None = None,
    allow: Collection[str] = (),
    residency: str | None = None,
    hash: str | None = None,  # noqa: A002 - the user's word
    seed: str | None = None,
    counts_injected: bool = False,
    full_reports: bool = False,
    progress: Progress | None = None,
) -> Checked:
    """Judge the events of a file.

    Args:
        path: a capture, JSON lines of Dynamo, payloads, or a text of events as vLLM's example subscriber prints them.
        dialect: the dialect of the payloads; None for the other kinds of files.
        allow: rules whose breaches are ignored.
        residency: for a file that does not have it: "unique" if a block is published once while it is held, "counted"
            if every copy is published; None: that of the dialect's engine, "unique" for JSON lines.
        hash: the hash of vLLM that names the blocks (`--prefix-caching-hash-algo`), for a file that does not have it;
            None: for a dialect of vLLM all its hashes are tried, on the first chain of plain tokens.
        seed: seed of the hash, as PYTHONHASHSEED; None: "0" is tried, and the release's seed without PYTHONHASHSEED.
        counts_injected: whether results of faults that the captured test injected count like other problems.
        full_reports: whether requests of vLLM asked for full reports. Then a Stored without a parent whose blocks are
            all held may be a report or a copy, and neither is wrong.
        progress: called from time to time with the progress.

    Raises:
        CaptureError: the file cannot be read, or has none of these forms. The message is one line.
        ValueError: an unknown dialect, rule, residency or hash, or a hash for a dialect that is not vLLM's.
        ImportError: msgspec is not installed, and the dialect needs it.
    """
    from pytest_kvmock.oracle.hygiene.rules import check_rule

    checked = Checked(Path(path), allow=frozenset(map(check_rule, allow)), counts_injected=counts_injected)
    if full_reports:
        checked.notes.append(
            "full reports: a Stored without a parent whose blocks are all held may be one, or copies: neither a "
            "missing Removed of such a block nor one too many is found"
        )
    stated = None if residency is None else check_residency(residency)
    row = None if dialect is None else find_dialect(dialect)
    naming = hash, seed
    hashers(NEWEST, *naming)  # raises if a value is invalid
    try:
        with checked.path.open("rb") as file, long_run():
            if (row is None or row.is_msgpack) and is_printed(file.peek(4096)):
                row, payloads = printed_payloads(file.read(), row, checked.path)
                _judge_payloads(
                    checked, b"".join(payloads), row, stated, naming, progress=progress, reports=full_reports
                )
            elif row is None:
                _Replay(checked, stated or "unique", naming, progress, reports=full_reports).read(file)
            else:
                _judge_payloads(checked, file.read(), row, stated, naming, progress=progress, reports=full_reports)
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read: {error.strerror or error}") from None
    return checked


class _Names:
    """The computed block names of the streams of a file.

    Args:
        checked: the findings.
        ledger: judges the events.
        source: computes the names of streams that do not name their hash; None: they are not computed.
    """

    def __init__(self, checked: Checked, ledger: Ledger, source: EventNames | None) -> None:
        self._checked, self._ledger, self.source = checked, ledger, source
        self._stated: list[EventNames] = []  # of streams that name their hash

    def of(self, hash_name: str, seed: str | None) -> Callable[[], Chain]:
        """Return the function that makes the chain of a stream that names its hash and seed."""
        self._stated.append(EventNames((hasher_of(hash_name, seed),), is_given=True, knows_release=False))
        return self._stated[-1].chain

    def chain(self) -> Callable[[], Chain] | None:
        """Return the function that makes the chain of a stream that does not name its hash; None if unknown."""
        return None if self.source is None else self.source.chain

    def take(self, event: RouterEvent) -> None:
        """Give the ledger an event that is already in the log, and then earlier events that can now be judged."""
        log, ledger, stream = self._checked.log, self._ledger, self._ledger.streams.get(event.key)
        chain = None if stream is None else stream.hash_chain
        if not isinstance(chain, NameChain) or not isinstance(event.event.data, Stored):
            log.note(ledger.take(event))
            return
        event.chained = event.storage_tier is StorageTier.DEVICE  # events of a host lack the hashed keys
        log.note(ledger.take(event))
        for late in chain.names.taken(event, ledger.position, chain):
            log.note(ledger.take(entries.HashesChained(late.event, late.position)))

    def close(self) -> None:
        """Add a note with the number of computed names."""
        for names in (self.source, *self._stated):
            if names is not None:
                names.close()
                self._checked.notes += [names.text] * bool(names.computed or names.skipped)


def _names_of(dialect: Dialect, naming: tuple[str | None, str | None]) -> EventNames | None:
    """Return the object that computes the block names of a dialect of vLLM; None for other dialects.

    Raises:
        ValueError: a hash is given for another dialect.
    """
    made = speaker_of(dialect).make(num_blocks=1, block_size=16, dp_rank=0, sink=None)
    if not isinstance(made, VllmManager):
        if naming != (None, None):
            raise ValueError(
                f"a hash is for dialects of vLLM, whose names follow from it; got dialect {dialect.name!r}"
            )
        return None
    release = made.version.name
    says_keys = any(field.name == "extra_keys" for field in dialect.stored)
    given = None not in naming
    return EventNames(hashers(release, *naming), release=release, says_keys=says_keys, is_given=given)


def _judge_payloads(
    checked: Checked,
    data: bytes,
    dialect: Dialect,
    residency: Residency | None,
    naming: tuple[str | None, str | None],
    *,
    progress: Progress | None,
    reports: bool,
) -> None:
    spec = backend_spec(dialect.backend)
    ledger, next_ids = Ledger(), Counter[int]()
    names = _Names(checked, ledger, _names_of(dialect, naming))
    about: dict[str, Any] = {"residency": residency or spec.residency, "prefix_closed": spec.prefix_closed}
    about["full_reports"] = reports
    about["clears_below"] = not dialect.name.startswith("vllm-")  # vLLM's Cleared empties only the device
    read = 0
    if data.startswith(b'{"' + HEADER.encode()):
        raise CaptureError(f"{checked.path}: this is a capture, which names its engine itself: leave the dialect out")
    for number, payload in enumerate(split_payloads(data, dialect, checked.path)):
        read += len(payload)
        decoded = decode(payload, dialect)
        checked.unreadable += [f"batch {number}: {problem}" for problem in decoded.problems]
        for event in decoded.events:
            key = (event.worker_id, event.event.dp_rank)
            if dialect.is_msgpack:  # its events have no ids
                event.event.event_id += next_ids[key[1]]
            if key not in ledger.streams:
                ledger.open(key, **about, chain=names.chain() or DynamoChain)
            checked.log.append(event)
            names.take(event)
        next_ids[decoded.dp_rank or 0] += decoded.num_events
        if progress is not None and not number % _EVERY:
            progress(read, checked.log.total)
    names.close()


class _Replay:
    """Gives a ledger the entries that a capture has."""

    def __init__(
        self,
        checked: Checked,
        residency: Residency,
        naming: tuple[str | None, str | None],
        progress: Progress | None,
        *,
        reports: bool,
    ) -> None:
        self._checked, self._log = checked, checked.log
        self._residency, self._reports = residency, reports
        self._naming = naming
        self._progress = progress
        self._ledger = Ledger()
        source = None if naming == (None, None) else EventNames(hashers(NEWEST, *naming), is_given=None not in naming)
        self._names = _Names(checked, self._ledger, source)
        self._unchained: set[StreamKey] = set()  # streams whose rule for hashes is unknown
        self._uncomputed: set[int] = set()  # positions of Stored events without `chained`
        self._injected = InjectedFaults(checked.log, checked.faults)

    def read(self, file: BinaryIO) -> None:
        """Read all lines.

        Raises:
            CaptureError: a line cannot be read.
        """
        checked, number, done = self._checked, 0, 0
        for number, line in enumerate(file, 1):
            done += len(line)
            where = f"{checked.path}: line {number}"
            value = _loaded(line, where)
            try:
                if number == 1 and HEADER in value:
                    self._begin(value)
                elif checked.header:
                    self._take(value)
                else:
                    self._take_event(_dynamos(value), {})
            except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
                text = f"{error} is missing" if type(error) is KeyError else str(error)
                raise CaptureError(f"{where}: {text}") from None
            if self._progress is not None and not number % _EVERY:
                self._progress(done, self._log.total)
        if not number:
            raise CaptureError(f"{checked.path}: the file is empty; a capture has a header")
        self._injected.attribute()
        self._names.close()
        if count := len(self._uncomputed):
            checked.notes.append(f"{count:,} Stored without `chained`: their hashes were not checked")

    def _begin(self, header: Mapping[str, Any]) -> None:
        if header[HEADER] != VERSION or isinstance(header[HEADER], bool):
            raise ValueError(f"version {header[HEADER]!r:.80} of the format of captures; this program reads {VERSION}")
        self._checked.header = header
        self._checked.complete = False
        engine = header.get("engine")
        dialect = known_dialects().get(engine.get("dialect", "")) if isinstance(engine, dict) else None
        if dialect is not None:
            self._names.source = _names_of(dialect, self._naming)

    def _take(self, line: Mapping[str, Any]) -> None:
        kind = next(iter(line), None)
        if self._checked.complete:
            raise ValueError(f"a line after the end: {line!s:.80}")
        if kind not in KINDS:
            raise ValueError(unknown_text("kind of line", kind, KINDS))
        value, log, ledger = line[kind], self._log, self._ledger
        if kind == "event":
            self._take_event(event_of(line), line)
        elif kind == "hashes_of":
            entry = log[check_integer(kind, value, 0)]
            log.note(ledger.take(entries.HashesChained(entry.event, entry.position)))
            self._uncomputed.discard(entry.position)
        elif kind == "full":
            log.note(ledger.take(entries.Counted()))
        elif kind == "end":
            counted = value.get("events") if isinstance(value, dict) else value
            if counted != log.total:
                raise ValueError(f"the end counts {counted!r:.80} events, and {log.total} are in the file")
            self._checked.complete = True
        elif not isinstance(value, dict):
            raise TypeError(f"{kind}: expected an object, got {value!r:.80}")
        elif kind == "unreadable":
            self._checked.unreadable.append(str(value["text"]))
        elif kind in ("stream", "injected", "result", "recovered"):
            getattr(self, f"_take_{kind}")(key_of(value), value)
        else:
            self._take_entry(entry_of(kind, value), value)

    def _take_entry(self, entry: entries.Entry, value: Mapping[str, Any]) -> None:
        if isinstance(entry, entries.WorkerRemoved):
            self._log.worker_removed(entry.worker_id, entry.dp_rank, entry.keys, restarted=entry.first_id is not None)
        found = self._ledger.take(entry)
        self._log.note(found)
        if isinstance(entry, entries.BatchesLost):
            self._injected.lost(found[0], entry.batches, value.get("sent_by"))

    def _take_event(self, event: RouterEvent, line: Mapping[str, Any]) -> None:
        ledger, key = self._ledger, event.key
        self._log.append(event)
        if key not in ledger.streams:
            chain = self._names.chain() or DynamoChain
            ledger.open(key, residency=self._residency, chain=chain, full_reports=self._reports)
        if line.get("anew"):
            ledger.take(entries.IdsBegun(key))
        if line.get("replayed") and ledger.is_replay(event):
            ledger.take(entries.Replayed(event))
            return
        if line.get("unpublished"):
            ledger.take(entries.Unpublished(key, frozenset(_blocks(line["unpublished"]))))
        event.chained = event.chained and key not in self._unchained
        self._names.take(event)
        on_device = isinstance(event.event.data, Stored) and event.storage_tier is StorageTier.DEVICE
        if on_device and not event.chained and key not in self._unchained:
            self._uncomputed.add(self._log.total - 1)

    def _take_stream(self, key: StreamKey, value: dict[str, Any]) -> None:
        about = {name: value[name] for name in _ABOUT if name in value}
        _check_about(about)
        tiers = {StorageTier.of(tier): blocks for tier, blocks in (about.pop("tier_blocks", None) or {}).items()}
        check_residency(about.get("residency", "unique"))
        first_id = about.pop("first_id", None)
        chain, given = self._chain_of(key, value), value.get("stores")
        if given is not None and not isinstance(given, dict):
            raise ValueError(f"stores must map tiers to stores, got {given!r:.80}")
        stores = None if given is None else {StorageTier.of(tier): str(store) for tier, store in given.items()}
        spec = StreamSpec(**about, tier_blocks=tiers, chain=chain, full_reports=self._reports, stores=stores)
        self._ledger.take(entries.Opened(key, first_id, spec))

    def _chain_of(self, key: StreamKey, value: dict[str, Any]) -> Callable[[], Chain]:
        """Return the function that makes an engine's chain; Dynamo's chain if the engine's is unknown."""
        backend = value.get("backend")
        if backend is None:
            if value.get("hash") is not None:
                return self._names.of(value["hash"], value.get("seed"))
            return self._names.chain() or DynamoChain
        self._unchained.discard(key)
        if backend not in known_backends():
            return self._unjudged(key, f"backend {backend!r} is not known here")
        engine = self._checked.header.get("engine") or {}
        models = engine.get("models") if engine.get("backend") == backend else None
        spec = recorded_backend(backend, models)
        if spec.chain is None:
            return DynamoChain
        if models not in (None, spec.models):  # an option may have changed its hash unit or algorithm
            return self._unjudged(key, f"{models!r:.80} is not the unchanged engine of backend {backend!r}")
        manager = spec.make(num_blocks=1, block_size=value.get("block_size") or 16, dp_rank=0, sink=None)
        return partial(spec.chain, manager)

    def _unjudged(self, key: StreamKey, reason: str) -> Callable[[], Chain]:
        """Exclude the hashes of a stream from judging, and add a note with the reason."""
        self._unchained.add(key)
        note = f"{reason}, so its hashes are not judged"
        self._checked.notes += [note] * (note not in self._checked.notes)
        return DynamoChain

    def _take_injected(self, key: StreamKey, value: dict[str, Any]) -> None:
        self._injected.take_fault(key, value)

    def _take_result(self, key: StreamKey, value: dict[str, Any]) -> None:
        self._injected.take_result(key, value)

    def _take_recovered(self, key: StreamKey, value: dict[str, Any]) -> None:
        if value.get("anew"):
            self._ledger.take(entries.IdsBegun(key))
        published = self._published(key, value["events"])
        self._log.note(self._ledger.take(entries.Recovered(published, range(value["start"], value["stop"]))))

    def _published(self, key: StreamKey, events: list[dict[str, Any]]) -> Stream:
        """Return the stream of all events that a worker published."""
        ledger, like = Ledger(), self._ledger.stream(key).spec
        about = {name: getattr(like, name) for name in ("residency", "prefix_closed", "full_reports")}
        stream = ledger.open(key, **about)
        for event in events:
            ledger.take(event_of(event))
        return stream


_ABOUT: Final = ("first_id", "block_size", "num_blocks", "tier_blocks", "residency", "prefix_closed", "clears_below")
"""The keys of a stream's line that are arguments of `Ledger.open`."""


def _check_about(about: Mapping[Any, Any]) -> None:
    """Check the types of the values in a stream's line.

    Raises:
        ValueError: a value has the wrong type.
    """
    tier_blocks = about.get("tier_blocks")
    if tier_blocks is not None and not isinstance(tier_blocks, dict):
        raise ValueError(f"tier_blocks must map tiers to blocks, or be null, got {tier_blocks!r:.80}")
    for tier, blocks in (tier_blocks or {}).items():
        check_integer(f"tier_blocks of {tier!r:.80}", blocks, 0)
    for name, least in (("first_id", 0), ("block_size", 1), ("num_blocks", 1)):
        if about.get(name) is not None:
            check_integer(name, about[name], least, ", or null")
    for name in ("prefix_closed", "clears_below"):
        if not isinstance(about.get(name, True), bool):
            raise ValueError(f"{name} must be true or false, got {about[name]!r:.80}")  # noqa: TRY004 - as the others


def _blocks(value: object) -> list[int]:
    """Return a list if it consists of block hashes."""
    if not isinstance(value, list) or not all(map(is_integer, value)):
        raise ValueError(f"unpublished: expected an array of block hashes, got {value!r:.80}")
    return value


def _loaded(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise CaptureError(f"{where}: cut off: {len(line)} bytes of a line without its end") from None
        what = getattr(error, "msg", None) or str(error)
        raise CaptureError(
            f"{where}: not JSON: {what}; payloads in msgpack are read with their dialect, and as text {TAKES}"
        ) from None
    if not isinstance(value, dict):
        raise CaptureError(f"{where}: expected an object, got {value!r:.80}")
    return value


def _dynamos(value: Mapping[str, Any]) -> RouterEvent:
    """Return the event in a line of Dynamo's JSON, which may be part of a record with a timestamp.

    Raises:
        ValueError: the line has no event.
    """
    if "timestamp" in value and isinstance(value.get("event"), dict):
        value = value["event"]
    if "worker_id" in value:
        return RouterEvent.from_dict(value)
    if "data" in value:
        return RouterEvent(0, KvCacheEvent.from_dict(value))
    raise ValueError(f"expected the header of a capture ({HEADER}), or an event in Dynamo's JSON")
