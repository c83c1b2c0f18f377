"""The roles of a test's workers in P/D pairs, as the `roles` key of the `kvmock` marker gives them."""

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
    """What the workers of one role are made by.

    Attributes:
        pair: what they are for.
        workers: how many there are.
        backend: theirs; None: the harness's.
        publishes: whether they publish.
        sizes: fields of `EngineProfile` in which they differ from the harness's, and `dp_size`.
    """

    pair: PairRole | SglangRole
    workers: int
    backend: BackendSpec | None
    publishes: bool
    sizes: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """How many ranks each worker has."""
        ranks: int = self.sizes["dp_size"]
        return ranks

    @property
    def engine(self) -> dict[str, Any]:
        """Fields of `MockEngineArgs` of its engines."""
        pair = self.pair
        semantics = "mixed" if pair.hand_over == IN_ROOMS else "1.6.1"  # those whose schedulers take pairs
        fields = {"worker_type": pair.worker_type, "hand_over": pair.hand_over, "pair": pair.options}
        return {**fields, "semantics": semantics}

    def options_of(self, spec: BackendSpec) -> dict[str, Any]:
        """Options that its workers ask of their backend, where that has them: SGLang's pairs have its unified cache."""
        return {"unified": True} if self.pair.hand_over == IN_ROOMS and "unified" in spec.options else {}


def read_roles(given: object, dp_size: int = 1) -> dict[str, Role]:
    """The roles of a test, by worker type.

    Args:
        given: a mapping of worker types to numbers of workers, or to mappings of what they are:
            `workers`, `backend`, `hand_over` ("vllm"), `publishes`, fields of `EngineProfile` and
            of `PairOptions`.
        dp_size: how many ranks workers have of a role that does not say it.

    Raises:
        ValueError: it is invalid, or a value is out of range.
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
