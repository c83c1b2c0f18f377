"""The engines of a harness: mock engines in virtual time that use its workers; their operations are recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from random import Random
from typing import TYPE_CHECKING, Any, Final

from pytest_kvmock.engines.backends import EngineProfile
from pytest_kvmock.engines.schedulers.args import MockEngineArgs
from pytest_kvmock.engines.worker import RequestError
from pytest_kvmock.fleets.clock.mock_engine import MockEngine
from pytest_kvmock.harness.recording import Recording

if TYPE_CHECKING:
    from pytest_kvmock.engines.backends import BackendSpec
    from pytest_kvmock.engines.schedulers.scheduler import ForwardPass
    from pytest_kvmock.engines.worker import KvWorker
    from pytest_kvmock.fleets.report.report import Report
    from pytest_kvmock.values.tokens import Prompt


class HarnessEngine(MockEngine):
    """An engine of a harness; the operations on it are recorded.

    The tokens that a request generates follow from the seed, the worker, the length and end of its prompt, and the
    number of earlier requests that share these. So they stay the same if other requests are left out, as in a
    reproduction.

    Args:
        args: the arguments of the engine.
        worker: the worker whose manager it uses.
        recording: records the operations.
        seed: seed of generated tokens.

    Attributes:
        driver: the code that currently drives it exclusively, in words; None: the test.
        output_of: returns the source of the tokens generated for a prompt; None: they follow from the seed.
    """

    driver: str | None = None
    output_of: Callable[[Prompt], Random] | None = None

    def __init__(self, args: MockEngineArgs, worker: KvWorker, recording: Recording, seed: int) -> None:
        super().__init__(args, worker=worker, seed=seed)
        self.inside.log = recording
        self.inside.token_source = self._token_source
        self._seed = seed
        self._alike: dict[str, int] = {}
        self._key = worker.worker_id, worker.dp_rank

    def step(self) -> ForwardPass:
        """Run one pass of the engine (`MockEngine.step`).

        Raises:
            RequestError: something else drives the engine.
        """
        self._check_driver("step")
        return super().step()

    def run(self, until_ms: float | None = None) -> Report:
        """Run passes of the engine (`MockEngine.run`).

        Raises:
            RequestError: something else drives the engine.
        """
        self._check_driver("run")
        return super().run(until_ms)

    def _check_driver(self, method: str) -> None:
        if self.driver is not None:
            raise RequestError(f"{method} of {self!r}: {self.driver} drives it while it serves")

    def _token_source(self, prompt: Prompt) -> Random:
        if self.output_of is not None:
            return self.output_of(prompt)
        tokens = prompt.tokens or ()
        asked = f"{len(tokens)}:{tokens[-8:]}"
        number = self._alike[asked] = self._alike.get(asked, 0) + 1
        return Random(f"{self._seed}:{self._key}:{asked}:{number}")  # noqa: S311 - mock data


def engine_args(profile: EngineProfile, spec: BackendSpec, fields: Mapping[str, Any]) -> MockEngineArgs:
    """Return the arguments of an engine made from a profile; its type is that of the backend's scheduler.

    Raises:
        ValueError: a field is unknown, out of range, or contradicts profile or backend. All sizes of the profile count
            as explicit, as its worker was made from them.
    """
    fields = {"engine_type": spec.scheduler, **fields}
    return MockEngineArgs.from_profile(profile, explicit=_SIZES, **fields).following(spec.semantics)


def differences(has: MockEngineArgs, asked: MockEngineArgs) -> str:
    """Return the text of the fields that differ: "max_num_seqs is 256, asked for 3"."""
    names = [each.name for each in dataclasses.fields(has) if each.compare]
    differ = [name for name in names if getattr(has, name) != getattr(asked, name)]
    return ", ".join(f"{name} is {getattr(has, name)!r}, asked for {getattr(asked, name)!r}" for name in differ)


_SIZES: Final = ("num_blocks", "block_size", "prefix_caching", "dp_size", "chunk")
"""The fields of a profile that its engines also have."""


def wrong_fields(fields: Mapping[Any, Any]) -> list[str]:
    """List what is wrong with fields for engines of any backend: with single fields, or else with all together."""
    unnamed = [f"a field is named by a string, got {name!r:.80}" for name in fields if not isinstance(name, str)]
    if unnamed:
        return unnamed
    wrong = []
    for each in ({name: value} for name, value in fields.items()):
        wrong += _wrong_together(each)
    return wrong or _wrong_together(fields)


def _wrong_together(fields: Mapping[str, Any]) -> list[str]:
    try:
        MockEngineArgs.from_profile(EngineProfile(), explicit=(), **fields)
    except ValueError as error:
        return [str(error)]
    return []


def engine_profile(
    profile: EngineProfile, engine: Mapping[str, Any], explicit: Collection[str] | None = None
) -> EngineProfile:
    """Return a profile with the sizes of an engine applied.

    Args:
        profile: the profile.
        engine: fields of `MockEngineArgs`.
        explicit: names of the fields that the profile sets explicitly; see `MockEngineArgs.from_profile`.

    Raises:
        ValueError: a field is unknown, out of range, or contradicts a field that the profile sets.
    """
    if not engine:
        return profile
    args = MockEngineArgs.from_profile(profile, explicit=explicit, **engine)
    return profile.replace(
        num_blocks=args.num_gpu_blocks,
        block_size=args.block_size,
        prefix_caching=args.enable_prefix_caching,
        dp_size=args.dp_size,
    )


def engine_fields(args: MockEngineArgs, profile: EngineProfile, spec: BackendSpec) -> dict[str, Any]:
    """Return the fields from which `engine_args` makes these arguments; groups of fields are mappings."""
    plain = engine_args(profile, spec, {})
    given = {each.name: getattr(args, each.name) for each in dataclasses.fields(args) if each.init}
    given = {name: value for name, value in given.items() if value != getattr(plain, name)}
    for group in ("sglang", "reasoning"):
        if given.get(group) is not None:
            own = dataclasses.asdict(given[group])
            given[group] = {name: value for name, value in own.items() if value is not None}
    return given
