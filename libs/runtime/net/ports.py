"""Ports to listen on that the system gives to no outgoing connection, and limits on sockets and open files."""

import contextlib
import errno
import random
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
# Below the range that Linux gives to outgoing connections by default (32,768 to 60,999), and macOS (from 49,152).
RESERVED: Final = range(20_000, 32_000)
# Used if this machine gives ports of RESERVED to outgoing connections.
OTHERS: Final = (range(10_000, 20_000), range(61_000, 65_536))
# A smaller range would soon be used up.
MIN_PORTS: Final = 1_000
_OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def apart_from(first: int, last: int) -> range:
    """Return ports outside `first` to `last`.

    If those leave too few, return the usual ones. A connection may then take one before it is bound, but not while
    it is held.
    """
    for ports in (RESERVED, *OTHERS):
        below, above = range(ports.start, min(ports.stop, first)), range(max(ports.start, last + 1), ports.stop)
        found = max(below, above, key=len)
        if len(found) >= MIN_PORTS:
            return found
    return RESERVED


def listening_ports() -> range:
    """Return the ports to listen on by this machine's present setup, or the usual ones if the system does not say."""
    try:
        first, last = _OUTGOING.read_text().split()
        return apart_from(int(first), int(last))
    except (OSError, ValueError):
        return RESERVED


def bind_free(sock: socket.socket, host: str, among: Sequence[int] | None = None) -> int:
    """Bind to a port that is neither bound nor held (`held_port`), and return its number.

    A server with SO_REUSEADDR can bind it as soon as the socket is closed. Raise OSError if none is free, or the
    host lacks that address.
    """
    ports = listening_ports() if among is None else among
    first = random.randrange(len(ports))  # noqa: S311 - so that those who look at the same time seldom meet
    for port in chain(ports[first:], ports[:first]):
        try:
            sock.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            # After binding: with the option set before, Linux would share a port that somebody holds.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return port
    raise OSError(errno.EADDRINUSE, f"no port from {ports[0]} to {ports[-1]} is free on {host}")


@contextlib.contextmanager
def held_port(host: str = LOOPBACK, among: Sequence[int] | None = None) -> Iterator[int]:
    """Yield a port for a program that only accepts a number, reserved while the context is open.

    On Linux a bound socket that does not listen holds it, against connections and against all who look for a free
    port. A server with SO_REUSEADDR, as servers have, can still listen there repeatedly. On other systems no server
    could, so the port is only looked for. Raise OSError like `bind_free`.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        port = bind_free(holder, host, among)
        if sys.platform != "linux":
            holder.close()
        yield port


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
