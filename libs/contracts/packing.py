"""Repeated numbers as packed bytes, since pure-Python protobuf objects for each would cost more than the rest of a
frame.
"""

import struct
from collections.abc import Iterable, Sequence

import numpy as np


def pack_u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def unpack_u32(data: bytes) -> list[int]:
    """Unpack little-endian uint32s. Raise ValueError if `data` is not a whole number of them."""
    count, rest = divmod(len(data), 4)
    if rest:
        raise ValueError(f"a buffer size of {len(data)} bytes is not a multiple of four")
    return list(struct.unpack(f"<{count}I", data))


def pack_f32(values: Iterable[float]) -> bytes:
    return np.fromiter(values, dtype="<f4").tobytes()


def unpack_f32(data: bytes) -> list[float]:
    """Unpack little-endian float32s. Raise ValueError if `data` is not a whole number of them."""
    values: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return values
