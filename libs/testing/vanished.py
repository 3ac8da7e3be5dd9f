"""A TCP peer that vanishes from the network: no end of the connection, and no answer to anything."""

import ctypes
import socket
import struct

SO_ATTACH_FILTER = 26
"""Linux, asm-generic/socket.h."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""struct sock_filter: return 0 bytes of each packet."""


def vanish(sock: socket.socket) -> None:
    """Let the kernel drop whatever comes for a connected socket, acknowledgements of nothing included; keep it open,
    since closing would send an end."""
    code = ctypes.create_string_buffer(_DROP_ALL)
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(code)))
