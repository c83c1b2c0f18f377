"""The index under contract: how a contract makes it, and the harnesses that it runs in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final, Literal

from pytest_kvmock.engines.backends import BackendSpec, EngineProfile, backend_spec
from pytest_kvmock.engines.base.driver import Traits
from pytest_kvmock.engines.vllm.hashes import VllmHasher
from pytest_kvmock.harness.reduce import reproduce
from pytest_kvmock.harness.reduce.program import NotReduced, profile_text
from pytest_kvmock.harness.router_harness import RouterHarness
from pytest_kvmock.harness.under_test import IndexUnderTest
from pytest_kvmock.oracle.index.index import CLEARS, Clears
from pytest_kvmock.testing.drafts import Player
from pytest_kvmock.testing.index.index_driver import IndexDriver
from pytest_kvmock.testing.subject import (
    LEAST_OF_BACKENDS,
    STORES,
    SaysUnjudged,
    call_with,
    check_backends,
    refuse,
    refuse_to_wait,
    room_for,
    takes_argument,
    unjudged_text,
)
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.programs.operations import Program
from pytest_kvmock.values.tokens import Prompt

_REDUCED: Final = 20_000
"""The most steps that are replayed to reduce a failure in live traffic."""

MOST_BOUNDED: Final = 100_000
"""The largest `bounded_at_most`."""

KEEPS: Final = ("recently_used", "recently_stored")
"""The policies that a bounded index can declare for what it keeps."""

SURVIVED: Final = {"double": "an event that is delivered twice", "restart": "a worker that restarts unannounced"}
"""The faults that an index can declare to survive, each in words."""


_KEYS: Final = {"lora_name": "LoRA adapters", "cache_salt": "cache salts", "multimodal": "images"}
"""What a prompt may carry, in words."""


class OverIndex(SaysUnjudged):
    """The common part of an index's tests; see `IndexContract` for its attributes."""

    block_size: ClassVar[int] = LEAST_OF_BACKENDS
    tells_ranks_apart: ClassVar[bool] = True
    backends: ClassVar[Sequence[str | BackendSpec] | None] = None
    clears: ClassVar[Clears] = "rank"
    survives: ClassVar[Sequence[str]] = ()
    threads: ClassVar[bool] = False
    reads_groups: ClassVar[bool] = False
    reads_drafts: ClassVar[bool] = False
    bounded: ClassVar[int | None] = None
    bounded_at_most: ClassVar[int | None] = None
    one_tier: ClassVar[bool] = False
    names: ClassVar[str | BackendSpec | None] = None
    keeps: ClassVar[Literal["recently_used", "recently_stored"] | None] = None
    async_bound: ClassVar[bool] = False
    traits: Traits = Traits()

    @classmethod
    def wrong_declaration(cls) -> str:
        """Return the first invalid or contradictory declaration of the class; "" if there is none."""
        if cls.clears not in CLEARS:
            return f"clears must be 'rank' or 'worker', got {cls.clears!r:.80}"
        survives = cls.survives
        if not isinstance(survives, tuple | list) or not all(each in (*SURVIVED,) for each in survives):
            return f"survives must be a tuple or list of {' and '.join(map(repr, SURVIVED))}, got {survives!r:.80}"
        for name in ("threads", "reads_groups", "reads_drafts", "async_bound", "one_tier"):
            if not isinstance(flag := getattr(cls, name), bool):
                return f"{name} must be True or False, got {flag!r:.80}"
        bounded, most = cls.bounded, cls.bounded_at_most
        if bounded is not None and not (is_integer(bounded, 1) and bounded <= 10_000):
            return f"bounded must be an integer from 1 to 10000 (blocks), or None, got {bounded!r:.80}"
        if most is not None and bounded is None:
            return "bounded_at_most is for an index that forgets: set bounded, too, the blocks that it keeps at least"
        if most is not None and not (is_integer(most, bounded or 1) and most <= MOST_BOUNDED):
            return (
                f"bounded_at_most must be an integer from bounded, {bounded}, to {MOST_BOUNDED} (blocks), or None, "
                f"got {most!r:.80}"
            )
        if cls.keeps not in (None, *KEEPS):
            return f"keeps must be {' or '.join(map(repr, KEEPS))}, or None, got {cls.keeps!r:.80}"
        if cls.keeps is not None and bounded is None:
            return (
                f"keeps = {cls.keeps!r} is for an index that forgets: set bounded, too, the blocks that it keeps at "
                "least"
            )
        return cls._wrong_names()

    @classmethod
    def _wrong_names(cls) -> str:
        """Return what is wrong with the declared `names`; "" if nothing is, or if a backend refuses them when tests
        run.
        """
        if not isinstance(cls.names, str | BackendSpec | None):
            return f"names must be a backend, by name or as a BackendSpec, or None, got {cls.names!r:.80}"
        if cls.names is None or not isinstance(given := cls.backends or (), tuple | list):
            return ""
        try:
            spec, *others = map(backend_spec, (cls.names, *given))
            own = cls._hasher(spec)
            wrong = [each for each in (*others, spec) if cls._hasher(each) != own or not isinstance(own, VllmHasher)]
        except (TypeError, ValueError):
            return ""
        if wrong:
            return f"names is {spec.name!r}, and backends has {wrong[0].name!r}, whose blocks have other names"
        return ""

    def make_index(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - for those who define it
        """Make a new index. A subclass defines this, without arguments or with the tokens per block."""
        __tracebackhide__ = True
        refuse(self, "define make_index(self) or make_index(self, block_size), which makes a new index")

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Wait for the answer of an async index. Define this for such an index, with a loop that outlives the test."""
        __tracebackhide__ = True
        refuse_to_wait(self, "index", awaitable)

    def _made(self) -> Any:
        __tracebackhide__ = True
        return call_with(self, self.make_index, "make_index", self.block_size)

    def _specs(self) -> list[BackendSpec]:
        """Return the backends whose traffic the index must follow."""
        __tracebackhide__ = True
        given = self.backends if self.backends is not None or self.names is None else (self.names,)
        return check_backends(self, given, self.block_size)

    def _names_of(self) -> Callable[[Prompt], list[int]] | None:
        """Return a function that names blocks like the engine whose names the index computes; None if it computes
        none.
        """
        __tracebackhide__ = True
        if self.names is None:
            return None
        (spec,) = check_backends(self, [self.names], self.block_size)
        manager: Any = spec.make(num_blocks=8, block_size=self.block_size, dp_rank=0, sink=None)

        def names(prompt: Prompt) -> list[int]:
            return [*manager.new_request(prompt).tokens.names]

        return names

    @classmethod
    def _hasher(cls, spec: BackendSpec) -> object:
        return getattr(spec.make(num_blocks=8, block_size=cls.block_size, dp_rank=0, sink=None), "hasher", None)

    def _harness(self, spec: BackendSpec, num_blocks: int) -> RouterHarness:
        """Return a harness of a backend, with room for a prompt of `num_blocks` blocks and an index made for it."""
        __tracebackhide__ = True
        return self._world(spec, self._profile(spec, num_blocks, 1, 1))

    def _profile(self, spec: BackendSpec, num_blocks: int, workers: int, dp_size: int) -> EngineProfile:
        """Return the sizes of an engine of a backend, with room for a prompt of `num_blocks` blocks."""
        room = room_for(num_blocks, spec.traits_at(self.block_size), self.block_size)
        return EngineProfile(self.block_size, room, workers, dp_size)

    def _world(self, spec: BackendSpec, profile: EngineProfile) -> RouterHarness:
        """Return a harness of a backend with this profile, and with an index made for it."""
        __tracebackhide__ = True
        self.traits = profile.traits(spec)
        return RouterHarness(profile, spec, self._under_test(), sync="every", clears=self.clears)

    def _follow(self, spec: BackendSpec, profile: EngineProfile, program: Program, seed: int) -> None:
        """Play a program on a harness of a backend, and compare the index after each step."""
        __tracebackhide__ = True
        harness = self._world(spec, profile)
        played = Program()
        try:
            with harness:
                player = Player(harness)
                for step in program:
                    played = Program(*played, step)
                    player.do(step)
                    self._check(harness)
        except Exception as error:
            error.add_note(self._reproduction(harness))
            error.add_note(
                f"in traffic over {spec.name}, seed {seed}; play(RouterHarness({profile_text(profile)}, {spec.name!r}, "
                f"index, sync='every'), program) shows it, where\nprogram = {played!r}"
            )
            raise

    def _reproduction(self, harness: RouterHarness) -> str:
        """Return the smallest stream that reproduces the error of a harness, or why there is none."""
        traits = self.traits

        def made() -> Any:
            self.traits = traits
            return self._under_test()

        try:
            found = reproduce(harness, work=_REDUCED, make_index=made)
        except NotReduced as reason:
            return f"no smaller reproduction: {reason}"
        except Exception as error:  # noqa: BLE001 - the user's index, replayed; the first failure is still reported
            return f"no smaller reproduction: the search ended in {type(error).__name__}: {error}"
        name, size = type(self).__name__, str(self.block_size) if takes_argument(self.make_index) else ""
        text = found.as_test(made_by=(name, f"make_index({size})"))
        cut = f"cut from {found.cut_from:,} {found.level} to {found.size:,}"
        return f"the smallest reproduction, {cut}, to be put below {name}:\n{text}"

    def _under_test(self) -> IndexUnderTest:
        """Return a new index, wrapped with the contract's declarations."""
        __tracebackhide__ = True
        return IndexUnderTest(self._made(), bounded=self.bounded)

    def _check(self, harness: RouterHarness) -> None:
        """Compare the index, and raise on any error."""
        __tracebackhide__ = True
        if harness.inside.is_async:
            self.run(harness.aflush())
        harness.events.assert_no_event_errors()

    def _start(self) -> IndexDriver:
        __tracebackhide__ = True
        if wrong := self.wrong_declaration():
            refuse(self, wrong)
        self._specs()
        index = self._made()
        wrong = ""
        try:
            under_test = IndexUnderTest(index, bounded=self.bounded)
        except (TypeError, ValueError) as error:
            wrong = str(error)
        if wrong:
            refuse(self, f"make_index gave {index!r:.80}: {wrong}")
        if self._properties is not None:
            self._note_unjudged(unjudged_text(self._lets(under_test)))
        if self.one_tier and under_test.tiered is not None:
            refuse(
                self, f"one_tier is for an index that counts all tiers alike, and this one has {under_test.tiered.name}"
            )
        driver = IndexDriver(under_test, self.block_size, self.run)
        driver.names_of = self._names_of()
        return driver

    def _lets(self, index: IndexUnderTest) -> dict[str, bool]:
        """Return whether each optional property of an index is judged; its name has the setting that would allow it."""
        specs = self._specs()
        traits = [spec.traits_at(self.block_size) for spec in specs]
        keys = {key for spec in specs for key in spec.prompt_keys}
        lacking = " and ".join(words for key, words in _KEYS.items() if key not in keys)
        tells_tiers = index.tiered is not None
        return {
            "copies of a block (vllm in backends)": any(each.copies for each in traits),
            "cache groups (a hybrid model in backends, or reads_groups = True)": self.reads_groups
            or any(each.publishes_groups for each in traits),
            "partial blocks (trtllm in backends)": any(each.partial_blocks for each in traits),
            "tiers below the device (find_tiered(local_hashes) or match_tiered(tokens, extra))": tells_tiers,
            "native offload (vllm in backends)": not tells_tiers
            or any("tiers" in spec.options and each.copies for spec, each in zip(specs, traits, strict=True)),
            "adapters, salts and images (match_tokens(tokens, extra))": index.plain.takes_extra,
            f"{lacking} (a backend that names blocks by them)": not (lacking and index.plain.takes_extra),
            "whether it grows (size())": callable(getattr(index.index, "size", None)),
            "workers that go (remove_worker(worker_id))": index.remove_worker is not None,
            "ranks (tells_ranks_apart = True)": self.tells_ranks_apart,
            "a rank that goes (remove_worker_dp_rank(worker_id, dp_rank))": index.remove_rank is not None
            or not self.tells_ranks_apart,
            "calls from threads (threads = True)": self.threads,
            "an event twice, an unannounced restart (survives)": set(SURVIVED) <= set(self.survives),
            "an index that forgets (bounded, bounded_at_most)": self.bounded is not None,
            "which blocks it keeps (keeps)": self.bounded is None or self.keeps is not None,
            STORES: getattr(self, "stores", None) is not None or not tells_tiers,
        }
