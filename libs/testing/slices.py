"""The scheduler slice that the kernel gives a thread, where it reports one."""

import ctypes
import os
import platform
from typing import Final

from libs.runtime.linux import ATTRIBUTES

_CALLS: Final = {"x86_64": 315, "aarch64": 275}
"""The system call numbers of sched_getattr."""


def own_slice_ns() -> int | None:
    """Return the slice of the calling thread; None if the kernel has none for its kind or does not report it."""
    call = _CALLS.get(platform.machine())
    if platform.system() != "Linux" or call is None:
        return None
    found = ctypes.create_string_buffer(ATTRIBUTES.size)
    system_call = ctypes.CDLL(None).syscall
    arguments = (ctypes.c_long(0), found, ctypes.c_long(ATTRIBUTES.size), ctypes.c_long(0))
    if system_call(ctypes.c_long(call), *arguments) != 0:
        return None
    _size, policy, _flags, _nice, _priority, runtime_ns, *_others = ATTRIBUTES.unpack(found.raw)
    return runtime_ns or None if policy == os.SCHED_OTHER else None
