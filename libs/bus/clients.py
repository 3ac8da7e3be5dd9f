"""Opening and closing of aiokafka clients, safe even if the broker disappears. Settings secure their connections."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError, KafkaError

from libs.contracts.errors import StartupError
from libs.runtime.settings import CommonSettings
from libs.runtime.tasks import finish


@dataclass(frozen=True, slots=True)
class SecuredBrokers:
    """Brokers that require TLS, authentication, or both."""

    servers: str
    """The brokers' addresses in the form HOST:PORT[,HOST:PORT...]."""
    protocol: str
    """Kafka's name of the protocol: SSL, SASL_PLAINTEXT or SASL_SSL."""
    mechanism: str = ""
    user: str = ""
    password: str = ""
    context: ssl.SSLContext | None = None


Brokers = str | SecuredBrokers
"""Secured brokers, or HOST:PORT[,HOST:PORT...] of plaintext ones."""

PLAINTEXT: Final = "PLAINTEXT"


def brokers_of(settings: CommonSettings) -> Brokers:
    """Return the brokers of the settings. Raise StartupError for unreadable files."""
    protocol = settings.kafka_protocol
    if protocol == PLAINTEXT:
        return settings.kafka
    sasl = protocol.startswith("SASL")
    return SecuredBrokers(
        settings.kafka,
        protocol,
        mechanism=settings.kafka_mechanism if sasl else "",
        user=settings.kafka_user if sasl else "",
        password=settings.kafka_password.get_secret_value() if sasl else "",
        context=_context(settings) if protocol.endswith("SSL") else None,
    )


def client_options(brokers: Brokers) -> dict[str, Any]:
    """Return the arguments that every aiokafka client needs."""
    _lose_closed_connections()
    if isinstance(brokers, str):
        return {"bootstrap_servers": brokers}
    options: dict[str, Any] = {"bootstrap_servers": brokers.servers, "security_protocol": brokers.protocol}
    if brokers.context is not None:
        options["ssl_context"] = brokers.context
    if brokers.mechanism:
        options |= {
            "sasl_mechanism": brokers.mechanism,
            "sasl_plain_username": brokers.user,
            "sasl_plain_password": brokers.password,
        }
    return options


@cache
def _lose_closed_connections() -> None:
    """Make aiokafka raise KafkaConnectionError for a request over a connection that uvloop has already closed.

    uvloop 0.23 refuses the write with a RuntimeError, and aiokafka 0.14 only expects OSError. Raised from a fetch or a
    commit, it would end the service.
    """
    send = AIOKafkaConnection.send

    def send_if_open(self: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Any:
        try:
            return send(self, request, expect_response)
        except RuntimeError as error:
            if self._writer is None or not self._writer.is_closing():
                raise
            self.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"the connection to the broker is closed: {error}") from error

    AIOKafkaConnection.send = send_if_open


def _context(settings: CommonSettings) -> ssl.SSLContext:
    """Return a context that verifies the broker's certificate and name, and presents the own certificate if there is
    one.
    """
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ca or None)
        if settings.kafka_cert:
            context.load_cert_chain(settings.kafka_cert, settings.kafka_key or None)
    except OSError as error:  # includes ssl's own errors
        raise StartupError(
            f"FULCRUM_KAFKA_CA, _CERT or _KEY cannot be read as PEM files: {error.strerror or error}"
        ) from None
    return context


REQUEST_TIMEOUT_MS = 3000
"""The timeout of each request; a slower broker counts as away."""
METADATA_AGE_MS = 5000
BATCH_BYTES = 512 * 1024
MAX_RECORD_BYTES = 1024 * 1024
MEMBER_FETCH_BYTES = 128 * 1024
"""The bytes of each partition that a group member prefetches ahead of its processing."""
TRANSACTION_TIMEOUT_MS = 20_000
"""The longest time for which an open transaction may block readers, unless its producer's successor ends it sooner."""
SESSION_TIMEOUT_MS = 6_000
"""The silence after which a group member loses its partitions to others."""
REBALANCE_TIMEOUT_MS = 10_000
# The broker answers a join once all members of the group have joined or been dropped.
JOIN_TIMEOUT_MS = REBALANCE_TIMEOUT_MS + 2_000
MAX_WORK_MS = 24 * 3_600_000
"""The longest time for which a member may process the records that it has read. Its heartbeats show that it is
alive.
"""
# For a transactional producer, whose predecessor's open transactions are ended first.
OPEN_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 3.0
FETCH_WAIT_MS = 500
"""The longest time for which a fetch waits at the broker for a first record."""
GATHER_BYTES = 1024 * 1024
"""The bytes at which a gathering fetch returns early."""


class BrokerAway(Exception):
    """There is no broker to connect to at present."""


CONNECTION_ERRORS = (BrokerAway, KafkaError, OSError, TimeoutError, KeyError)
"""Errors of a call while the broker is away. aiokafka raises KeyError if a connection closes while a request times
out.
"""


def quiet_client_log() -> None:
    # aiokafka logs each attempt during an outage; the bus logs the outage itself.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


@asynccontextmanager
async def open_admin(bootstrap: Brokers, client_id: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """Open a connected admin client. Raise one of CONNECTION_ERRORS while the broker is away."""
    admin = AIOKafkaAdminClient(**client_options(bootstrap), client_id=client_id, request_timeout_ms=REQUEST_TIMEOUT_MS)
    try:
        await _start(admin.start())
        yield admin
    finally:
        await admin.close()


def _producer(bootstrap: Brokers, client_id: str, **own: Any) -> AIOKafkaProducer:
    return AIOKafkaProducer(
        **client_options(bootstrap),
        client_id=client_id,
        acks="all",
        linger_ms=0,
        max_batch_size=BATCH_BYTES,
        max_request_size=MAX_RECORD_BYTES,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        **own,
    )


@asynccontextmanager
async def open_producer(bootstrap: Brokers, client_id: str) -> AsyncIterator[AIOKafkaProducer]:
    """Open a connected producer. Leaving the context waits for its queued records, which it abandons after
    REQUEST_TIMEOUT_MS.
    """
    producer = _producer(bootstrap, client_id)
    try:
        await _start(producer.start())
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def open_transactions(
    bootstrap: Brokers, client_id: str, transactional_id: str
) -> AsyncIterator[AIOKafkaProducer]:
    """Open a connected transactional producer.

    Any other producer of the same id is fenced from now on, and its open transactions are aborted or committed. Raise
    one of CONNECTION_ERRORS, also if no coordinator answers within OPEN_TIMEOUT_S.
    """
    producer = _producer(
        bootstrap, client_id, transactional_id=transactional_id, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS
    )
    try:
        await _start(producer.client.bootstrap())
        # The rest of `producer.start`, which retries until a coordinator answers. It can be cancelled at any time: its
        # connections belong to the client, which is closed below.
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await producer._sender.start()
        yield producer
    finally:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await producer.stop()
        except CONNECTION_ERRORS:  # stopping waits for records that the broker does not accept
            await producer._sender.close()
            await producer.client.close()


@asynccontextmanager
async def open_member(bootstrap: Brokers, client_id: str, group: str) -> AsyncIterator[AIOKafkaConsumer]:
    """Open a connected consumer of a group, without subscriptions and automatic commits."""
    consumer = AIOKafkaConsumer(
        **client_options(bootstrap),
        client_id=client_id,
        group_id=group,
        group_instance_id=client_id,  # a restarted member regains its partitions at once
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        fetch_max_wait_ms=FETCH_WAIT_MS,
        max_partition_fetch_bytes=MEMBER_FETCH_BYTES,
        request_timeout_ms=JOIN_TIMEOUT_MS,
        metadata_max_age_ms=METADATA_AGE_MS,
        session_timeout_ms=SESSION_TIMEOUT_MS,
        heartbeat_interval_ms=SESSION_TIMEOUT_MS // 5,
        rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
        max_poll_interval_ms=MAX_WORK_MS,
    )
    try:
        await _start(consumer.start())
        yield consumer
    finally:
        await _stop(consumer)


@asynccontextmanager
async def open_consumer(
    bootstrap: Brokers,
    client_id: str,
    *,
    uncommitted: bool = False,
) -> AsyncIterator[AIOKafkaConsumer]:
    """Open a connected consumer without group and partitions. If `uncommitted`, it also reads open transactions."""
    consumer = AIOKafkaConsumer(
        **client_options(bootstrap),
        client_id=client_id,
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",  # the earliest remaining record, if retention has passed the position
        isolation_level="read_uncommitted" if uncommitted else "read_committed",
        fetch_max_wait_ms=FETCH_WAIT_MS,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        metadata_max_age_ms=METADATA_AGE_MS,
    )
    try:
        await _start(consumer.start())
        yield consumer
    finally:
        await _stop(consumer)


def at_once() -> int:
    """Return 0, so that the broker does not gather records."""
    return 0


def gather(consumer: AIOKafkaConsumer, gather_ms: int) -> None:
    """Let the broker gather records for `gather_ms` from the next fetch on; with 0 it returns each one at once."""
    fetcher = consumer._fetcher  # aiokafka has no other way to change these
    fetcher._fetch_min_bytes = GATHER_BYTES if gather_ms else 1
    fetcher._fetch_max_wait_ms = gather_ms or FETCH_WAIT_MS


async def _start(starting: Coroutine[Any, Any, None]) -> None:
    """Connect. A cancellation takes effect only after the timeouts below, because aiokafka would leave its connection
    open.
    """
    await finish("kafka client start", starting)


async def _stop(consumer: AIOKafkaConsumer) -> None:
    """Stop the consumer completely. An error that ended aiokafka's fetching is raised by `stop` with connections still
    open.
    """
    try:
        await consumer.stop()
    except (asyncio.CancelledError, *CONNECTION_ERRORS):
        await consumer._client.close()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise


SPAN_POLL_MS = 500
SPAN_POLL_RECORDS = 500
SPAN_STALL_POLLS = 20
"""The number of consecutive polls at one position after which a span has failed. They are counted, because time also
passes while the process does not run.
"""


async def read_span(consumer: AIOKafkaConsumer, part: TopicPartition, start: int, end: int) -> AsyncIterator[Any]:
    """Yield aiokafka's committed records with offsets in [start, end). Raise one of CONNECTION_ERRORS."""
    consumer.assign([part])
    consumer.seek(part, start)
    position, empty_polls = start, 0
    while position < end:
        batches = await consumer.getmany(part, timeout_ms=SPAN_POLL_MS, max_records=SPAN_POLL_RECORDS)
        for record in batches.get(part, ()):
            if record.offset < end:
                yield record
        known, position = position, await consumer.position(part)
        empty_polls = 0 if position > known else empty_polls + 1
        if empty_polls > SPAN_STALL_POLLS:
            raise BrokerAway(f"{part} has records that do not arrive")
