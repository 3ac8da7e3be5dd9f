"""Stores that survive the loss of one process: Redis with replicas and sentinels, and three Kafka brokers."""

import contextlib
import shutil
import socket
import string
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from libs.runtime.net.ports import held_port
from libs.testing.servers.server import POLL_S, Server, ServerFailed
from libs.testing.servers.stores import (
    DEPLOY,
    JVM,
    PROBE_TIMEOUT_S,
    RedisUnavailable,
    answers_ping,
    folder_of_store,
    format_kafka,
    kafka_jars,
    listens,
    redis_command,
    running,
)

NAME: Final = "fulcrum"
"""The name under which the sentinels monitor the primary."""
DOWN_AFTER_MS: Final = 1000
_SENTINEL: Final = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor {name} 127.0.0.1 {primary} {quorum}
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 5000
sentinel parallel-syncs {name} 2
"""


@dataclass(frozen=True, slots=True)
class ReplicatedRedis:
    """A running primary with its replicas and their sentinels."""

    url: str
    """The URL that names the sentinels."""
    servers: dict[int, Server]
    """The Redis servers by port, the first primary first."""
    sentinels: dict[int, Server]

    def primary(self) -> int:
        """Return the port of the primary that the first running sentinel names."""
        sentinel_port = next(port for port, server in self.sentinels.items() if server.runs)
        return int(_command(sentinel_port, "SENTINEL", "get-master-addr-by-name", NAME)[-1])

    def is_whole(self) -> bool:
        """Return whether all replicas are in sync and each sentinel knows all replicas and the other sentinels."""
        replicas, others = len(self.servers) - 1, len(self.sentinels) - 1
        try:
            in_step = sum("state=online" in line for line in _command(self.primary(), "INFO", "replication"))
            states = [_command(port, "SENTINEL", "MASTER", NAME) for port in self.sentinels]
        except OSError:
            return False
        known = {
            (state[state.index("num-slaves") + 1], state[state.index("num-other-sentinels") + 1]) for state in states
        }
        return in_step == replicas and known == {(str(replicas), str(others))}


@contextlib.contextmanager
def replicated_redis(replicas: int = 2, sentinels: int = 3) -> Iterator[ReplicatedRedis]:
    """Start redis-server of this machine as servers and sentinels. Raise RedisUnavailable if it is missing."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise RedisUnavailable("a replicated Redis needs redis-server on the PATH")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(1 + replicas + sentinels)]
        data, watching = ports[: 1 + replicas], ports[1 + replicas :]
        found = ReplicatedRedis(
            f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in watching)}/{NAME}/0", {}, {}
        )
        for port in data:
            folder = stack.enter_context(folder_of_store())
            command = redis_command(Path(binary), port=port, folder=folder)
            if port != data[0]:
                command += ["--replicaof", f"127.0.0.1 {data[0]}"]
            # A new replica gets its first copy at once, not after five seconds.
            command += ["--repl-diskless-sync-delay", "0"]
            found.servers[port] = _started(stack, f"Redis {port}", command, folder, port)
        for port in watching:
            folder = stack.enter_context(folder_of_store())
            config = folder / "sentinel.conf"
            config.write_text(
                _SENTINEL.format(
                    port=port, folder=folder, name=NAME, primary=data[0], quorum=sentinels // 2 + 1,
                    down_after_ms=DOWN_AFTER_MS,
                )
            )  # fmt: skip
            command = [binary, str(config), "--sentinel"]
            found.sentinels[port] = _started(stack, f"sentinel {port}", command, folder, port)
        yield found


def _started(stack: contextlib.ExitStack, name: str, command: Sequence[str], folder: Path, port: int) -> Server:
    server = Server(name, command, log=folder / "log", ready=lambda _: answers_ping(port))
    return stack.enter_context(running(server))


def _command(port: int, *words: str) -> list[str]:
    """Return the lines of a server's answer to one command."""
    with socket.create_connection(("127.0.0.1", port), PROBE_TIMEOUT_S) as connection:
        connection.sendall(f"{' '.join(words)}\r\n".encode())
        found = connection.recv(65_536).decode()
    return [line for line in found.splitlines() if line and line[0] not in "*$"]


BROKERS: Final = 3
LOOPBACK: Final = "127.0.0.1"
# Three Java processes at once take minutes on a busy machine.
CLUSTER_START_S: Final = 300.0
# Later lines take precedence over those of one node alone.
_BROKER: Final = string.Template("""
node.id=$number
controller.quorum.bootstrap.servers=
controller.quorum.voters=$voters
default.replication.factor=3
min.insync.replicas=2
offsets.topic.replication.factor=3
transaction.state.log.replication.factor=3
transaction.state.log.min.isr=2
share.coordinator.state.topic.replication.factor=3
share.coordinator.state.topic.min.isr=2
# Three nodes on a busy machine: a pause of one is no loss of it.
broker.session.timeout.ms=6000
""")


@dataclass(frozen=True, slots=True)
class KafkaCluster:
    """The brokers of one cluster, each of which is also a controller."""

    servers: str
    """The brokers' addresses, as KafkaBus takes them."""
    brokers: dict[int, Server]
    """The brokers by port."""


@dataclass(frozen=True, slots=True)
class BrokerSite:
    """The network and the disk of one broker."""

    address: str = LOOPBACK
    enter: tuple[str, ...] = ()
    """The words before a command that run it in the broker's network."""
    data: Path | None = None
    """The existing folder of the broker's records; None for one beside its log."""


@contextlib.contextmanager
def kafka_cluster(sites: Sequence[BrokerSite] = (BrokerSite(),) * BROKERS) -> Iterator[KafkaCluster]:
    """Start a node of Apache Kafka at each site. Raise KafkaUnavailable where it cannot run."""
    java = (*JVM, "-cp", f"{kafka_jars()}/*")
    with contextlib.ExitStack() as stack:
        ports = [(stack.enter_context(held_port()), stack.enter_context(held_port())) for _ in sites]
        voters = ",".join(
            f"{number}@{site.address}:{each[1]}"
            for number, (site, each) in enumerate(zip(sites, ports, strict=True), 1)
        )
        nodes, written = [], []
        for number, (site, (port, controller_port)) in enumerate(zip(sites, ports, strict=True), start=1):
            folder = stack.enter_context(folder_of_store())
            alone = (DEPLOY / "server.properties").read_text().replace(LOOPBACK, site.address)
            template = string.Template(alone + _BROKER.template)
            data = folder / "data" if site.data is None else site.data / "data"
            values = {"port": port, "controller_port": controller_port, "data": data}
            properties = folder / "data.properties"
            properties.write_text(template.substitute(values, number=number, voters=voters))
            written.append(properties)
            command = (*site.enter, *java, "kafka.Kafka", str(properties))
            server = Server(f"Kafka {number}", command, log=folder / "log", ready=_at_once)
            nodes.append((site.address, port, server))
        with ThreadPoolExecutor(len(sites)) as pool:
            list(pool.map(lambda each: format_kafka(java, each, alone=False), written))
        for _, _, server in nodes:
            stack.enter_context(running(server))
        deadline_s = time.monotonic() + CLUSTER_START_S
        while not all(listens(port, address) for address, port, _ in nodes):
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"three Kafka nodes did not serve within {CLUSTER_START_S:g} s")
            time.sleep(POLL_S)
        servers = ",".join(f"{address}:{port}" for address, port, _ in nodes)
        yield KafkaCluster(servers, {port: server for _, port, server in nodes})


def _at_once(_: int) -> bool:
    """Return at once, as one node serves only once another does."""
    return True
