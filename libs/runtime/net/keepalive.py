"""Connections whose peer has left the network without a word end by themselves, where the kernel knows how to."""

import socket
import sys
from typing import Final

PROBES: Final = 3


def end_when_vanished(sock: socket.socket, stall_s: int) -> None:
    """End a connection whose peer answers nothing for `stall_s`, or takes no byte that waits for it for so long.

    What a listening socket accepts inherits it.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(stall_s // 2, 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(stall_s // (2 * PROBES), 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
