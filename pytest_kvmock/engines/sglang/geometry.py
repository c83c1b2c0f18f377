"""The numbers of a hybrid model: its window, its recurrent states, and when states are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Self

from pytest_kvmock.engines.sglang.parts import States, Window
from pytest_kvmock.values.checks import check_integer

POLICIES: Final = ("lru", "lfu", "slru")
"""The policies of a tree with windows or states: those that SGLang's command line offers and recordings cover."""

SPARE_SLOTS: Final[Mapping[str, int]] = {"extra_buffer": 2, "no_buffer": 0}
"""Extra state slots of a running request, by strategy: two that are written alternately, or none."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The parts of a hybrid model. Lengths are in tokens; SGLang 0.5.23's option or variable is in brackets.

    Attributes:
        window: length of the sliding window, for most models the config's value minus one; None if there is none.
        window_ratio: size of the window pool as a share of the full attention pool (`--swa-full-tokens-ratio`).
        window_interval: in decode, a window slides once this many tokens have left it (`SGLANG_SWA_EVICTION_INTERVAL`).
        window_gates: whether a prefix can be reused only if its window is cached (not with DeepSeek-V4.1's replay).
        release_window: release the lock of a window once a request has generated a window's length
            (`SGLANG_OPT_RELEASE_PREFILL_SWA`).
        states: number of slots for recurrent states; None: the model has no states.
        state_grid: tokens per chunk of the model, which has a state after each chunk.
        state_interval: in decode, the state is kept at each multiple of this (`--mamba-track-interval`).
        state_strategy: "extra_buffer", with states on the grid, or "no_buffer", with a state after the last computed
            token, for pages of one token (`--mamba-scheduler-strategy`).
        states_per_path: states that a path keeps when it gets another one (`--mamba-max-states-per-path`); None: all.
    """

    window: int | None = None
    window_ratio: float | Fraction = 0.8
    window_interval: int = 128
    window_gates: bool = True
    release_window: bool = False
    states: int | None = None
    state_grid: int = 64
    state_interval: int = 256
    state_strategy: str = "extra_buffer"
    states_per_path: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self | None:
        """Make a geometry from options; None if they name neither a window nor states.

        Raises:
            ValueError: an option belongs to a part that the model lacks, or a value is invalid for every page size.
        """
        for name, value in options.items():
            part = "states" if name.startswith("state") else "window"
            if value is not None and options.get(part) is None:
                raise ValueError(f"{name}={value!r:.80} has no effect without {part}=")
        if all(value is None for value in options.values()):
            return None
        return cls(**options)

    def __post_init__(self) -> None:
        for name in ("window", "states"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, ", or None")
        for name in ("window_interval", "state_grid", "state_interval"):
            check_integer(name, getattr(self, name), 1, " (tokens)")
        for name in ("window_gates", "release_window"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r:.80}")  # noqa: TRY004 - one error
        ratio = self.window_ratio
        if not isinstance(ratio, int | float | Fraction) or isinstance(ratio, bool) or not 0 < ratio <= 1:
            raise ValueError(f"window_ratio must be a number above 0 and at most 1, got {ratio!r:.80}")
        if not isinstance(self.state_strategy, str) or self.state_strategy not in SPARE_SLOTS:
            known = " or ".join(map(repr, SPARE_SLOTS))
            raise ValueError(f"state_strategy must be {known}, got {self.state_strategy!r:.80}")
        if self.states is not None and self.states < self.slots_to_start:
            raise ValueError(
                f"states must be at least {self.slots_to_start}, the slots of one request; got {self.states}"
            )
        if self.states_per_path is not None:
            check_integer("states_per_path", self.states_per_path, 0, ", or None")

    def check(self, num_blocks: int, page: int, policy: str) -> None:
        """Refuse a cache that this geometry does not fit.

        Raises:
            ValueError: the number of pages, the page size or the policy does not fit.
        """
        if policy not in POLICIES:
            raise ValueError(
                f"policy must be lru, lfu or slru for a hybrid model or with speculative, got {policy!r:.80}"
            )
        window = self.make_window(num_blocks, page)
        if window is not None and window.capacity < min(num_blocks, window.pages + 1):
            raise ValueError(
                f"a window of {self.window} tokens needs {window.pages + 1} blocks of {page}, and window_ratio "
                f"{float(self.window_ratio):g} of {num_blocks} blocks is {window.capacity}"
            )
        if self.states is None:
            return
        if self.state_strategy == "no_buffer" and page > 1:
            raise ValueError(f"state_strategy 'no_buffer' is for a block_size of 1, got {page}")
        if self.state_grid % page and page % self.state_grid:
            raise ValueError(f"state_grid must be a multiple of block_size {page}, or divide it; got {self.state_grid}")
        if self.state_interval % self.grid(page):
            raise ValueError(
                f"state_interval must be a multiple of the grid, {self.grid(page)} tokens, got {self.state_interval}"
            )

    @property
    def spare_slots(self) -> int:
        """State slots of a running request in addition to its own; 0 without states."""
        return 0 if self.states is None else SPARE_SLOTS[self.state_strategy]

    @property
    def slots_to_start(self) -> int:
        """Slots that must be free or evictable before a request is tried: its own, its spares, and two more."""
        return 0 if self.states is None else 1 + self.spare_slots + 2

    @property
    def has_grid(self) -> bool:
        """Whether states are kept on a grid, not after the last computed token."""
        return self.states is not None and self.state_strategy == "extra_buffer"

    def grid(self, page: int) -> int:
        """Return the distance of positions where a prefill may keep a state: a chunk of the model, in whole pages."""
        return max(self.state_grid, page)

    def tracked(self, start: int, end: int, branch: int | None, page: int) -> int | None:
        """Return the position at which a prefill chunk from `start` to `end` keeps a state; None if it keeps none.

        The grid begins at `start`. A branch on the grid is preferred to a later position.
        """
        grid = self.grid(page)
        last = end - (end - start) % grid
        if last == start:
            return None
        if branch is not None and start < branch < last and not (branch - start) % grid:
            return branch
        return last

    def make_window(self, num_blocks: int, page: int) -> Window | None:
        """Make the window part for `num_blocks` pages of full attention; it has at least one page."""
        if self.window is None:
            return None
        return Window(max(1, int(num_blocks * self.window_ratio)), -(-self.window // page), gates=self.window_gates)

    def make_states(self) -> States | None:
        """Make the state part."""
        return None if self.states is None else States(self.states, self.states_per_path)
