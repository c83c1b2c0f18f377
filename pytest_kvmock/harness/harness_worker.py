"""A worker of a harness: it is made from a profile, records its operations, and publishes to the router."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile
from pytest_kvmock.engines.base.manager import KvManager, protocol_mismatch
from pytest_kvmock.engines.worker import KvWorker
from pytest_kvmock.harness.publisher import Publisher
from pytest_kvmock.harness.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_kvmock.harness.roles import Role
    from pytest_kvmock.harness.under_test import IndexMethod
    from pytest_kvmock.values.sinks import Sink
    from pytest_kvmock.values.tokens import Prompt, TokenIds

_MANAGERS: Final[set[type]] = set()
"""Classes that were already found to have the methods of a manager, as each test makes managers."""


class HarnessWorker(KvWorker):
    """A worker of a harness: made from a profile, with recorded operations; it may announce a restart. Its events are
    held until the harness knows it.

    Args:
        spec: its backend.
        worker_id: its id.
        dp_rank: its rank.
        profile: its size and kind.
        publisher: receives its events.
        recording: records the operations on it.
        rng: source of generated tokens and of the names of partial blocks.
        by_tokens: the method that queries the index under test by tokens; None: the index is not queried by tokens.
        role: its role in a P/D pair; None: it is in no pair. The operations of a worker with a role are not recorded.
        below: the tiers below its device, as the option `tiers` of its backend; None: no tiers.

    Raises:
        ValueError: the backend rejected the options, raised, or made something that is no manager or belongs to another
            backend.

    Attributes:
        spec: its backend.
        role: its role in a P/D pair, or None.
        rejoin: joins its port to those of the other ranks of its worker; None if it has no port.
    """

    rejoin: Callable[[], None] | None = None

    def __init__(
        self,
        spec: BackendSpec,
        worker_id: int,
        dp_rank: int,
        *,
        profile: EngineProfile,
        publisher: Publisher,
        recording: Recording,
        rng: Random,
        by_tokens: IndexMethod | None = None,
        role: Role | None = None,
        below: Any = None,
    ) -> None:
        self.spec, self.role = spec, role
        self._by_tokens = by_tokens
        self._publisher = publisher
        options = {} if below is None else {"tiers": below}
        options |= {} if role is None else role.options_of(spec)
        super().__init__(
            partial(_make_manager, spec, profile, dp_rank, options),
            worker_id,
            dp_rank,
            sink=publisher,
            prefix_caching=profile.prefix_caching,
            chunk=profile.chunk,
            rng=rng,
            driver=spec.driver,
            holds_events=True,
            log=recording if role is None else None,
            publishes=role is None or role.publishes,
            pair=None if role is None else role.pair,
        )

    def accept(self, prompt: Prompt | TokenIds) -> Prompt:
        """Accept a request. A prompt without tokens is rejected if the index under test can only be queried by tokens.

        Otherwise each event of the request would make the index fail.
        """
        accepted = super().accept(prompt)
        if self._by_tokens is not None and self.publishes:
            self._by_tokens.question((), accepted.tokens)
        return accepted

    @property
    def next_id(self) -> int | None:
        """The id of its next event; None while it holds events, or while something other than the test drives it."""
        if self._recorder.held or getattr(self._engine, "driver", None) is not None:
            return None
        return self._publisher.next_id(self.worker_id, self.dp_rank)

    def _begin_anew(self) -> None:
        """Begin again with a new port, joined to those of the other ranks; a fleet or a server joins ports itself."""
        super()._begin_anew()
        if self.rejoin is not None and self._engine is None:
            self.rejoin()

    def _announce_restart(self, announced: bool) -> None:
        """Restart the worker's stream and `KvPublisher`; if announced, first remove it from ledger and indexes."""
        self._publisher.worker_restarted((self.worker_id, self.dp_rank), announced=announced)


def options_of(profile: EngineProfile) -> dict[str, Any]:
    """Return the options that a profile passes to the backend of its workers: tiers, if it has any."""
    return {} if profile.tiers is None else {"tiers": profile.tiers}


def _make_manager(
    spec: BackendSpec, profile: EngineProfile, dp_rank: int, options: Mapping[str, Any], sink: Sink | None
) -> KvManager:
    """Make the block manager of a worker; check that it has a manager's methods and is of this backend."""
    spec.check_options(options)
    try:
        manager = spec.make(
            num_blocks=profile.num_blocks, block_size=profile.block_size, dp_rank=dp_rank, sink=sink, **options
        )
    except ValueError:  # a rejection, with its own message
        raise
    except Exception as error:
        raise ValueError(f"backend {spec.name!r}: make raised {type(error).__name__}: {error}") from error
    if type(manager) not in _MANAGERS:
        wrong = protocol_mismatch(manager, KvManager)
        if wrong is not None:
            raise ValueError(f"backend {spec.name!r} made {wrong}")
        _MANAGERS.add(type(manager))
    if manager.backend != spec.name:
        raise ValueError(
            f"backend {spec.name!r} made a manager that calls itself {manager.backend!r}; "
            "a test would run on another backend than its id names"
        )
    return manager
