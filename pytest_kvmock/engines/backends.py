"""The registry of backends, and the profile that sizes mock engines.

One subject: the choice and the size of an engine.
This module imports no engine: a spec loads its manager on first use (`makers.py`). Every argument for a backend takes a
name or a `BackendSpec`; a name belongs to a built-in backend or a presently registered one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from pytest_kvmock.engines import makers
from pytest_kvmock.values.checks import check_integer, did_you_mean, is_integer, unknown_text

if TYPE_CHECKING:
    from pytest_kvmock.engines.base.driver import MakeDriver, Traits
    from pytest_kvmock.engines.base.eviction_policy import EvictionPolicy
    from pytest_kvmock.engines.base.manager import KvManager
    from pytest_kvmock.engines.schedulers.scheduler_specs import EngineSemantics, EngineType
    from pytest_kvmock.engines.tiers import Tiers
    from pytest_kvmock.values.dialect import Dialect
    from pytest_kvmock.values.hashed_blocks import Chain
    from pytest_kvmock.values.sinks import GivenSink


_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
HYBRID: Final = "hybrid"
"""The word for the backends of hybrid models, on the command line and in markers."""

SPECULATIVE: Final = "speculative"
"""The word for the backends of engines with a draft model, also on the command line and in markers."""

GROUPS: Final = (HYBRID, SPECULATIVE)
"""The words that stand for several backends (`BackendSpec.group`)."""

_RESERVED: Final = ("all", "no-backend", *GROUPS)  # words of the command line and of the matrix


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One named behaviour of an engine's block manager.

    Attributes:
        name: its name in tests and their ids: letters, digits, `_`, `.` and `-`.
        models: the modelled program and version.
        make: makes a manager; called with `num_blocks`, `block_size`, `dp_rank` and `sink` by keyword.
        residency: "unique" if a block is published once while it is held; "counted" if the engine publishes each copy.
        prefix_closed: whether, in scheduler traffic, a block is evicted before its parent and is linked to no other
            parent. Then the held blocks are always a set of whole prefixes.
        in_matrix: whether tests run on it by default; if not, only tests that name it do.
        driver: makes the driver of its manager (`engines.base.driver.Driver`), from the manager, whether prefix caching
            is on, and a source of random numbers; None for managers that take the moves of Dynamo's scheduler.
        chain: makes, for the stream of one manager, the rule by which block hashes follow from tokens (`wrong_hash`);
            called with the manager, because the rule may depend on its options. None for Dynamo's rule.
        options: further arguments that `make` takes, by keyword; see `variant`.
        scheduler: the scheduler of its engines (`MockEngineArgs.engine_type`).
        semantics: the release of Dynamo for this scheduler, if the engine's arguments name none; None: the scheduler's
            default.
        default_block_size: default tokens of a block.
        real_block_size: tokens of a block with the model that it serves; None: it serves no particular model.
        group: a name for several backends where tests choose backends ("hybrid": engines that serve a hybrid model;
            "speculative": engines with a draft model); None without a group.
        as_read: whether its behaviour was only read in the program's sources, and the program was not run.

    Raises:
        ValueError: a field is invalid.
    """

    name: str
    models: str
    make: Callable[..., KvManager]
    residency: Literal["unique", "counted"] = "unique"
    prefix_closed: bool = True
    in_matrix: bool = True
    driver: MakeDriver | None = None
    chain: Callable[[Any], Chain] | None = None
    options: tuple[str, ...] = ()
    scheduler: EngineType = "vllm"
    semantics: EngineSemantics | None = None
    default_block_size: int = 16
    real_block_size: int | None = None
    group: str | None = None
    as_read: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name in _RESERVED:
            raise ValueError(
                f"a backend's name has letters, digits, '_', '.' and '-', and is not one of {', '.join(_RESERVED)}; "
                f"got {self.name!r}"
            )
        if not isinstance(self.models, str):
            raise ValueError(f"backend {self.name!r}: models must be a string, got {self.models!r:.80}")  # noqa: TRY004 - one error
        if not callable(self.make):
            raise ValueError(f"backend {self.name!r}: make must be callable, got {self.make!r:.80}")  # noqa: TRY004 - one error
        if self.residency not in ("unique", "counted"):
            raise ValueError(f"backend {self.name!r}: residency must be 'unique' or 'counted', got {self.residency!r}")
        if self.scheduler not in (
            "vllm",
            "sglang",
            "trtllm",
        ):  # only for built-in backends, so that no engine is imported
            _check_scheduler(self.name, self.scheduler)
        for field in ("prefix_closed", "in_matrix", "as_read"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise ValueError(f"backend {self.name!r}: {field} must be True or False, got {value!r:.80}")  # noqa: TRY004 - one error
        for field in ("driver", "chain"):
            value = getattr(self, field)
            if value is not None and not callable(value):
                raise ValueError(f"backend {self.name!r}: {field} must be callable, or None, got {value!r:.80}")

    @property
    def traits(self) -> Traits:
        """The traits of its engine, equal to `KvWorker.traits` of its workers.

        They come from a driver with a manager of one block; no worker is made.

        Raises:
            ValueError: the backend refuses a manager of one block of its default size.
        """
        return self.traits_at()

    def traits_at(self, block_size: int | None = None, tiers: Tiers | None = None) -> Traits:
        """Return its `traits` for blocks of `block_size` tokens; a hybrid model's other caches are sized in proportion.

        Args:
            block_size: tokens a block; None: `default_block_size`.
            tiers: the tiers below its device, if it takes any.

        Raises:
            ValueError: the backend refuses blocks of this size, or takes tiers, but not these.
        """
        traits: Traits = self._asked(block_size, tiers if "tiers" in self.options else None).traits
        return traits

    @property
    def prompt_keys(self) -> tuple[str, ...]:
        """The keys of a `Prompt` that its engine hashes in addition to tokens: "lora_name", "cache_salt", "multimodal".

        Raises:
            ValueError: see `traits`.
        """
        return tuple(each for each in self._asked().prompt_keys if each != "session_id")

    def _asked(self, block_size: int | None = None, tiers: Tiers | None = None) -> Any:
        """Return a driver with a manager of this backend, or only the driver's class."""
        if self.driver is None:
            from pytest_kvmock.engines.dynamo.move_driver import MoveDriver

            return MoveDriver
        from random import Random

        size = self.default_block_size if block_size is None else block_size
        below = {} if tiers is None else {"tiers": tiers}
        manager = self.make(num_blocks=1, block_size=size, dp_rank=0, sink=None, **below)
        return self.driver(manager, True, Random(0))  # noqa: S311 - nothing is drawn

    def variant(
        self, name: str, *, prefix_closed: bool | None = None, in_matrix: bool = False, **options: Any
    ) -> BackendSpec:
        """Return a variant of this backend under another name, with some of its options set.

        Args:
            name: name of the variant, and `backend` of its managers.
            prefix_closed: see `BackendSpec`; None: unchanged.
            in_matrix: see `BackendSpec`.
            **options: some of `options`, as for `create_manager`; the others may be set later.

        Raises:
            ValueError: unknown option, invalid value, or invalid name.
        """
        options = self.check_options(options)
        size = _default_block_size(self, options)
        self.make(num_blocks=1, block_size=size, dp_rank=0, sink=None, **options)  # raises for a wrong value

        def make(**sizes: Any) -> KvManager:
            manager = self.make(**sizes, **options)
            manager.backend = name
            return manager

        models = self.models
        if "version" in options:
            models = f"{models.partition(' ')[0]} {options['version']}"
        shown = [f"{option}={value!r}" for option, value in options.items() if option != "version"]
        return dataclasses.replace(
            self,
            name=name,
            models=", ".join([models, *shown]),
            make=make,
            prefix_closed=self.prefix_closed if prefix_closed is None else prefix_closed,
            in_matrix=in_matrix,
            options=tuple(option for option in self.options if option not in options),
            default_block_size=size,
        )

    def check_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options for `make`, without `tiers=None` if it takes no tiers.

        Raises:
            ValueError: it does not have one of the options.
        """
        given = {
            each: options[each] for each in options if each in self.options or (each, options[each]) != ("tiers", None)
        }
        for option in given:
            if option not in self.options:
                if option == "tiers":
                    able = [name for name, spec in BACKENDS.items() if option in spec.options and spec.group is None]
                    shown = f"{', '.join(able)} and some hybrid models do"
                    raise ValueError(f"backend {self.name!r} takes no tiers; {shown}")
                known = f"it has {', '.join(self.options)}" if self.options else "it has none"
                hint = did_you_mean(option, self.options, known)
                raise ValueError(f"backend {self.name!r} has no option {option!r}{hint}")
        return given

    @classmethod
    def of_policy(
        cls,
        name: str,
        policy: Callable[[int], EvictionPolicy],
        *,
        models: str,
        prefix_closed: bool = True,
        in_matrix: bool = True,
    ) -> BackendSpec:
        """Return a backend of Dynamo's newer manager with your own eviction policy.

        Args:
            name: name of the backend.
            policy: makes the policy of one manager; called with the capacity in blocks.
            models: the modelled program and version.
            prefix_closed: False for a policy that may evict a block before its children.
            in_matrix: whether tests run on it by default.

        Raises:
            ValueError: a field is invalid.
        """

        def make(*, num_blocks: int, **sizes: Any) -> KvManager:
            from pytest_kvmock.engines.base.eviction_policy import check_policy
            from pytest_kvmock.engines.base.manager_base import check_num_blocks
            from pytest_kvmock.engines.dynamo.logical import LogicalManager

            eviction = check_policy(name, policy(check_num_blocks(num_blocks)))
            return LogicalManager(backend=name, eviction=eviction, num_blocks=num_blocks, **sizes)

        if not callable(policy):
            raise ValueError(f"backend {name!r}: policy must be callable, got {policy!r:.80}")  # noqa: TRY004 - one error
        return cls(name, models, make, prefix_closed=prefix_closed, in_matrix=in_matrix)


def _default_block_size(spec: BackendSpec, options: Mapping[str, Any]) -> int:
    """Return the default tokens of a block; with cache groups, those of the attention group."""
    groups = options.get("groups")
    for group in groups if isinstance(groups, (list, tuple)) else ():
        if getattr(group, "kind", None) in ("full_attention", "mla_attention"):
            size: int = group.block_size
            return size
    return spec.default_block_size


def _check_scheduler(name: str, scheduler: object) -> None:
    from pytest_kvmock.engines.schedulers.scheduler_specs import SCHEDULERS

    if not isinstance(scheduler, str) or scheduler not in SCHEDULERS:
        known = " or ".join(map(repr, SCHEDULERS))
        raise ValueError(f"backend {name!r}: scheduler must be {known}, got {scheduler!r}")


_VLLM_OPTIONS: Final = ("hash_algorithm", "hash_seed", "enable_caching", "lora_paths", "dcp", "pcp")

_HYBRID_MODELS: Final = (
    ("gpt_oss", "gpt-oss (20b, 120b)", 16, 16),
    ("gemma3", "Gemma 3 27b", 16, 16),
    ("gemma4", "Gemma 4 31b", 16, 32),
    ("qwen3_next", "Qwen3-Next 80B-A3B", 16, 544),
    ("kimi_linear", "Kimi-Linear 48B-A3B", 16, 1920),
    ("kimi_k3", "Kimi-K3 (tensor parallel 8, fp8)", 16, 1536),
    ("deepseek_v4", "DeepSeek-V4-Flash", 64, 256),
    ("llama4", "Llama 4 Scout", 16, 16),
)
"""Name, model, and tokens of a block (default, and the model's own) of each model in `engines/vllm/hybrid_models.py`,
which is not loaded here."""

_RADIX_OPTIONS: Final = ("policy", "protected_threshold", "dynamo_kv_event_format", "speculative")


def _vllm(
    name: str,
    models: str,
    make: Callable[..., KvManager],
    *,
    options: tuple[str, ...] = _VLLM_OPTIONS,
    **fields: Any,
) -> BackendSpec:
    """Return a row of vLLM."""
    return BackendSpec(
        name,
        models,
        make,
        residency="counted",
        in_matrix=False,
        driver=makers.block_pool_driver,
        chain=makers.hash_chain,
        options=options,
        semantics="1.6.1",
        **fields,
    )


def _sglang_model(name: str, models: str, real_block_size: int) -> BackendSpec:
    """Return a row of a hybrid model that SGLang serves."""
    return BackendSpec(
        name,
        f"SGLang 0.5.23, serving {models}",
        makers.sglang_model(name),
        residency="counted",
        in_matrix=False,
        driver=makers.sglang_driver,
        chain=makers.hash_chain,
        options=(*_RADIX_OPTIONS, "tiers"),
        scheduler="sglang",
        real_block_size=real_block_size,
        group=HYBRID,
    )


_LOGICAL: Final = "dynamo-mocker 1.2.1 on kvbm-logical 1.2.1"

BACKENDS: Final[Mapping[str, BackendSpec]] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            BackendSpec("lineage", f"{_LOGICAL}, lineage backend (its default)", makers.lineage, options=("tiers",)),
            BackendSpec("lru", f"{_LOGICAL}, lru backend", makers.lru, options=("tiers",)),
            BackendSpec(
                "multi_lru", f"{_LOGICAL}, multi_lru backend", makers.multi_lru, prefix_closed=False, options=("tiers",)
            ),
            BackendSpec(
                "hash_cache",
                "dynamo-mocker 1.0.2",
                makers.hash_cache,
                prefix_closed=False,
                in_matrix=False,
                driver=makers.whole_move_driver,
                options=("strict",),
            ),
            _vllm(
                "vllm",
                "vLLM 0.33.0",
                makers.vllm,
                options=("version", *_VLLM_OPTIONS, "groups", *makers.GROUP_SETTINGS, "tiers"),
            ),
            _vllm("vllm_0_19", "vLLM 0.19.1", makers.vllm_0_19),
            _vllm(
                "vllm_mtp",
                "vLLM 0.33.0 with a draft model (MTP, 3 drafts a step)",
                makers.vllm_mtp,
                options=(*_VLLM_OPTIONS, *makers.STEP_SETTINGS, "tiers"),
                group=SPECULATIVE,
            ),
            *(
                _vllm(
                    f"vllm_{name}",
                    f"vLLM 0.33.0 with {model}",
                    partial(makers.hybrid_model, name),
                    prefix_closed=False,
                    options=(*_VLLM_OPTIONS, *makers.GROUP_SETTINGS, "tiers"),
                    default_block_size=default,
                    real_block_size=real,
                    group=HYBRID,
                )
                for name, model, default, real in _HYBRID_MODELS
            ),
            BackendSpec(
                "sglang",
                "SGLang 0.5.23",
                makers.sglang,
                residency="counted",
                in_matrix=False,
                driver=makers.sglang_driver,
                chain=makers.hash_chain,
                options=(*_RADIX_OPTIONS, *makers.PARTS, "tiers", "unified", "dcp"),
                scheduler="sglang",
            ),
            BackendSpec(
                "sglang_eagle",
                "SGLang 0.5.23 with a draft model (EAGLE, 3 steps, 4 draft tokens)",
                makers.sglang_eagle,
                residency="counted",
                in_matrix=False,
                driver=makers.sglang_driver,
                chain=makers.hash_chain,
                options=(*_RADIX_OPTIONS, "tiers"),
                scheduler="sglang",
                group=SPECULATIVE,
            ),
            _sglang_model("sglang_gpt_oss", "gpt-oss, with a window of 127 tokens at pages of 16", 16),
            _sglang_model("sglang_gemma4", "Gemma 4, with a window of 1,023 tokens at pages of 16", 16),
            _sglang_model("sglang_llama4", "Llama 4, with a window of 8,192 tokens at pages of 16", 16),
            _sglang_model("sglang_qwen3_next", "Qwen3-Next, with states every 64 tokens at pages of 64", 64),
            _sglang_model("sglang_kimi_linear", "Kimi-Linear, with states every 64 tokens at pages of 64", 64),
            _sglang_model("sglang_deepseek_v4", "DeepSeek-V4, with a window of 128 tokens at pages of 256", 256),
            BackendSpec(
                "trtllm",
                "TensorRT-LLM 1.2, its V1 cache manager",
                makers.trtllm,
                in_matrix=False,
                driver=makers.trtllm_driver,
                chain=makers.hash_chain,
                options=makers.V1_OPTIONS,
                scheduler="trtllm",
                default_block_size=32,
                as_read=True,
            ),
            BackendSpec(
                "trtllm_v2",
                "TensorRT-LLM 1.3, its V2 cache manager",
                makers.trtllm_v2,
                in_matrix=False,
                driver=makers.trtllm_v2_driver,
                chain=makers.hash_chain,
                options=(
                    "levels",
                    "groups",
                    "pool_groups",
                    "max_seq_len",
                    "partial_reuse",
                    "max_util_for_resume",
                    "hash_algo",
                    "event_buffer",
                ),
                scheduler="trtllm",
                default_block_size=32,
                as_read=True,
            ),
            BackendSpec(
                "mocker_sglang_1_6",
                "dynamo-mocker 1.6.1, its mock of SGLang",
                makers.mocker_sglang_1_6,
                in_matrix=False,
                driver=makers.mocker_sglang_1_6_driver,
                scheduler="sglang",
                semantics="1.6.1",
            ),
        )
    }
)
"""The built-in backends by name, in the order in which the matrix runs them."""

_registered: dict[str, BackendSpec] = {}


def known_backends() -> dict[str, BackendSpec]:
    """Return the built-in backends by name, then the presently registered ones, in the order of the matrix."""
    return {**BACKENDS, **_registered}


@contextmanager
def registered(specs: Mapping[str, BackendSpec]) -> Iterator[None]:
    """Register backends in addition to the built-in ones, within the context.

    The plugin does this for a run of pytest; an inner run does not have the backends of an outer run.
    """
    before = dict(_registered)
    _registered.clear()
    _registered.update(specs)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)


def unknown_backend_text(name: object, known: Iterable[str]) -> str:
    """Return the error for an unknown backend's name: the known names, and the successor of a former backend."""
    text = unknown_text("backend", name, known)
    if name == "mocker_sglang":
        text += "; Dynamo's mock of SGLang is mocker_sglang_1_6 now, and SGLang's own cache is sglang"
    return text


def backend_spec(name: str | BackendSpec) -> BackendSpec:
    """Look up a backend by name; a spec is returned unchanged, so unregistered backends can be used too.

    Raises:
        ValueError: no backend has this name; the message lists the known ones.
    """
    if isinstance(name, BackendSpec):
        return name
    spec = BACKENDS.get(name) or _registered.get(name)
    if spec is None:
        raise ValueError(unknown_backend_text(name, known_backends()))
    return spec


def speaker_of(dialect: Dialect) -> BackendSpec:
    """Return the backend whose engine writes a dialect, with the block names of the dialect's release.

    Raises:
        ValueError: there is no such backend, or it does not have this release.
    """
    spec = backend_spec(dialect.backend)
    if dialect.whole_blocks and "hash_algo" in spec.options:
        return _named_by_sha256(spec)
    return spec if dialect.version is None else _of_release(spec, dialect.version)


def served_by(dialect: Dialect, model: str) -> BackendSpec:
    """Return the backend whose engine writes a dialect and serves a model.

    For a hybrid model it is the backend of this model in its newest release, such as `vllm_gpt_oss` for "gpt-oss"; for
    any other model it is that of `speaker_of`.

    Raises:
        ValueError: see `speaker_of`.
    """
    spec = speaker_of(dialect)
    if spec.scheduler == "trtllm":
        return spec
    program = "sglang" if spec.scheduler == "sglang" else "vllm"
    hybrid = BACKENDS.get(f"{program}_{model.lower().replace('-', '_')}")
    return hybrid if hybrid is not None and hybrid.group == HYBRID and spec.name.startswith(program) else spec


def recorded_backend(name: str, models: object) -> BackendSpec:
    """Return the backend of this name in the release of a capture, if this release is known.

    Args:
        name: see `backend_spec`.
        models: `BackendSpec.models` of the recorded engine.

    Raises:
        ValueError: there is no backend of this name.
    """
    spec = backend_spec(name)
    program, _, version = models.partition(" ") if isinstance(models, str) else ("", "", "")
    if models == spec.models or program != spec.models.partition(" ")[0]:
        return spec
    try:
        return _of_release(spec, version)
    except ValueError:
        return spec


@lru_cache(maxsize=8)
def _named_by_sha256(spec: BackendSpec) -> BackendSpec:
    """Return the backend with the block names of TensorRT-LLM's stream over ZMQ."""
    return spec.variant(spec.name, in_matrix=spec.in_matrix, hash_algo="v2_sha256_64")


@lru_cache(maxsize=64)
def _of_release(spec: BackendSpec, version: str) -> BackendSpec:
    """Return the backend in another release, under its own name; all callers get the same object."""
    general = BACKENDS["vllm"] if spec is BACKENDS["vllm_0_19"] else spec  # `vllm_0_19` is `vllm` at one release
    return general.variant(spec.name, in_matrix=spec.in_matrix, version=version)


def create_manager(
    backend: str | BackendSpec = "lineage",
    *,
    num_blocks: int,
    block_size: int | None = None,
    dp_rank: int = 0,
    sink: GivenSink | None = None,
    **options: Any,
) -> KvManager:
    """Return a new block manager on its own, without pytest, a harness or checks.

    Args:
        backend: name of a backend, or a spec.
        num_blocks: capacity in blocks.
        block_size: tokens a block; for the logical backends a power of two from 2 to 1024. None: `default_block_size`,
            or, with cache `groups`, the block size of the attention group.
        dp_rank: data-parallel rank that its events name.
        sink: where its events are published, in any form of `sinks.GivenSink`; None: nowhere.
        **options: further options of the backend (`BackendSpec.options`); every backend takes `tiers=None`.

    Raises:
        TypeError: `sink` is not a sink.
        ValueError: the backend or an option is unknown, the capacity is below 1, or the backend refuses the block size
            or an option.
    """
    from pytest_kvmock.values.sinks import adapted  # imported on first use

    spec = backend_spec(backend)
    options = spec.check_options(options)
    taken = None if sink is None else adapted(sink)
    size = _default_block_size(spec, options) if block_size is None else block_size
    return spec.make(num_blocks=num_blocks, block_size=size, dp_rank=dp_rank, sink=taken, **options)


MOST_WORKERS: Final = 2**16
"""Maximum number of workers times ranks of a profile."""

MOST_RANKS: Final = 1024
"""Maximum number of data-parallel ranks of one worker of a profile."""


class _NotGiven(int):
    """A default block size, which a backend may replace because no caller has given one."""


_BLOCK_SIZE: Final = _NotGiven(16)


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The size and kind of the mock engines of a test.

    Attributes:
        block_size: tokens a block; by default 16, or the backend's default (`sized_for`).
        num_blocks: capacity of one worker (of each rank), in blocks.
        workers: number of workers at the start, with ids from 0.
        dp_size: number of data-parallel ranks of each worker.
        prefix_caching: False: nothing is reused and nothing is published, as in the real stack.
        chunk: tokens of a prefill chunk; None: no chunks.
        seed: seed of everything random, together with the test's name.
        tiers: the host memory below each rank, where evicted blocks go; as `Tiers`, or as a mapping for `Tiers.of`.
            None if there is none.
        real_sizes: whether the engine of a hybrid model has blocks of the model's own size, whatever `block_size` is.

    Raises:
        ValueError: a field is out of range. The message names the field, the given value and the allowed values.
    """

    block_size: int = _BLOCK_SIZE
    num_blocks: int = 256
    workers: int = 1
    dp_size: int = 1
    prefix_caching: bool = True
    chunk: int | None = None
    seed: int = 0
    tiers: Tiers | None = None
    real_sizes: bool = False

    def __post_init__(self) -> None:
        for name, least in (("block_size", 1), ("num_blocks", 1), ("workers", 0), ("dp_size", 1)):
            check_integer(name, getattr(self, name), least)
        if self.workers > MOST_WORKERS:
            raise ValueError(f"workers must be at most {MOST_WORKERS}, got {self.workers}")
        if self.dp_size > MOST_RANKS:
            raise ValueError(f"dp_size must be at most {MOST_RANKS}, got {self.dp_size}")
        if self.workers * self.dp_size > MOST_WORKERS:
            raise ValueError(
                f"workers times dp_size must be at most {MOST_WORKERS}, got {self.workers} workers of {self.dp_size} "
                "ranks"
            )
        if self.chunk is not None:
            check_integer("chunk", self.chunk, 1, " tokens, or None")
        for name in ("prefix_caching", "real_sizes"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")  # noqa: TRY004 - one error
        if not is_integer(self.seed):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if self.tiers is not None:
            from pytest_kvmock.engines.tiers import Tiers  # imported on first use

            object.__setattr__(self, "tiers", Tiers.of(self.tiers))

    def sized_for(self, backend: str | BackendSpec | None) -> EngineProfile:
        """Return the profile with a backend's block size, if none was given or if `real_sizes` requires it.

        Raises:
            ValueError: there is no backend of this name.
        """
        if backend is None:
            return self
        spec, size = backend_spec(backend), self.block_size
        if self.real_sizes and spec.real_block_size is not None:
            size = spec.real_block_size
        elif type(size) is _NotGiven:
            size = spec.default_block_size
        return self if size == self.block_size else self.replace(block_size=size)

    def traits(self, backend: str | BackendSpec) -> Traits:
        """Return the traits of a backend's engines with these sizes and tiers (if it takes any), for a harness by hand.

        Args:
            backend: name of the workers' backend, or a `BackendSpec`.

        Raises:
            ValueError: there is no backend of this name, or it refuses these sizes or tiers.
        """
        spec = backend_spec(backend)
        return spec.traits_at(self.sized_for(spec).block_size, self.tiers)

    def replace(self, **fields: Any) -> EngineProfile:
        """Return the profile with some fields changed.

        Raises:
            ValueError: a field is unknown, or a value is out of range.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in fields:
            if name not in known:
                raise ValueError(unknown_text("profile field", name, known))
        return dataclasses.replace(self, **fields)
