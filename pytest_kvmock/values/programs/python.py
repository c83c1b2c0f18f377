"""Values as Python source: numbers, texts, prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pytest_kvmock.values.events import block_text
from pytest_kvmock.values.tokens import Prompt


def quoted(text: str) -> str:
    """Return a text in double quotes."""
    return f'"{text}"'


def literal(value: object) -> str:
    """Return a value as Python source, with strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    return repr(value)


def is_literal(value: object) -> bool:
    """Whether Python can read what `literal` writes for a value."""
    if isinstance(value, Mapping):
        return all(map(is_literal, value.values()))
    if isinstance(value, tuple | list):
        return all(map(is_literal, value))
    return value is None or isinstance(value, str | int | float)


def prompt_text(prompt: Prompt, block_size: int) -> str:
    """Return a prompt as the argument of a call: a list of tokens, or a `Prompt` if it has more than tokens."""
    given = {} if prompt.keys is None else prompt.keys.given
    keys = "".join(f", {name}={literal(value)}" for name, value in given.items())
    if prompt.tokens is not None:
        tokens = token_list(prompt.tokens)
        return f"Prompt({tokens}{keys})" if keys else tokens
    hashes = ", ".join(number_parts(prompt.block_hashes(block_size)))
    length = "" if prompt.num_tokens is None else f", num_tokens={prompt.num_tokens}"
    return f"Prompt(hashes=[{hashes}]{length}{keys})"


def token_list(tokens: Sequence[int]) -> str:
    """Return a list of tokens as source, with long runs as ranges."""
    return f"[{', '.join(number_parts(tokens, str))}]"


def number_parts(numbers: Iterable[int], shown: Callable[[int], str] = block_text) -> list[str]:
    """Return the items of a list of numbers as source, with long runs up or down as ranges."""
    parts: list[str] = []
    for run, step in _runs(numbers):
        first, end = run[0], run[-1] + step
        if len(run) < 6 or end < 0:
            parts += map(shown, run)
        elif step < 0:
            parts.append(f"*range({shown(first)}, {shown(end)}, -1)")
        else:
            parts.append(f"*range({shown(first)}, {shown(end)})" if first else f"*range({shown(end)})")
    return parts


def _runs(numbers: Iterable[int]) -> Iterator[tuple[list[int], int]]:
    """Yield numbers as runs with one step, 1 or -1."""
    run: list[int] = []
    step = 1
    for number in numbers:
        if len(run) == 1 and abs(number - run[0]) == 1:
            step = number - run[0]
        elif run and number - run[-1] != step:
            yield run, step
            run, step = [], 1
        run.append(number)
    if run:
        yield run, step
