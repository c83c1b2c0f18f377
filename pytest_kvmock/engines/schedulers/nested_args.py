"""Parts of `MockEngineArgs`: its two groups, and the checks of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar

from pytest_kvmock.values.checks import check_integer, check_number, is_integer, not_allowed_text, unknown_text

SchedulePolicy: TypeAlias = Literal["fifo", "fcfs", "lpm"]

SCHEDULE_POLICIES: Final[tuple[SchedulePolicy, ...]] = ("fifo", "fcfs", "lpm")

MOST_TOKEN: Final = 2**32 - 1
MOST_COUNT: Final = 2**64 - 1


class _Group(Protocol):
    def __init__(self, **given: Any) -> None: ...


_G = TypeVar("_G", bound=_Group)


def check_optional_integer(name: str, value: object, least: int, most: int = MOST_COUNT) -> int | None:
    """Return `value` if it is an integer from `least` to `most`, or None.

    Raises:
        ValueError: it is not. The message has the name, the value and the range.
    """
    return None if value is None else check_integer_range(name, value, least, most, ", or None")


def check_integer_range(name: str, value: object, least: int, most: int = MOST_COUNT, unit: str = "") -> int:
    """Return `value` if it is an integer from `least` to `most`.

    Raises:
        ValueError: it is not. The message has the name, the value and the range.
    """
    if most == MOST_COUNT and not (is_integer(value) and value > most):
        return check_integer(name, value, least, unit)
    if is_integer(value, least) and value <= most:
        return value
    raise ValueError(f"{name} must be an integer from {least} to {most}{unit}, got {value!r:.80}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError unless `value` is an allowed name: "name: got 'fial'; did you mean 'fail'? allowed: fail"."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: {not_allowed_text(value, allowed)}")


def read_group(cls: type[_G], name: str, given: object) -> _G | None:
    """Return a group of arguments that was given as an object, as a mapping of its fields, or as None.

    Raises:
        ValueError: it is none of these, or a field is unknown, missing or out of range. The message begins with the
            name.
    """
    if given is None or isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a {cls.__name__}, a mapping of its fields, or None, got {given!r:.80}")  # noqa: TRY004 - one error
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    for field in given:
        if field not in known:
            raise ValueError(unknown_text(f"field of {name}", field, known))
    try:
        return cls(**given)
    except TypeError:  # a missing field without a default
        missing = ", ".join(field for field in known if field not in given)
        raise ValueError(f"{name} needs all of {', '.join(known)}; missing: {missing}") from None


@dataclass(frozen=True, slots=True)
class SglangArgs:
    """The arguments of SGLang's scheduler. None means the scheduler's default, given in parentheses.

    Attributes:
        schedule_policy: "lpm": longest cached prefix first; "fifo" or "fcfs" (the same): in order of arrival ("fifo").
        page_size: tokens a page, at least 1: another name of `block_size`.
        max_prefill_tokens: maximum number of tokens that are admitted in one pass, at least 1 (16384).
        chunked_prefill_size: tokens of a prefill chunk, at least 1, a multiple of the page size (8192).
        clip_max_new_tokens: maximum output tokens of a request for which admission reserves room, at least 0 (4096).
        schedule_conservativeness: the part of this room that is reserved, as a factor, finite and at least 0 (1.0).

    Raises:
        ValueError: a field is out of range. The message names the field, the given value and the allowed values.
    """

    schedule_policy: SchedulePolicy | None = None
    page_size: int | None = None
    max_prefill_tokens: int | None = None
    chunked_prefill_size: int | None = None
    clip_max_new_tokens: int | None = None
    schedule_conservativeness: float | None = None

    def __post_init__(self) -> None:
        if self.schedule_policy is not None:
            check_choice("sglang.schedule_policy", self.schedule_policy, SCHEDULE_POLICIES)
        for name, least in (
            ("page_size", 1),
            ("max_prefill_tokens", 1),
            ("chunked_prefill_size", 1),
            ("clip_max_new_tokens", 0),
        ):
            check_optional_integer(f"sglang.{name}", getattr(self, name), least)
        if self.schedule_conservativeness is not None:
            value = check_number("sglang.schedule_conservativeness", self.schedule_conservativeness, unit=", or None")
            object.__setattr__(self, "schedule_conservativeness", value)

    def filled(self, block_size: int) -> SglangArgs:
        """Return these arguments with the scheduler's defaults in place of None.

        Args:
            block_size: tokens a block of the engine; this is the page size.
        """
        defaults = {
            "schedule_policy": "fifo",
            "max_prefill_tokens": 16384,
            "chunked_prefill_size": 8192,
            "clip_max_new_tokens": 4096,
            "schedule_conservativeness": 1.0,
        }
        own = {name: value for name, value in asdict(self).items() if value is not None}
        return SglangArgs(**{**defaults, **own, "page_size": block_size})


@dataclass(frozen=True, slots=True)
class ReasoningConfig:
    """The share of reasoning in a request's output, and the tokens around it.

    Attributes:
        start_thinking_token_id: the first token of the reasoning, a token id below 2**32.
        end_thinking_token_id: its last token, a token id below 2**32.
        thinking_ratio: share of reasoning in the output, from 0 to 1.

    Raises:
        ValueError: a field is out of range. The message names the field, the given value and the allowed values.
    """

    start_thinking_token_id: int
    end_thinking_token_id: int
    thinking_ratio: float

    def __post_init__(self) -> None:
        for name in ("start_thinking_token_id", "end_thinking_token_id"):
            check_integer_range(f"reasoning.{name}", getattr(self, name), 0, MOST_TOKEN)
        ratio = check_number("reasoning.thinking_ratio", self.thinking_ratio, 0.0, 1.0)
        object.__setattr__(self, "thinking_ratio", ratio)

    def num_thinking_tokens(self, max_output_tokens: int) -> int:
        """Return the number of a request's output tokens that are reasoning, including the start and end tokens.

        0 if there is no room for the start and end tokens, or if the share of reasoning is less than a token; else the
        share, rounded down, and at least 2.
        """
        share = int(max_output_tokens * self.thinking_ratio)
        return 0 if max_output_tokens < 2 or share == 0 else min(max(share, 2), max_output_tokens)

    def token_at(self, position: int, max_output_tokens: int) -> int | None:
        """Return the required output token at a position from 0; None if any token is allowed."""
        count = self.num_thinking_tokens(max_output_tokens)
        if position >= count:
            return None
        if position == 0:
            return self.start_thinking_token_id
        return self.end_thinking_token_id if position == count - 1 else None
