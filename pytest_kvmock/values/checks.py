"""Checks of user input, and their error messages. The lowest layer: every other module may import it.

`late_names` is for packages that import some of their names on first use.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from importlib import import_module
from os.path import commonprefix
from pathlib import Path
from sys import float_info
from typing import Any, Final, TypeGuard, TypeVar

MOST_NEAREST = 3
"""How many nearest names a message lists."""

LEAST_ALIKE = 0.7
"""Minimum similarity of a suggested name, as in difflib: `blok_size` does not suggest `dp_size`."""

MOST_FLOAT: Final = float_info.max
"""The largest finite float. A larger integer fits no float, and `math.isfinite` raises for it."""

ValueT = TypeVar("ValueT")
MemberT = TypeVar("MemberT", bound=Enum)

MOST_U64: Final = 2**64 - 1
"""The largest unsigned 64-bit integer."""


class KvMockError(Exception):
    """Base of errors of mocks that cannot do what was requested; the name of each subclass names the mock.

    Bad arguments raise a ValueError or TypeError, as usual, and a verdict is an AssertionError (`EventRulesBroken`).
    """


def raised_at(error: Exception, callers: Collection[str]) -> str:
    """Return where a call of the user's object raised, for a message: the last line outside the files that make such
    calls.
    """
    frames = traceback.walk_tb(error.__traceback__)  # reads no source lines, which would cost more than the rest
    own = [(frame.f_code, line) for frame, line in frames if frame.f_code.co_filename not in callers]
    if not own:
        return ""
    code, line = own[-1]
    return f" ({Path(code.co_filename).name}:{line} in {code.co_name})"


def is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether a value is an integer, True and False excluded, and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def integer_text(least: int) -> str:
    """Return "an integer of at least 1"."""
    return f"an integer of at least {least}"


def check_integer(
    name: str, value: object, least: int, unit: str = "", *, wrong_type: type[Exception] = ValueError
) -> int:
    """Return `value` if it is an integer of at least `least`.

    Args:
        name: its name in the message.
        value: the argument.
        least: the smallest allowed integer.
        unit: text after the range in the message: " tokens, or None".
        wrong_type: the error for a value that is not an integer.

    Raises:
        ValueError: the value is smaller, or not an integer (unless `wrong_type` is another error).
    """
    if is_integer(value, least):
        return value
    error = ValueError if is_integer(value) else wrong_type
    raise error(f"{name} must be {integer_text(least)}{unit}, got {value!r:.80}")


def check_u64(name: str, value: object) -> int:
    """Return `value` if it is an unsigned 64-bit integer: a hash, a salt, a worker id.

    Raises:
        ValueError: the value is out of range, or not an integer.
    """
    if is_integer(value, 0) and value <= MOST_U64:
        return value
    raise ValueError(f"{name} must be an integer from 0 to {MOST_U64} (u64), got {value!r:.80}")


def check_member(name: str, value: object, kind: type[MemberT]) -> MemberT:
    """Return the member of an enumeration for `value`, which is a member or its value.

    Raises:
        ValueError: the value is unknown; the message lists the nearest and all members.
    """
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name}: {not_allowed_text(value, [each.value for each in kind])}") from None


def check_iterable(what: str, values: Iterable[ValueT], of: str) -> Iterable[ValueT]:
    """Return `values` if it can be iterated over, for arguments where users easily give one value instead of several.

    Raises:
        TypeError: it cannot be iterated over.
    """
    if isinstance(values, Iterable):
        return values
    raise TypeError(f"{what} takes an iterable of {of}, got {values!r:.80}")


def check_number(name: str, value: object, least: float = 0.0, most: float = math.inf, unit: str = "") -> float:
    """Return `value` as a float if it is a finite number from `least` to `most`.

    Args:
        name: its name in the message.
        value: the argument; True and False are not numbers.
        least: the smallest allowed number.
        most: the largest allowed number; infinite for no limit.
        unit: text after the range in the message: " seconds, or None".

    Raises:
        ValueError: the value is out of range, not finite, or not a number.
    """
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and least <= value <= most
        and abs(value) <= MOST_FLOAT
    ):
        return float(value)
    wanted = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
    raise ValueError(f"{name} must be a finite number {wanted}{unit}, got {value!r:.80}")


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with an argument of this name; False for one without a signature."""
    return parameter_kind(function, name) not in (None, 0)  # 0: only by position


def parameter_kind(function: Callable[..., Any], name: str) -> int | None:
    """Return how a function takes an argument of this name, as `inspect.Parameter.kind`; None: not at all, or no
    signature.
    """
    return _parameter_kind(getattr(function, "__func__", function), name)


@lru_cache(maxsize=64)
def _parameter_kind(function: Callable[..., Any], name: str) -> int | None:
    from inspect import Parameter, signature  # only needed for prompts with keys

    try:
        parameters = signature(function).parameters
    except (TypeError, ValueError):
        return None
    if name in parameters:
        return parameters[name].kind
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    return Parameter.VAR_KEYWORD if takes_any else None


def check_time(now: object) -> float:
    """Return a time in ms as a float.

    Raises:
        ValueError: it is not a finite number of at least 0.
    """
    if type(now) is float and 0.0 <= now < math.inf:  # the usual case, without the call
        return now
    return check_number("a time", now, unit=" (ms)")


def nearest(name: object, known: Iterable[str]) -> list[str]:
    """Return the known names that are most similar to `name`, the best first; empty if no name is similar."""
    if not isinstance(name, str):
        return []
    from difflib import get_close_matches  # imported on first use

    known = list(known)
    # `kvmock_sede` is similar to every `kvmock_...`, so only the rest is compared.
    prefix = commonprefix([name, *known])  # noqa: RUF071 - of characters, not of paths
    if not prefix.endswith(("_", "-")):
        prefix = ""
    rests = [each.removeprefix(prefix) for each in known]
    found = get_close_matches(name.removeprefix(prefix), rests, MOST_NEAREST, LEAST_ALIKE)
    if not found:  # `vlm` is similar to the first word of `vllm-0.33`, the last name of that family
        families = {each.partition("-")[0]: each for each in known if each.count("-") == 1}
        return [families[word] for word in get_close_matches(name, families, MOST_NEAREST, LEAST_ALIKE)]
    return [prefix + rest for rest in found]


def did_you_mean(name: object, known: Iterable[str], then: str = "") -> str:
    """Return "; did you mean 'lru'? " (or "; " if no known name is similar to `name`) and `then`.

    Without `then`: "; did you mean 'lru'?", or nothing.
    """
    found = nearest(name, known)
    hint = f"; did you mean {' or '.join(map(repr, found))}?" if found else ""
    return f"{hint or ';'} {then}" if then else hint


def unknown_text(what: str, name: object, known: Iterable[str]) -> str:
    """Return "unknown rule 'wrong_hsah'; did you mean 'wrong_hash'? known: ..."."""
    known = list(known)
    return f"unknown {what} {name!r:.80}{did_you_mean(name, known, 'known: ' + ', '.join(known))}"


def install_text(extra: str) -> str:
    """Return how to install an extra: "pip install '/path/to/pytest-kvmock[zmq]', with the path of your checkout".

    From the checkout, because no package index has a release yet.
    """
    return f"pip install '/path/to/pytest-kvmock[{extra}]', with the path of your checkout"


def not_allowed_text(value: object, allowed: Iterable[str]) -> str:
    """Return "got 'fial'; did you mean 'fail'? allowed: fail, warn, ignore"."""
    allowed = list(allowed)
    return f"got {value!r:.80}{did_you_mean(value, allowed, 'allowed: ' + ', '.join(allowed))}"


def late_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module (PEP 562) that imports a name from its home on first use."""

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"pytest_kvmock.{home}"), name)

    return load
