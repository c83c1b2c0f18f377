"""Checks of a request's body, with the errors of vLLM's frontend: status, type, param, code, and the texts for clients.

The order of checks and the errors were recorded from vLLM 0.29 (`vllm_0.29_http_answers.json`). If a union of many
types is rejected (a message of a chat), only the error of the first type is returned: type and param are the recorded
ones, and the text is shorter.

One subject: the fields of a body, and the errors of wrong ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeGuard

from pytest_kvmock.servers.serve.api import from_json
from pytest_kvmock.servers.serve.loop_thread import print_error
from pytest_kvmock.values.checks import is_integer
from pytest_kvmock.values.prompt_keys import FULL_REPORT, INCREMENTAL_REPORT

DEFAULT_OUTPUT: Final = 16
"""Default number of output tokens of a completion."""

MOST_CHOICES: Final = 16384
"""Maximum number of choices of a prompt (vLLM's `VLLM_MAX_N_SEQUENCES`)."""

MOST_ERRORS: Final = 10
"""Maximum number of listed errors of a body."""
MOST_ODD: Final = 2**16
"""Maximum number of tokens in a list that are no integers and are checked one by one."""
MOST_SHOWN: Final = 2000
"""Maximum number of values and characters of an input that an error repeats."""

_REDUCE: Final = "Please reduce the length of the input prompt or the number of requested output tokens."


@dataclass(slots=True)
class BadRequest(Exception):  # noqa: N818 - it is an answer
    """Raised if a request is rejected.

    Attributes:
        message: the message.
        param: the wrong parameter; None if it is not a single one.
        kind: the error's type.
        status: the status of the answer.
    """

    message: str
    param: str | None = None
    kind: str = "BadRequestError"
    status: int = 400


def validation_error(*errors: Mapping[str, Any]) -> BadRequest:
    """Return the rejection of a body with wrong types: one line per error; param is the location of the first."""
    count = len(errors)
    shown = [{**each, "input": _Cut(each["input"])} for each in errors[:MOST_ERRORS]]
    lines = "\n".join(f"  {each!r}" for each in shown)
    place = [str(part) for part in errors[0]["loc"] if part != "str" and "[" not in str(part)]
    head = f"{count}" if count <= MOST_ERRORS else f"More than {MOST_ERRORS}"
    return BadRequest(f"{head} validation error{'s' * (count > 1)}:\n{lines}", ".".join(place), "Bad Request")


class _Cut:
    """A value as shown in an error: complete, or shortened if it is large."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        value, left, level = self._value, MOST_SHOWN, [self._value]
        while level:
            each = level.pop()
            left -= 1 + (len(each) if isinstance(each, str | list | dict) else 0)
            if left < 0:
                if isinstance(value, str):
                    return f"{value[:MOST_SHOWN]!r}..."
                size = f" of {len(value)}" if isinstance(value, list | dict) else ""
                return f"<{type(value).__name__}{size}>"
            if isinstance(each, list):
                level += each
            elif isinstance(each, dict):
                level += [*each, *each.values()]
        return repr(value)


def _wrong(kind: str, loc: tuple[Any, ...], message: str, value: object, **context: object) -> dict[str, Any]:
    found = {"type": kind, "loc": loc, "msg": message, "input": value}
    return found | {"ctx": context} if context else found


def body_of(content_type: str, body: bytes) -> dict[str, Any]:
    """Return the object of a body.

    Raises:
        BadRequest: the body is not JSON, or not an object.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise BadRequest(text, kind="Bad Request")
    if not body:
        raise validation_error(_wrong("missing", ("body",), "Field required", None))
    try:
        found = from_json(body)
    except ValueError as error:  # not JSON, not UTF-8, an integer with thousands of digits, or too deep
        place, why = (error.pos, error.msg) if isinstance(error, json.JSONDecodeError) else (0, str(error))
        raise validation_error(_wrong("json_invalid", ("body", place), "JSON decode error", {}, error=why)) from None
    if not isinstance(found, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise validation_error(_wrong("model_attributes_type", ("body",), text, found))
    return found


def integer(body: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """Return an integer field, read as pydantic does: texts of digits and floats without a fraction are allowed.

    Raises:
        BadRequest: the field is no integer.
    """
    value = body.get(name)
    if value is None:
        return default
    error = integer_error(value, ("body", name))
    if error is not None:
        raise validation_error(error)
    return int(value)


def integer_error(value: object, loc: tuple[Any, ...], least: int | None = None) -> dict[str, Any] | None:
    """Return the error of an integer; None if it is valid."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            text = "Input should be a valid integer, unable to parse string as an integer"
            return _wrong("int_parsing", loc, text, value)
    elif isinstance(value, float):
        if not value.is_integer():
            text = "Input should be a valid integer, got a number with a fractional part"
            return _wrong("int_from_float", loc, text, value)
        value = int(value)
    elif not isinstance(value, int):
        return _wrong("int_type", loc, "Input should be a valid integer", value)
    if least is not None and value < least:
        return _wrong("greater_than_equal", loc, f"Input should be greater than or equal to {least}", value, ge=least)
    return None


def boolean(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field; False if it is absent.

    Raises:
        BadRequest: the field is no boolean.
    """
    value = body.get(name)
    if value is None:
        return False
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    known = words.get(str(value).lower())
    if known is None or not isinstance(value, str | int):
        kind = "bool_parsing" if isinstance(value, str) else "bool_type"
        raise validation_error(_wrong(kind, ("body", name), "Input should be a valid boolean", value))
    return known


def text(body: Mapping[str, Any], name: str) -> str | None:
    """Return a text field; None if it is absent.

    Raises:
        BadRequest: the field is no text.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise validation_error(_wrong("string_type", ("body", name), "Input should be a valid string", value))
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is an object; an empty object if it is absent.

    Raises:
        BadRequest: the field is no object.
    """
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise validation_error(_wrong("model_attributes_type", ("body", name), message, value))
    return value


def rooms_of(body: Mapping[str, Any], prompts: int) -> tuple[Mapping[str, Any], ...]:
    """Return the bootstrap fields of each prompt of an SGLang request (`_normalize_bootstrap_params`).

    Host and port are one value or a list. Rooms are a list, or the first room; further prompts then get consecutive
    rooms. The rank of the prefill engine is one value; it is left out if it is not given.

    Raises:
        BadRequest: a room is no integer, or a list does not have one value per prompt.
    """
    columns: dict[str, list[Any]] = {}
    for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        value: Any = body.get(name)
        is_list = isinstance(value, list)
        column = list(value) if is_list else [value] * prompts
        if is_list and len(column) != prompts:
            raise BadRequest(f"The length of {name} must be {prompts}, that of the batch, got {len(column)}.", name)
        if name == "bootstrap_room" and value is not None:
            for each in column:
                if not is_integer(each, 0):
                    error = integer_error(each, ("body", name))
                    raise (
                        BadRequest(f"{name} must be an integer of at least 0", name)
                        if error is None
                        else (validation_error(error))
                    )
            if not is_list:
                column = [value + place for place in range(prompts)]
        columns[name] = column
    if body.get("disagg_prefill_dp_rank") is not None:
        columns["disagg_prefill_dp_rank"] = [integer(body, "disagg_prefill_dp_rank")] * prompts
    return tuple(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def report_mode(body: Mapping[str, Any]) -> str | None:
    """Return the report mode in `vllm_xargs` of a vLLM request: "full", or None.

    Raises:
        BadRequest: `vllm_xargs` is no object.
    """
    mode = mapping(body, "vllm_xargs").get("kv_cache_report_mode")
    if mode not in (None, FULL_REPORT, INCREMENTAL_REPORT):
        print_error(
            f"kv_cache_report_mode {mode!r:.80} is ignored, as vLLM ignores it: it knows 'full' and 'incremental'"
        )
    return FULL_REPORT if mode == FULL_REPORT else None


# --------------------------------------------------------------------------------------------------------- prompts


def prompts_of(value: object) -> list[str | list[int]]:
    """Return the prompts of a completion: one text or list of tokens, or a list of either.

    Raises:
        BadRequest: it is none of these; with the errors of each type.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and set(map(type, value)) <= {str}:
        return list(value)
    if are_tokens(value):
        return [value]
    if isinstance(value, list) and all(map(are_tokens, value)):
        return list(value)
    tokens = token_errors(value, ("body", "prompt", "list[constrained-int]"))
    if not tokens:
        assert isinstance(value, list)
        return [list(map(int, value))]
    lists = _errors_of_list(value, ("body", "prompt", "list[list[constrained-int]]"), _token_list_error)
    if not lists:
        assert isinstance(value, list)
        return [list(map(int, each)) for each in value]
    text_error = _text_error(value, ("body", "prompt", "str"))
    texts = _errors_of_list(value, ("body", "prompt", "list[str]"), _text_error, str)
    raise validation_error(*tokens, *lists, *([] if text_error is None else [text_error]), *texts)


def are_tokens(value: object) -> TypeGuard[list[int]]:
    """Return whether a value is a list of plain integers of at least 0. It is fast, as it checks no element in Python
    code.
    """
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0


def _token_error(value: object, loc: tuple[Any, ...]) -> dict[str, Any] | None:
    return integer_error(value, loc, 0)


def _text_error(value: object, loc: tuple[Any, ...]) -> dict[str, Any] | None:
    return None if isinstance(value, str) else _wrong("string_type", loc, "Input should be a valid string", value)


_Check = Callable[[object, tuple[Any, ...]], dict[str, Any] | None]


def token_errors(value: object, loc: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return the errors of a list of tokens, at most one more than are listed.

    Raises:
        BadRequest: more than `MOST_ODD` tokens are no plain integers.
    """
    if isinstance(value, list) and sum(each is not int for each in map(type, value)) > MOST_ODD:
        if errors := _errors_of_list(value[: MOST_ERRORS + 1], loc, _token_error):
            return errors
        raise BadRequest(f"More than {MOST_ODD} tokens are no plain integers", str(loc[1]))
    return _errors_of_list(value, loc, _token_error, int)


def _errors_of_list(
    value: object, loc: tuple[Any, ...], check: _Check, plain: type[Any] | None = None
) -> list[dict[str, Any]]:
    """Return the errors of a list's elements; elements of the plain type are valid unless they are negative numbers."""
    if not isinstance(value, list):
        return [_wrong("list_type", loc, "Input should be a valid list", value)]
    odd = (
        (position, each)
        for position, each in enumerate(value)
        if type(each) is not plain or (plain is int and each < 0)
    )
    found = (check(each, (*loc, position)) for position, each in odd)
    return list(islice((error for error in found if error is not None), MOST_ERRORS + 1))


def _token_list_error(value: object, loc: tuple[Any, ...]) -> dict[str, Any] | None:
    errors = token_errors(value, loc)
    return errors[0] if errors else None


def check_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    Raises:
        BadRequest: there are no messages, or a message is invalid.
    """
    if "messages" not in body:
        raise validation_error(_wrong("missing", ("body", "messages"), "Field required", dict(body)))
    messages = body["messages"]
    if not isinstance(messages, list):
        raise validation_error(_wrong("list_type", ("body", "messages"), "Input should be a valid list", messages))
    for position, message in enumerate(messages):
        loc = ("body", "messages", position, "ChatCompletionDeveloperMessageParam")
        if not isinstance(message, dict):
            raise validation_error(_wrong("dict_type", loc, "Input should be a valid dictionary", message))
        if not isinstance(message.get("role"), str):
            raise validation_error(_wrong("missing", (*loc, "role"), "Field required", message))
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            text_error = "Input should be a valid string"
            raise validation_error(_wrong("string_type", (*loc, "content", "str"), text_error, content))
    if not messages:
        raise BadRequest("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return messages


# ---------------------------------------------------------------------------------------------------------- sizes


def check_output(max_tokens: int, most: int) -> None:
    """Check the requested number of output tokens.

    Raises:
        BadRequest: fewer than 1, or more than the model's maximum.
    """
    if max_tokens < 1:
        message = f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})"
        raise BadRequest(message, "max_tokens")
    if max_tokens > most:
        raise BadRequest(
            f"max_tokens={max_tokens} cannot be greater than max_model_len=max_total_tokens={most}. "
            f"Please request fewer output tokens. (parameter=max_tokens, value={max_tokens})",
            "max_tokens",
        )


def check_choices(count: int) -> None:
    """Check the requested number of choices of a prompt.

    Raises:
        BadRequest: fewer than 1, or more than `MOST_CHOICES`.
    """
    if count < 1:
        raise BadRequest(f"n must be at least 1, got {count}.")
    if count > MOST_CHOICES:
        raise BadRequest(f"n must be at most {MOST_CHOICES}, got {count}.")


def check_all_choices(prompts: int, count: int) -> None:
    """Check the number of choices of all prompts of a request.

    Raises:
        BadRequest: more than `MOST_CHOICES`.
    """
    if prompts * count > MOST_CHOICES:
        raise BadRequest(
            f"{prompts} prompts with n={count} are too many: at most {MOST_CHOICES} choices a request.", "prompt"
        )


def check_text_length(prompt: str, output: int, most: int) -> None:
    """Check the length of a text before it is tokenized, as vLLM does: it assumes at most one token per character.

    Raises:
        BadRequest: the text has more characters than tokens fit.
    """
    room = most - output
    if len(prompt) > room:
        raise BadRequest(
            f"This model's maximum context length is {most} tokens. However, you requested {output} output tokens and "
            f"your prompt contains {len(prompt)} characters (more than {room} characters, which is the upper bound for "
            f"{room} input tokens). {_REDUCE} (parameter=input_text, value={len(prompt)})",
            "input_text",
        )


def check_token_length(count: int, output: int, most: int) -> None:
    """Check the length of a prompt in tokens.

    Raises:
        BadRequest: prompt and output together do not fit.
    """
    if count + output > most:
        # vLLM truncates a prompt after one token too many, so it does not know the length of such a prompt.
        least = "at least " if count == most - output + 1 else ""
        raise BadRequest(
            f"This model's maximum context length is {most} tokens. However, you requested {output} output tokens and "
            f"your prompt contains {least}{count} input tokens, for a total of {least}{count + output} tokens. "
            f"{_REDUCE} (parameter=input_tokens, value={count})",
            "input_tokens",
        )


def seconds(query: Mapping[str, str], name: str) -> float:
    """Return a time in a query, in seconds; 0 if it is absent.

    Raises:
        BadRequest: the time is no number of at least 0.
    """
    text = query.get(name, "0")
    try:
        found = float(text)
    except ValueError:
        said = "Input should be a valid number, unable to parse string as a number"
        error = {"type": "float_parsing", "loc": ("query", name), "msg": said, "input": text}
        raise validation_error(error) from None
    if not found >= 0:  # also rejects nan
        said = "Input should be greater than or equal to 0"
        raise validation_error({"type": "greater_than_equal", "loc": ("query", name), "msg": said, "input": text})
    return found


def is_integer_text(text: str) -> bool:
    """Whether Python can read a text as an integer, as engines do."""
    try:
        int(text)
    except ValueError:  # also raised for too many digits
        return False
    return True


def check_rank(rank: object, ranks: int) -> int | None:
    """Return a requested data-parallel rank; None if none was requested.

    Raises:
        BadRequest: an unknown rank.
    """
    if rank is None or rank == "":
        return None
    try:
        number = int(rank) if isinstance(rank, str) or is_integer(rank) else -1
    except ValueError:
        number = -1
    if not 0 <= number < ranks:
        text_of_range = f"data_parallel_rank {rank!s:.80} is out of range [0, {ranks})."
        raise BadRequest(text_of_range, "data_parallel_rank")
    return int(number)
