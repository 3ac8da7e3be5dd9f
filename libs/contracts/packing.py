"""Repeated integers travel as packed bytes: pure-Python protobuf objects for each would cost more than the rest."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np


def pack_u32(values: Sequence[int]) -> bytes:
    """Little-endian uint32s."""
    return struct.pack(f"<{len(values)}I", *values)


def unpack_u32(data: bytes) -> list[int]:
    """The inverse of `pack_u32`; raises ValueError when `data` is not a whole number of uint32s."""
    count, rest = divmod(len(data), 4)
    if rest:
        raise ValueError(f"a buffer size of {len(data)} bytes is no whole number of uint32s")
    return list(struct.unpack(f"<{count}I", data))


def pack_f32(values: Iterable[float]) -> bytes:
    """Little-endian float32s."""
    return np.fromiter(values, dtype="<f4").tobytes()


def unpack_f32(data: bytes) -> list[float]:
    """The inverse of `pack_f32`; raises ValueError when `data` is not a whole number of float32s."""
    values: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return values
