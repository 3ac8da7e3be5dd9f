"""Real stores that strangers cannot use: Kafka with TLS, SASL and an authorizer, Redis with TLS and ACLs."""

import contextlib
import secrets
import shutil
import socket
import ssl
import string
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from aiokafka.protocol.admin import CreateAclsRequest

from libs.bus.clients import Brokers, open_admin
from libs.runtime.net.authority import issue
from libs.runtime.net.ports import held_port
from libs.testing.servers.server import Server, ServerFailed
from libs.testing.servers.stores import (
    DEPLOY,
    JVM,
    RedisUnavailable,
    folder_of_store,
    format_kafka,
    kafka_jars,
    listens,
    running,
)

USER: Final = "fulcrum"
STRANGER: Final = "stranger"
"""A known user without any rights."""
BROKER: Final = "broker"
"""The name of Kafka's broker, the only user that no rule binds."""
REDIS_RULES: Final = ("~fulcrum:*", "&fulcrum:*", "+@all", "-@admin", "-@dangerous", "+info", "+keys")
"""The commands and keys that docs/security-network.md grants the suite's user."""
_KAFKA: Final = string.Template("""
listeners=SASL_SSL://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller_port
advertised.listeners=SASL_SSL://127.0.0.1:$port
listener.security.protocol.map=SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT
inter.broker.listener.name=SASL_SSL
sasl.enabled.mechanisms=SCRAM-SHA-512
sasl.mechanism.inter.broker.protocol=SCRAM-SHA-512
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required username="$broker" password="$password";
ssl.keystore.type=PEM
ssl.keystore.location=$folder/worker.pem
ssl.truststore.type=PEM
ssl.truststore.location=$folder/ca.pem
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:$broker;User:ANONYMOUS
""")  # noqa: E501 (Kafka has these in one line)


@dataclass(frozen=True, slots=True)
class SecuredServer:
    """A running store with the credentials of its users."""

    address: str
    """HOST:PORT."""
    ca: Path
    """The authority that signed its certificate."""
    password: str
    """The password of USER, of STRANGER, and of Kafka's BROKER."""
    server: Server


@contextlib.contextmanager
def secured_kafka() -> Iterator[SecuredServer]:
    """Run Apache Kafka with only a SASL_SSL listener. Raise KafkaUnavailable."""
    jars = kafka_jars()
    with held_port() as port, held_port() as controller_port, folder_of_store() as folder:
        _certificates(folder)
        password = secrets.token_hex(12)
        values = {"port": port, "controller_port": controller_port, "folder": folder, "data": folder / "data"}
        base = string.Template((DEPLOY / "server.properties").read_text()).substitute(values)
        properties = folder / "server.properties"
        properties.write_text(base + _KAFKA.substitute(values, broker=BROKER, password=password))
        java = (*JVM, "-cp", f"{jars}/*")
        users = [f"SCRAM-SHA-512=[name={name},password={password}]" for name in (BROKER, USER, STRANGER)]
        format_kafka(java, properties, users=users)
        command = (*java, "kafka.Kafka", str(properties))
        server = Server("secured Kafka", command, log=folder / "log", ready=lambda _: listens(port))
        with running(server):
            yield SecuredServer(f"127.0.0.1:{port}", folder / "ca.pem", password, server)


_TOPIC, _GROUP, _TRANSACTIONAL_ID = 2, 3, 5
_PREFIXED, _ALL, _ALLOW = 4, 2, 3
# From Kafka's protocol: kinds of resources, matching of their names, operations, permissions.


async def grant_kafka(brokers: Brokers, prefix: str) -> None:
    """Grant the suite's user the rights of docs/security-network.md and no more.

    They are all operations on topics, groups and transactional ids that begin with `prefix`. `brokers` connects as
    BROKER.
    """
    async with open_admin(brokers, "acls") as admin:
        for kind in (_TOPIC, _GROUP, _TRANSACTIONAL_ID):
            rule = CreateAclsRequest(kind, prefix, _PREFIXED, f"User:{USER}", "*", _ALL, _ALLOW)
            answer = await admin._send_request(rule)  # aiokafka knows the message and has no call for it
            ((code, message),) = answer.creation_responses
            if code:
                raise ServerFailed(f"Kafka took no rule: {message}")


@contextlib.contextmanager
def secured_redis() -> Iterator[SecuredServer]:
    """Run the system's redis-server with TLS only and no default user. Raise RedisUnavailable."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise RedisUnavailable("a secured Redis needs redis-server on the PATH")
    with held_port() as port, folder_of_store() as folder:
        _certificates(folder)
        password = secrets.token_hex(12)
        options = {
            "port": "0", "tls-port": str(port), "bind": "127.0.0.1", "dir": str(folder), "tls-auth-clients": "no",
            "tls-cert-file": str(folder / "worker.pem"), "tls-key-file": str(folder / "worker.pem"),
            "tls-ca-cert-file": str(folder / "ca.pem"), "loglevel": "warning",
        }  # fmt: skip
        lines = [f"{name} {value}" for name, value in options.items()]
        lines += ['save ""', "user default off", f"user {STRANGER} on >{password} ~other:* +@read"]
        lines.append(f"user {USER} on >{password} {' '.join(REDIS_RULES)}")
        config = folder / "redis.conf"
        config.write_text("\n".join(lines))
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        command = (binary, str(config))
        server = Server("secured Redis", command, log=folder / "log", ready=lambda _: _shakes_hands(port, context))
        with running(server):
            yield SecuredServer(f"127.0.0.1:{port}", folder / "ca.pem", password, server)


def _certificates(folder: Path) -> None:
    issue(folder, "local", now=datetime.now(UTC), names=("127.0.0.1",), roles=("worker",), days=1)


def _shakes_hands(port: int, context: ssl.SSLContext) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0) as plain:
            context.wrap_socket(plain, server_hostname="127.0.0.1").close()
            return True
    except OSError:
        return False
