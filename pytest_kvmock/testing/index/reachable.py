"""The number of Python objects that an object holds: a leak raises it, whatever size the object reports."""

from __future__ import annotations

import gc
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from threading import Thread
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Final

_NOT_OF_IT: Final = (
    ModuleType,
    type,
    CodeType,
    FrameType,
    Thread,
    BuiltinFunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
"""Kinds that are not followed: objects of the interpreter, and those that lead to all other objects."""

_BUFFERS: Final = (bytes, bytearray, str, array)

_A_PART: Final = 32
"""Bytes of a buffer that count as one object: the reference index keeps 8 for each removed name, as Dynamo does."""


def reachable_from(subject: object) -> int:
    """Return the number of objects that can be reached from an object, its class's attributes, and the containers in
    the module of its class.

    Each 32 bytes of strings and buffers count as one. Memory outside of Python is not seen.

    Args:
        subject: any object.
    """
    todo, seen, count = list(_roots(subject)), set[int](), 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, _NOT_OF_IT):
            continue
        seen.add(id(each))
        count += 1
        if isinstance(each, _BUFFERS):
            count += sys.getsizeof(each) // _A_PART
        elif isinstance(each, FunctionType):  # its globals belong to a module
            todo += [*(each.__closure__ or ()), *(each.__defaults__ or ()), each.__dict__]
        else:
            todo += gc.get_referents(each)
    return count


def _roots(subject: object) -> Iterator[Any]:
    yield subject
    for kind in type(subject).__mro__[:-1]:
        yield from (each for each in vars(kind).values() if not isinstance(each, property | staticmethod | classmethod))
        module = sys.modules.get(kind.__module__)
        for name, each in vars(module).items() if module is not None else ():
            if not name.startswith("__") and _may_grow(each):  # skips `__builtins__` and the like
                yield each


def _may_grow(value: object) -> bool:
    return isinstance(value, dict | list | set | deque | bytearray | array)
