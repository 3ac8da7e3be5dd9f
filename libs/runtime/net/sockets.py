"""Limits on open files and sockets, and the end of connections whose peer has vanished."""

import resource
import socket
import sys
from contextlib import suppress
from typing import Final

PROBES: Final = 3


def end_when_vanished(sock: socket.socket, stall_s: int) -> None:
    """End a connection whose peer answers nothing, or accepts no pending byte, for `stall_s`.

    Connections inherit it from the listening socket that accepts them.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(stall_s // 2, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(stall_s // (2 * PROBES), 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)


WANTED_FILES = 65_536


def raise_open_files() -> None:
    # Shells commonly start with 1,024, fewer than the connections of a busy gateway.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft
