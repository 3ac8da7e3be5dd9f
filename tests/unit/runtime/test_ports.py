"""Tests of ports to listen on: outside the ephemeral range, and each for one process of the machine."""

import asyncio
import errno
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libs.runtime.http import bind
from libs.runtime.net import ports
from libs.runtime.net.ports import LOOPBACK, MIN_PORTS, RESERVED, apart_from, bind_free, held_port, listening_ports
from libs.runtime.net.rpc import make_server
from libs.runtime.settings import CommonSettings
from libs.testing.servers.connections import many_connections
from libs.testing.servers.stores import embedded_redis
from libs.testing.wait import until

pytestmark = pytest.mark.system

LINUX = sys.platform == "linux"
HOLDS = pytest.mark.skipif(not LINUX, reason="ports are held on Linux")
PROCESSES, EACH = 4, 16
HOLDER = """
import sys
import threading
from contextlib import ExitStack
from libs.runtime.net.ports import held_port
among = range(int(sys.argv[1]), int(sys.argv[2]))
with ExitStack() as stack:
    print(*(stack.enter_context(held_port(among=among)) for _ in range(int(sys.argv[3]))), flush=True)
    sys.stdin.read()
"""


def outgoing() -> range:
    """Return the range of ports that the system gives to connections here."""
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


def server(port: int) -> socket.socket:
    """Open a server's socket, with SO_REUSEADDR."""
    return socket.create_server((LOOPBACK, port))


@given(st.tuples(st.integers(1, 65_535), st.integers(1, 65_535)).map(sorted))
@example([1024, 65_535])
@example([32_768, 60_999])
@example([49_152, 65_535])
@example([15_000, 64_000])
def test_ports_are_outside_the_ephemeral_range_if_enough_are_left(given: list[int]) -> None:
    first, last = given
    found = apart_from(first, last)
    assert len(found) >= MIN_PORTS
    assert found[0] >= 10_000 and found[-1] <= 65_535
    assert found == RESERVED or not set(found) & set(range(first, last + 1))
    if last < RESERVED.start or first >= RESERVED.stop:
        assert found == RESERVED


def test_the_usual_ephemeral_range_is_assumed_if_the_system_reports_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "range"
    monkeypatch.setattr(ports, "_OUTGOING", said)
    for text, expected in ((None, RESERVED), ("nonsense", RESERVED), ("18000 65000\n", range(10_000, 18_000))):
        if text is not None:
            said.write_text(text)
        assert listening_ports() == expected


@HOLDS
def test_a_port_chosen_by_a_service_is_not_used_by_connections_while_it_is_away() -> None:
    with ExitStack() as stack:
        picked = [stack.enter_context(bind(LOOPBACK, 0, "PORT")).getsockname()[1] for _ in range(20)]
        picked += [stack.enter_context(held_port()) for _ in range(20)]
        assert len(set(picked)) == 40
        assert not set(picked) & set(outgoing())


@HOLDS
def test_no_two_callers_in_several_processes_hold_the_same_port() -> None:
    with held_port() as start, ExitStack() as stack:
        # Twice as many as requested, as some may be in use already.
        among = (str(start + 1), str(start + 1 + 2 * PROCESSES * EACH), str(EACH))
        held = []
        for _ in range(PROCESSES):
            command = [sys.executable, "-c", HOLDER, *among]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            held.append(stack.enter_context(process))
        found = [int(port) for process in held if process.stdout for port in process.stdout.readline().split()]
        assert len(set(found)) == len(found) == PROCESSES * EACH


@HOLDS
def test_a_held_port_is_free_for_successive_servers_and_not_for_other_searches() -> None:
    with held_port() as port:
        for _ in range(3):  # killed and started again, as a store under test is
            with server(port) as first:
                with pytest.raises(OSError, match="in use") as refused:
                    server(port)
                assert refused.value.errno == errno.EADDRINUSE
                with socket.create_connection((LOOPBACK, port)) as client:
                    accepted, _ = first.accept()
                    accepted.close()  # at this end first: TIME_WAIT is at the server's port
                    assert client.recv(1) == b""
        with socket.socket() as connection, pytest.raises(OSError, match="in use"):
            connection.bind((LOOPBACK, port))
        with socket.socket() as other, pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            bind_free(other, LOOPBACK, among=[port])
        with socket.socket() as client:
            assert client.connect_ex((LOOPBACK, port)) == errno.ECONNREFUSED


def test_a_released_port_is_free_for_the_next_caller() -> None:
    with held_port() as port:
        pass
    with held_port(among=[port]) as again:
        assert again == port


@HOLDS
async def test_every_kind_of_server_can_listen_on_a_held_port() -> None:
    with held_port() as port:
        with bind(LOOPBACK, port, "PORT"):
            pass
        async with await asyncio.start_server(lambda *_: None, LOOPBACK, port):
            pass
        grpc_server, bound = make_server(CommonSettings(), f"{LOOPBACK}:{port}")
        await grpc_server.start()
        await grpc_server.stop(None)
        assert bound == port
    with embedded_redis() as redis:
        assert int(redis.url.removesuffix("/0").rpartition(":")[2]) in listening_ports()


@HOLDS
def test_a_service_binds_its_chosen_port_again_while_old_connections_linger() -> None:
    with bind(LOOPBACK, 0, "PORT") as sock:
        sock.setblocking(True)
        port = sock.getsockname()[1]
        with socket.create_connection((LOOPBACK, port)) as client:
            accepted, _ = sock.accept()
            accepted.close()
            assert client.recv(1) == b""
    bind(LOOPBACK, port, "PORT").close()


@pytest.mark.parametrize(("command", "failed"), [("pass", 0), ("raise SystemExit(3)", 2)])
def test_a_command_runs_beside_connections_and_its_failures_are_counted(command: str, failed: int) -> None:
    words = [sys.executable, "-m", "libs.testing.servers.connections", "--times", "2", sys.executable, "-c", command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == (1 if failed else 0)
    assert done.stdout.splitlines()[-1].startswith(f"{failed} of 2 failed beside ")


async def test_connections_are_opened_while_the_context_is_open() -> None:
    with many_connections() as connections:
        await until(lambda: connections.opened >= 50, what="the fiftieth connection")
    assert "connections" not in {thread.name for thread in threading.enumerate()}
