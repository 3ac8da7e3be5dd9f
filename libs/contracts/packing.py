"""Repeated integers travel as packed bytes: pure-Python protobuf objects for each would cost more than the rest."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


def pack_u32(values: Sequence[int] | NDArray[np.int32]) -> bytes:
    """Little-endian uint32s."""
    return np.asarray(values, dtype="<u4").tobytes()


def unpack_u32(data: bytes) -> list[int]:
    """The inverse of `pack_u32`; raises ValueError when `data` is not a whole number of uint32s."""
    values: list[int] = np.frombuffer(data, dtype="<u4").tolist()
    return values


def pack_f32(values: Iterable[float]) -> bytes:
    """Little-endian float32s."""
    return np.fromiter(values, dtype="<f4").tobytes()


def unpack_f32(data: bytes) -> list[float]:
    """The inverse of `pack_f32`; raises ValueError when `data` is not a whole number of float32s."""
    values: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return values
