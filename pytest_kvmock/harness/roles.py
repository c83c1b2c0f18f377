"""The roles of a test's workers in P/D pairs, read from the `roles` key of the `kvmock` marker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile, backend_spec
from pytest_kvmock.engines.base.hand_over import check_way
from pytest_kvmock.engines.base.pair_options import IN_ROOMS, PAIRED, WORKER_TYPES, PairOptions, PairRole
from pytest_kvmock.engines.sglang.pairs.sglang_options import SglangPairOptions, SglangRole
from pytest_kvmock.values.checks import check_integer, unknown_text

_OF_PROFILE: Final = tuple(each.name for each in fields(EngineProfile) if each.name not in ("workers", "seed", "tiers"))
_OF_PAIR: Final = tuple(each.name for each in fields(PairOptions))
_OF_SGLANG: Final = tuple(each.name for each in fields(SglangPairOptions))
_OWN: Final = ("workers", "backend", "hand_over", "publishes")


@dataclass(frozen=True, slots=True)
class Role:
    """The settings of the workers of one role.

    Attributes:
        pair: their role in a pair.
        workers: number of workers.
        backend: their backend; None: the harness's.
        publishes: whether they publish.
        sizes: fields of `EngineProfile` that differ from the harness's, and `dp_size`.
    """

    pair: PairRole | SglangRole
    workers: int
    backend: BackendSpec | None
    publishes: bool
    sizes: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """Number of ranks of each worker."""
        ranks: int = self.sizes["dp_size"]
        return ranks

    @property
    def engine(self) -> dict[str, Any]:
        """Fields of `MockEngineArgs` of its engines."""
        pair = self.pair
        semantics = "mixed" if pair.hand_over == IN_ROOMS else "1.6.1"  # the semantics whose schedulers support pairs
        fields = {"worker_type": pair.worker_type, "hand_over": pair.hand_over, "pair": pair.options}
        return {**fields, "semantics": semantics}

    def options_of(self, spec: BackendSpec) -> dict[str, Any]:
        """Return the options that its workers pass to their backend, if it has them: SGLang's pairs use its unified
        cache.
        """
        return {"unified": True} if self.pair.hand_over == IN_ROOMS and "unified" in spec.options else {}


def read_roles(given: object, dp_size: int = 1) -> dict[str, Role]:
    """Return the roles of a test, by worker type.

    Args:
        given: a mapping of worker types to numbers of workers, or to mappings with the keys `workers`, `backend`,
            `hand_over` ("vllm"), `publishes`, and fields of `EngineProfile` and of `PairOptions`.
        dp_size: number of ranks per worker, for a role that does not set it.

    Raises:
        ValueError: an invalid mapping, or a value out of range.
    """
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f"roles must be a mapping such as {{'prefill': 1, 'decode': 1}}, got {given!r:.80}")
    return {kind: _role(kind, value, dp_size) for kind, value in given.items()}


def _role(kind: object, value: object, dp_size: int) -> Role:
    if kind not in WORKER_TYPES[1:]:
        raise ValueError(f"roles: {unknown_text('worker type', kind, WORKER_TYPES[1:])}")
    where = f"roles[{kind!r}]"
    about: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"workers": value}
    way = check_way(about.get("hand_over", "vllm"), f"{where}: ")
    of_pair = _OF_SGLANG if way == IN_ROOMS else _OF_PAIR
    for name in about:
        if name == "tiers":
            raise ValueError(f"{where}: tiers with a role were not recorded; leave them out")
        if name not in (*_OWN, *_OF_PROFILE, *of_pair):
            raise ValueError(f"{where}: {unknown_text('key', name, (*_OWN, *_OF_PROFILE, *of_pair))}")
    workers = check_integer(f"{where}: workers", about.get("workers", 1), 1)
    publishes = about.get("publishes", True)
    if not isinstance(publishes, bool):
        raise ValueError(f"{where}: publishes must be True or False, got {publishes!r:.80}")  # noqa: TRY004 - one error
    if way not in (*PAIRED, IN_ROOMS):
        allowed = " or ".join(map(repr, (*PAIRED, IN_ROOMS)))
        raise ValueError(f"{where}: hand_over must be {allowed} for engines by hand, got {way!r}")
    try:
        given = {name: about[name] for name in of_pair if name in about}
        pair: PairRole | SglangRole
        if way == IN_ROOMS:
            pair = SglangRole(cast("Any", kind), SglangPairOptions.of(given))
        else:
            pair = PairRole(kind, way, PairOptions.of(given))
        sizes = {"dp_size": dp_size} | {name: about[name] for name in _OF_PROFILE if name in about}
        EngineProfile(**sizes)
        backend = None if about.get("backend") is None else backend_spec(about["backend"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Role(pair, workers, backend, publishes, sizes)
