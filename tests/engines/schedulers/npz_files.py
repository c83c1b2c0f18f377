"""`.npz` files in the byte format of numpy."""

import struct
import zipfile

PROFILE = {
    "prefill_isl": [100.0, 1000.0],
    "prefill_ttft_ms": [10.0, 33.3],
    "decode_active_kv_tokens": [64.0, 640.0],
    "decode_context_length": [10.0, 100.0, 1000.0],
    "decode_itl": [[3.0, 4.0, 5.0], [6.0, 8.0, 10.0]],
}
"""The arrays of a small profile."""

_FORMATS = {"f4": "f", "f8": "d", "i4": "i", "i8": "q"}


def npy(values, *, dtype="<f8", fortran=False, version=1, shape=None):
    """Return the bytes of a one-dimensional array, or of a two-dimensional one if given rows."""
    rows = bool(values) and isinstance(values[0], list | tuple)
    if shape is None:
        shape = (len(values), len(values[0])) if rows else (len(values),)
    if rows:
        values = [each for line in (zip(*values, strict=True) if fortran else values) for each in line]
    header = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
    size = "<H" if version == 1 else "<I"
    header = header.ljust(-(-(len(header) + 11) // 64) * 64 - 11) + "\n"
    begin = b"\x93NUMPY" + bytes((version, 0)) + struct.pack(size, len(header)) + header.encode()
    kind = _FORMATS.get(dtype[1:], "d")
    if kind in "iq":
        values = [int(each) for each in values]
    return begin + struct.pack(f"{dtype[0] if dtype[0] in '<>' else '<'}{len(values)}{kind}", *values)


def write_npz(path, arrays, *, compressed=False, suffix=".npy", **form):
    """Write arrays, each given as numbers or as the bytes of a member; return the path."""
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, values in arrays.items():
            archive.writestr(name + suffix, values if isinstance(values, bytes) else npy(values, **form))
    return path
