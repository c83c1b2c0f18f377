"""A reader of arrays of numbers from `.npz` files, without numpy.

An `.npz` file is a zip archive of `.npy` members. The reader takes all three versions of the `.npy` format, C and
Fortran order, and either byte order. It takes numpy's types of numbers: floats and integers of 4 and 8 bytes.
"""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_kvmock.values.checks import is_integer

if TYPE_CHECKING:
    from zipfile import ZipFile

_MAGIC: Final = b"\x93NUMPY"
_FORMATS: Final = {"f4": "f", "f8": "d", "i4": "i", "i8": "q", "u4": "I", "u8": "Q"}


@dataclass(frozen=True, slots=True)
class NpyArray:
    """An array of numbers.

    Attributes:
        shape: its length in each dimension.
        values: its numbers in C order: the last dimension varies fastest.
        dtype: the type in the file; float64 is "<f8" almost everywhere.
    """

    shape: tuple[int, ...]
    values: Sequence[float]
    dtype: str


def read_npz(path: Path, names: Sequence[str]) -> dict[str, NpyArray]:
    """Return some arrays of an `.npz` file, by name; other arrays are ignored.

    Raises:
        ValueError: the file does not exist or is not an `.npz` file, or an array is missing or cannot be read. The
            message has the path, and the array's name.
    """
    import zlib  # imported on first use
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(path) as archive:
            members = _members(archive)
            for name in names:
                if name not in members:
                    raise ValueError(f"{path} has no array {name!r}; it has {', '.join(sorted(members)) or 'none'}")
            arrays = {}
            for name in names:
                try:
                    arrays[name] = parse_npy(archive.read(members[name]))
                except (
                    BadZipFile,
                    zlib.error,
                    EOFError,
                    NotImplementedError,
                    RuntimeError,
                    OSError,
                    ValueError,
                ) as error:
                    raise ValueError(f"array {name!r} of {path} cannot be read: {error}") from None
            return arrays
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error) as error:  # a corrupt zip directory
        raise ValueError(f"{path} is not an .npz file (a zip archive of .npy arrays): {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _members(archive: ZipFile) -> dict[str, str]:
    """Return the names of the members by the names of their arrays; as in Dynamo, the suffix is optional."""
    return {name.removesuffix(".npy"): name for name in archive.namelist()}


def parse_npy(data: bytes) -> NpyArray:
    """Parse the content of an `.npy` file.

    Raises:
        ValueError: the format is wrong, or the values are not numbers.
    """
    if not data.startswith(_MAGIC) or len(data) < 10:
        raise ValueError("it is not an .npy array")
    width = {1: "<H", 2: "<I", 3: "<I"}.get(data[6])
    if width is None:
        raise ValueError(f"version {data[6]}.{data[7]} of the .npy format is not known")
    begin = 8 + struct.calcsize(width)
    end = begin + struct.unpack_from(width, data, 8)[0] if len(data) >= begin else begin
    if len(data) < end:
        raise ValueError("its header is cut off")
    dtype, is_fortran, shape = _header(data[begin:end])
    kind = _FORMATS.get(dtype[1:]) if dtype[:1] in ("<", ">") else None
    if kind is None:
        allowed = ", ".join(f"<{each}" for each in _FORMATS)
        raise ValueError(f"its numbers must be of one of the types {allowed} (or big-endian), got {dtype!r:.40}")
    count = math.prod(shape)
    expected = count * int(dtype[2:])
    if len(data) - end != expected:
        raise ValueError(f"an array of shape {shape} must have {expected} bytes of data, got {len(data) - end}")
    values = struct.unpack_from(f"{dtype[0]}{count}{kind}", data, end)
    if is_fortran and len(shape) > 1:
        if len(shape) > 2:
            raise ValueError(f"arrays in Fortran order must have 1 or 2 dimensions, got shape {shape}")
        rows, columns = shape
        values = tuple(values[row + column * rows] for row in range(rows) for column in range(columns))
    return NpyArray(shape, values, dtype)


def _header(text: bytes) -> tuple[str, bool, tuple[int, ...]]:
    """Return the type, whether the array is in Fortran order, and its shape."""
    try:
        header = ast.literal_eval(text.decode("utf-8"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # what literal_eval raises
        header = None
    if isinstance(header, dict):
        dtype, is_fortran, shape = (header.get(key) for key in ("descr", "fortran_order", "shape"))
        sizes = shape if isinstance(shape, tuple) else (None,)
        if isinstance(is_fortran, bool) and all(is_integer(size, 0) for size in sizes):
            return str(dtype), is_fortran, sizes
    raise ValueError(f"its header is not that of an .npy array: {text[:60]!r}")
