import errno
import socket

from libs.contracts.errors import StartupError
from libs.runtime.net.ports import bind_free
from libs.runtime.net.sockets import end_when_vanished

BACKLOG = 2048
# How long a peer may accept no pending byte, or leave the network unanswered.
STALL_S = 30
# Send buffer of each connection in the kernel, which would let it grow to megabytes for a peer that does not read.
SEND_BUFFER_BYTES = 128 * 1024


def bind(host: str, port: int, variable: str, *, stall_s: int = STALL_S) -> socket.socket:
    """Return a listening socket. Raise StartupError that names the port and the variable that sets it.

    Port 0 picks one that stays free for a restart: no outgoing connection is given it meanwhile. Where the kernel
    supports it, connections end whose peer has vanished or reads nothing for `stall_s`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    end_when_vanished(sock, stall_s)  # closing alone would wait for ever for a peer that answers but does not read
    try:
        if port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
        else:
            bind_free(sock, host)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use: stop what holds it or set {variable}") from None
        raise StartupError(
            f"cannot listen on {host}:{port} ({error.strerror}): set {variable} or FULCRUM_HOST"
        ) from None
    sock.setblocking(False)
    return sock
