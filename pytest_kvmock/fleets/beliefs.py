"""Comparison of a router's beliefs about loads, overlaps and workers with the calls and events that it got.

Theory of operation. A router that offers `loads()`, `overlap(request)`, `believed(request)` or `workers()` is queried
before each pick. Its answers are compared with the load book, the reference index of the same delivered events, the
prompts sent to each worker, and the workers that it was notified of. `believed` is for routers that keep a tree of sent
prompts. They do not learn of evictions or silent restarts, so they may believe in more blocks than a worker holds, but
not in more than was ever sent there. Loads and workers are also compared after each hook, to find the hook after which
they differ; only a difference at a pick counts. The first wrong belief of each kind is kept; later ones of that kind
may follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.fleets.fleet_events import by_worker
from pytest_kvmock.fleets.report.rows import Belief
from pytest_kvmock.fleets.router_calls import RouterError
from pytest_kvmock.fleets.routing.loads import LoadBook
from pytest_kvmock.fleets.routing.routing import DECODE_ALONE, id_of
from pytest_kvmock.oracle.hygiene.rules import LOAD_DRIFT, OVERLAP_DRIFT, WORKER_DRIFT
from pytest_kvmock.values.checks import is_integer

if TYPE_CHECKING:
    from pytest_kvmock.fleets.clock.passes import Calls
    from pytest_kvmock.fleets.fleet_events import Knowledge
    from pytest_kvmock.fleets.owner_beliefs import OwnerBeliefs
    from pytest_kvmock.fleets.report.rows import OwnerPromise
    from pytest_kvmock.fleets.router_calls import RouterCalls
    from pytest_kvmock.fleets.routing.routing import RouterRequest, Worker

_PARTS: Final = ("prefill tokens", "blocks", "requests")


class Beliefs:
    """Compares a router's beliefs with the calls and events that it got.

    Args:
        calls: calls the router.
        knowledge: the reference.
        book: the load book.
        cordoned: workers that are there but not candidates. The router is not notified, but may notice that they are
            missing.
        has_blocks: whether the engine of a worker has blocks when the run begins.

    Attributes:
        found: the wrong beliefs.
        workers_of: returns the workers whose blocks of a request are compared: all, or for P/D pairs those of one role.
    """

    def __init__(
        self,
        calls: RouterCalls,
        knowledge: Knowledge[Any],
        book: LoadBook,
        cordoned: Collection[Worker],
        has_blocks: Callable[[Worker], bool],
    ) -> None:
        self._calls = calls
        # Loads that a stopped clock left open are not a mistake of the router.
        left = "loads" if calls.left_open else None
        self._methods = {name: method for name, method in calls.beliefs.items() if name != left}
        self._owners: OwnerBeliefs | None = None
        if "overlap_by_owner" in self._methods and knowledge.reference.stores:
            from pytest_kvmock.fleets.owner_beliefs import OwnerBeliefs

            self._owners = OwnerBeliefs(knowledge, calls.name)
        self._knowledge = knowledge
        self._book = book
        self._cordoned = cordoned
        self._hidden: Collection[Worker] = ()  # cordoned at the last pick, so the router has not seen them since
        self._has_ranks = knowledge.has_ranks
        # Counts prefill tokens by the overlap at the pick; the book counts by the overlap on arrival. Both are right.
        self._at_pick = LoadBook(book.loads)
        self._fresh: Mapping[Worker, int] = {}
        self._restarts = calls.restarts
        self._noticed: Mapping[Worker, int] = {}  # overlaps on restarted workers, by an index that noticed the restart
        self._untold = knowledge.untold
        self._sent = calls.sent if "believed" in self._methods else None
        if self._sent is not None:
            self._sent.begin({worker for worker in book.loads if has_blocks(worker)})
        self._last_believed: Mapping[Worker, int] | None = None
        self.workers_of: Callable[[RouterRequest], Iterable[Worker]] = lambda _: book.loads
        self._last_call: dict[Worker, str] = {}
        self._removed: dict[Worker, str] = {}
        self._gone: set[Worker] = set()  # removed, and not back
        self._late: set[Worker] = set()  # workers in `_gone` with an event since their removal
        self._open: dict[Any, Worker] = {}  # open requests, each with its worker
        self._cordoned_once: set[Worker] = set()
        self._parted: dict[str, str] = {}
        self.found: list[Belief] = []

    def after(self, hook: str, now_ms: float, argument: Any, worker: Worker | None = None) -> Calls:
        """Note a hook, whether the router has it or not, and check whether its beliefs differ afterwards."""
        at = f"at {now_ms:g} ms" + ("" if self._calls.has(hook) else ", which it does not have")
        if hook == "apply":
            data = argument.event.data
            of = (argument.worker_id, argument.event.dp_rank)
            name = of if self._has_ranks else of[0]
            if self._sent is not None:
                self._sent.stored(argument, name)
            self._restarts.applied(argument, name, self._knowledge.new_index, now_ms)
            if name in self._gone:
                self._late.add(name)
            text = f"apply() of {type(data).__name__} event {argument.event.event_id} {at}"
            self._last_call[of] = self._last_call[of[0]] = text
            return
        if hook in ("worker_added", "worker_removed"):
            self._restarts.forget(argument)
            if self._sent is not None:
                self._sent.forget(argument)
        if hook == "worker_added":
            self._at_pick.loads.pop(argument, None)
            self._at_pick.add_worker(argument)
            self._gone.discard(argument)
            self._late.discard(argument)
        elif hook == "worker_removed":
            self._gone.add(argument)
            self._at_pick.loads.pop(argument, None)
            self._removed[argument] = f"worker_removed({argument!r}) {at}"
        elif hook == "dispatched" and worker is not None:
            if worker not in self._at_pick.loads:
                self._at_pick.add_worker(worker)
            self._at_pick.dispatched(argument, worker, self._fresh.get(worker, 0))
            self._open[argument, argument.phase] = worker
            if argument.phase != "decode" or argument.picked is DECODE_ALONE:  # else another worker computes it
                self._restarts.dispatched(argument, worker, self._noticed.get(worker, self._fresh.get(worker, 0)))
            if self._sent is not None:
                self._sent.sent(argument.local_hashes, worker)
        elif hook == "first_token":
            self._at_pick.first_token(argument)
            self._restarts.prefilled(argument)
        elif hook in ("finished", "withdrawn"):  # a withdrawn request counts nowhere
            self._at_pick.finished(argument)
            self._restarts.prefilled(argument)
            self._open.pop((argument, argument.phase), None)
        about = repr(argument)
        if hasattr(argument, "number"):
            about = f"request {argument.number}" + ("" if argument.phase is None else f", {argument.phase}")
        text = f"{hook}({about}) {at}"
        if hook in ("worker_added", "worker_removed"):
            before = self._last_call.get(argument, "")
            self._last_call[argument] = f"{before}, and {text}" if before.startswith("worker_removed") else text
        for rule, compare in ((LOAD_DRIFT, self._loads), (WORKER_DRIFT, self._workers)):
            if self._is_kept(rule):
                continue
            if (yield from compare(None, now_ms)) is None:
                self._parted.pop(rule, None)
            else:
                self._parted.setdefault(rule, text)

    def restarted(self, workers: Iterable[Worker]) -> None:
        """Note that workers have restarted and that the router was not notified."""
        self._restarts.restarted(workers)

    def _is_kept(self, rule: str) -> bool:
        return any(each.rule == rule for each in self.found)

    def of_last(self, worker: Worker) -> int | None:
        """Return the number of blocks of the last checked prompt that the router believed to be on a worker; None:
        unknown.
        """
        return None if self._last_believed is None else self._last_believed.get(worker, 0)

    def check(self, request: RouterRequest) -> Calls:
        """Compare the router's beliefs before a pick.

        Raises:
            RouterError: a method raised, or returned a value of another shape.
        """
        self._fresh = self._knowledge.reference_overlaps(request)
        self._noticed = self._restarts.overlaps(request, self._knowledge.forms)
        for rule, compare in (
            (WORKER_DRIFT, self._workers),
            (OVERLAP_DRIFT, self._overlaps),
            (OVERLAP_DRIFT, self._believed),
            (OVERLAP_DRIFT, self._by_owner),
            (LOAD_DRIFT, self._loads),
        ):
            # The report also needs the later answers of these two.
            if self._is_kept(rule) and compare not in (self._believed, self._by_owner):
                continue
            drift = yield from compare(request, request.now_ms)
            if self._is_kept(rule):
                continue
            if drift is not None:
                worker, observed, expected, follows = drift
                after = self._parted.get(rule)
                if rule == OVERLAP_DRIFT:
                    after = self._last_call.get(worker)
                    hook = "" if after is None else f"; the last call about that worker is {after}"
                    removed = self._removed.get(worker)
                    if removed is not None and removed not in hook:
                        hook += f", and before that {removed}: what it held until then is gone"
                else:
                    hook = "" if after is None else f"; they differ since {after}"
                pick = "pick" if request.phase is None else f"{request.phase} pick"
                where = f"before the {pick} for request {request.number} at {request.now_ms:g} ms"
                belief = Belief(
                    rule, request.now_ms, request.number, worker, f"{observed} {where}{hook}", expected, follows
                )
                self.found.append(belief)
                self._knowledge.drifted(belief)
        self._hidden = frozenset(self._cordoned)
        self._cordoned_once.update(self._cordoned)

    # ------------------------------------------------------------------------------------------------ comparisons

    def _ask(self, method: str, request: RouterRequest | None, now_ms: float, *arguments: Any) -> Calls:
        return (yield from self._calls.ask(method, self._methods[method], request, now_ms, *arguments))

    def _fail(
        self, method: str, shape: str, answer: object, request: RouterRequest | None, now_ms: float
    ) -> RouterError:
        return RouterError(f"{self._calls.name}.{method}() must return {shape}, got {answer!r:.80}", now_ms, request)

    def _check_names(self, method: str, names: Iterable[object], request: RouterRequest | None, now_ms: float) -> None:
        """Refuse a key that is not a worker's name; otherwise the worker would count as not reported."""
        for name in names:
            if not (_is_pair(name) or (is_integer(name) and not self._has_ranks)):
                allowed = "its id and rank, (0, 0)" if self._has_ranks else "its id, 0"
                text = f"names a worker {name!r:.80}; in this fleet a worker is named by {allowed}"
                raise RouterError(f"{self._calls.name}.{method}() {text}", now_ms, request)

    def _may_be_left_out(self, worker: Worker) -> bool:
        """Whether a router may leave out a worker: it is not there, or was not among the last candidates."""
        return worker not in self._book.loads or worker in self._cordoned or worker in self._hidden

    def _workers(self, request: RouterRequest | None, now_ms: float) -> Calls:
        if "workers" not in self._methods:
            return None
        answer = yield from self._ask("workers", request, now_ms)
        live = set(self._book.loads)
        if not isinstance(answer, Iterable) or isinstance(answer, str | bytes):
            raise self._fail("workers", "the workers that it knows", answer, request, now_ms)
        known = list(answer)
        self._check_names("workers", known, request, now_ms)
        believed = set(by_worker(dict.fromkeys(known, 0), has_ranks=self._has_ranks))
        missing = [each for each in self._book.loads if each not in believed and not self._may_be_left_out(each)]
        extra = sorted(believed - live, key=repr)
        if not missing and not extra:
            return None
        wrong = [f"does not know worker {each!r}" for each in missing[:3]]
        wrong += [f"knows worker {each!r}, which is not there" for each in extra[:3]]
        expected = f"the workers {', '.join(map(repr, self._book.loads))}" if live else "none, as no worker was there"
        about = (missing or extra)[0]
        return about, f"{self._calls.name}.workers() {' and '.join(wrong)}", expected, False

    def _loads(self, request: RouterRequest | None, now_ms: float) -> Calls:
        if "loads" not in self._methods:
            return None
        answer = yield from self._ask("loads", request, now_ms)
        shape = "{worker: (prefill_tokens, blocks, requests)}"
        if not isinstance(answer, Mapping):
            raise self._fail("loads", shape, answer, request, now_ms)
        for each in answer.values():
            fits = isinstance(each, tuple | list) and len(each) == len(_PARTS)
            if not fits or not all(part is None or _is_number(part) for part in each):
                raise self._fail("loads", shape, answer, request, now_ms)
        self._check_names("loads", answer, request, now_ms)
        said: Mapping[Worker, Any] = by_worker(answer, has_ranks=self._has_ranks)
        for worker, load in self._book.loads.items():
            believed = tuple(said.get(worker, (0, 0, 0)))
            right = load.prefill_tokens, load.blocks, load.requests
            also = [self._restarts.prefill_tokens(worker)]
            if worker in self._at_pick.loads:
                also.append(self._at_pick.loads[worker].prefill_tokens)
            wrong = [part is not None and part != expected for part, expected in zip(believed, right, strict=True)]
            wrong[0] = wrong[0] and believed[0] not in also and worker not in self._untold
            if any(wrong):
                before = {each.rule for each in self.found}
                follows = WORKER_DRIFT in before or (wrong == [True, False, False] and OVERLAP_DRIFT in before)
                return (
                    worker,
                    f"{self._calls.name}.loads() says {_load(believed)} of worker {worker!r}",
                    _load(tuple(None if part is None else true for part, true in zip(believed, right, strict=True))),
                    follows,
                )
        for worker in self._over(said):
            if any(part for part in said[worker] if part is not None):
                observed = (
                    f"{self._calls.name}.loads() says {_load(tuple(said[worker]))} of worker {worker!r}, which is gone"
                )
                return (
                    worker,
                    observed,
                    "none: all requests sent there are over",
                    WORKER_DRIFT in {each.rule for each in self.found},
                )
        return None

    def _over(self, named: Iterable[Worker]) -> list[Worker]:
        """Return the named workers that are gone and have no open request."""
        gone = [worker for worker in named if worker in self._gone and worker not in self._book.loads]
        return [worker for worker in gone if worker not in self._open.values()] if gone else gone

    def _of_gone(self, method: str, believed: Mapping[Worker, int], request: RouterRequest) -> Any:
        """Return the first wrong belief about a worker that is gone; None if there is none."""
        for worker in self._over(believed):
            if believed[worker] and (method == "believed" or worker not in self._late):
                whole = len(request.local_hashes)
                observed = (
                    f"{self._calls.name}.{method}() says {believed[worker]} of {whole} blocks on worker {worker!r}"
                )
                return worker, observed, "none, as that worker is gone", False
        return None

    def _overlaps(self, request: RouterRequest | None, now_ms: float) -> Calls:
        if "overlap" not in self._methods or request is None:
            return None
        believed, loads = (yield from self._blocks("overlap", request, now_ms)), self._book.loads
        if believed is None:
            return None
        for worker in self.workers_of(request):
            if worker not in believed and self._may_be_left_out(worker):
                continue
            said, right = believed.get(worker, 0), self._fresh.get(worker, 0)
            noticed = self._noticed.get(worker, right)
            must_notice = "restart" in self._calls.survives
            if self._calls.forgets_cordoned and worker in self._cordoned_once and said < right:
                continue
            if worker not in self._untold and said != noticed and (must_notice or said != right):
                whole = len(request.local_hashes)
                observed = f"{self._calls.name}.overlap() says {said} of {whole} blocks on worker {worker!r}"
                ranks = [each for each in loads if each != worker and id_of(each) == id_of(worker)]
                holds = next((each for each in ranks if self._fresh.get(each, 0) == said > right), None)
                observed += "" if holds is None else f", which {holds!r} holds, another rank,"
                expected = f"{right}, by the reference index of the same events"
                if worker in self._restarts.noticed:
                    after = f"dropped what it held before {self._restarts.noticed[worker]}, which began its ids again"
                    expected = (
                        f"{noticed}, as it {after}"
                        if must_notice
                        else f"{expected}, or {noticed} from a router that {after}"
                    )
                return worker, observed, expected, False
        return self._of_gone("overlap", believed, request)

    def _believed(self, request: RouterRequest | None, now_ms: float) -> Calls:
        if self._sent is None or request is None:
            return None
        self._last_believed = believed = yield from self._blocks("believed", request, now_ms)
        if believed is None:
            return None
        for worker in self.workers_of(request):
            said, most = believed.get(worker, 0), self._sent.most(request.local_hashes, worker)
            if worker not in self._untold and most is not None and said > most:
                whole = len(request.local_hashes)
                observed = f"{self._calls.name}.believed() says {said} of {whole} blocks on worker {worker!r}"
                right = (
                    f"at most {most}: no more of it was sent to that worker, or generated there, since its last "
                    "announced start"
                )
                return worker, observed, right, False
        return self._of_gone("believed", believed, request)

    def _by_owner(self, request: RouterRequest | None, now_ms: float) -> Calls:
        if self._owners is None or request is None:
            return None
        answer, wrong = self._owners.read((yield from self._ask("overlap_by_owner", request, now_ms, request)))
        if wrong:
            raise RouterError(f"{self._calls.name}.overlap_by_owner(): {wrong}", now_ms, request)
        for each in answer.values():
            self._check_names("overlap_by_owner", each, request, now_ms)
        if self._untold:
            return None
        return self._owners.compare(request, answer, self._may_be_left_out, self._noticed)

    @property
    def promises(self) -> Sequence[OwnerPromise]:
        """The blocks in shared stores that the router promised at each pick."""
        return () if self._owners is None else tuple(self._owners.promises)

    def _blocks(self, method: str, request: RouterRequest, now_ms: float) -> Calls:
        """Ask for blocks of a prompt by worker; None: the router does not report them for this role of P/D pairs."""
        answer = yield from self._ask(method, request, now_ms, request)
        if answer is None and request.phase is not None:
            return None
        if not isinstance(answer, Mapping) or not all(is_integer(each) for each in answer.values()):
            raise self._fail(method, "{worker: blocks}", answer, request, now_ms)
        self._check_names(method, answer, request, now_ms)
        return by_worker(answer, has_ranks=self._has_ranks)


def _load(load: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{part} {name.removesuffix('s') if part == 1 else name}"
        for part, name in zip(load, _PARTS, strict=True)
        if part is not None
    )


def _is_pair(name: object) -> bool:
    return isinstance(name, tuple) and len(name) == 2 and all(map(is_integer, name))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
