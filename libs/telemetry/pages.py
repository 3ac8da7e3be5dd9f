"""Arrays that take memory page by page, as they are written."""

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray


def untouched_zeros(shape: tuple[int, ...], kind: type[np.generic] | np.dtype[Any]) -> NDArray[Any]:
    """Return an array of zeros whose pages take no memory until they are written."""
    # A large array of numpy may take freed memory instead, which it fills with zeros, and asks for huge pages.
    dtype = np.dtype(kind)
    pages = mmap.mmap(-1, max(math.prod(shape) * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)
