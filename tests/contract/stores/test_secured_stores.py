"""Tests of Kafka and Redis with authentication: services connect, strangers and plaintext do not."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, NoPermissionError

from libs.bus.clients import CONNECTION_ERRORS, brokers_of, client_options, open_admin
from libs.bus.kafka import KafkaBus
from libs.bus.kafka_work import KafkaWork
from libs.bus.work import Lane
from libs.contracts.errors import BrokerUnavailable, StartupError
from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Result, Share
from libs.contracts.topics import BATCH_RESULTS, BATCH_SHARES
from libs.keys.book import KeySet, draw_key
from libs.keys.redis import RedisKeys
from libs.runtime.redis import make_redis
from libs.runtime.settings import CommonSettings
from libs.stores.limits import LedgerDown, RedisLedger
from libs.testing.servers.secured import (
    BROKER,
    STRANGER,
    USER,
    SecuredServer,
    grant_kafka,
    secured_kafka,
    secured_redis,
)
from libs.testing.servers.stores import KafkaUnavailable, RedisUnavailable
from tests.programs import skip_or_fail_in_ci

SETTLE_S = 40.0


@pytest.fixture(scope="module")
def kafka() -> Iterator[SecuredServer]:
    try:
        context = secured_kafka()
        server = context.__enter__()
    except KafkaUnavailable as error:
        skip_or_fail_in_ci(error)
    else:
        broker = brokers_of(kafka_settings(server, kafka_user=BROKER))
        asyncio.run(grant_kafka(broker, "fulcrum.test-"))
        yield server
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def redis() -> Iterator[SecuredServer]:
    try:
        context = secured_redis()
        server = context.__enter__()
    except RedisUnavailable as error:
        skip_or_fail_in_ci(error)
    else:
        yield server
        context.__exit__(None, None, None)


def kafka_settings(kafka: SecuredServer, **other: Any) -> CommonSettings:
    values = {
        "kafka": kafka.address, "kafka_protocol": "SASL_SSL", "kafka_user": USER, "kafka_password": kafka.password,
        "kafka_ca": str(kafka.ca),
    }  # fmt: skip
    return CommonSettings.model_validate(values | other)


@pytest.mark.kafka
async def test_topics_events_groups_and_transactions_pass_sasl_over_tls(kafka: SecuredServer, cluster: str) -> None:
    brokers = brokers_of(kafka_settings(kafka))
    bus, work = KafkaBus(brokers, cluster, "maker"), KafkaWork(brokers, cluster, "a")
    await bus.start()
    for number in range(20):
        bus.publish(BATCH_SHARES, Share(share_id=f"share-{number}", number=number))

    async def each_once(lane: Lane) -> None:
        async for batch in lane.batches():
            for record in batch:
                assert isinstance(record.value, Share)
                result = BATCH_RESULTS, Result(job_id="job", place=record.value.number)
                await lane.commit([result], next_offset=record.offset + 1)

    working = asyncio.create_task(work.work(BATCH_SHARES, "runners", each_once))
    found: list[int] = []
    try:
        async with asyncio.timeout(SETTLE_S):
            async for record in bus.subscribe((BATCH_RESULTS,), from_start=True):
                assert isinstance(record.value, Result)
                found.append(record.value.place)
                if len(found) == 20:
                    break
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await bus.close()
    assert sorted(found) == list(range(20))


@pytest.mark.kafka
@pytest.mark.parametrize(
    "wrong",
    [
        {"kafka_password": "wrong"},
        {"kafka_protocol": "SSL"},
        {"kafka_protocol": "PLAINTEXT"},
        {"kafka_protocol": "SASL_PLAINTEXT"},
        {"kafka_ca": ""},
        {"kafka_mechanism": "SCRAM-SHA-256"},
    ],
    ids=lambda wrong: "-".join(f"{key}={value}" for key, value in wrong.items()),
)
async def test_incomplete_credentials_are_refused(kafka: SecuredServer, wrong: dict[str, str]) -> None:
    brokers = brokers_of(kafka_settings(kafka, **wrong))
    with pytest.raises((*CONNECTION_ERRORS, ValueError)):
        async with asyncio.timeout(SETTLE_S), open_admin(brokers, "stranger"):
            pass


@pytest.mark.kafka
async def test_a_known_user_without_rights_writes_nothing(kafka: SecuredServer, cluster: str) -> None:
    owner = KafkaBus(brokers_of(kafka_settings(kafka)), cluster, "owner")
    await owner.start()
    stranger = KafkaWork(brokers_of(kafka_settings(kafka, kafka_user=STRANGER)), cluster, "b")
    with pytest.raises(BrokerUnavailable):
        await stranger.send(BATCH_SHARES, Share(share_id="forged"))
    await owner.close()


@pytest.mark.kafka
async def test_the_suites_user_reaches_no_topic_of_another_cluster(kafka: SecuredServer) -> None:
    """The user is no super user: the tests above pass by rules for `fulcrum.CLUSTER.` alone."""
    brokers, broker = brokers_of(kafka_settings(kafka)), brokers_of(kafka_settings(kafka, kafka_user=BROKER))
    owner = KafkaBus(broker, "other", "owner")
    await owner.start()
    owner.publish(BATCH_SHARES, Share(share_id="private"))
    await owner.close()
    work = KafkaWork(brokers, "other", "c")
    with pytest.raises(BrokerUnavailable):
        await work.send(BATCH_SHARES, Share(share_id="forged"))
    async with open_admin(broker, "all") as admin:
        assert BATCH_SHARES.name("other") in await admin.list_topics()
    async with open_admin(brokers, "own") as admin:
        assert not [name for name in await admin.list_topics() if name.startswith("fulcrum.other.")]


def redis_url(redis: SecuredServer, user: str = USER, password: str = "", scheme: str = "rediss") -> str:
    query = f"?ssl_ca_certs={redis.ca}" if scheme == "rediss" else ""
    return f"{scheme}://{user}:{password or redis.password}@{redis.address}/0{query}"


@pytest.fixture
async def ledger(redis: SecuredServer, cluster: str) -> AsyncIterator[RedisLedger]:
    found = RedisLedger(redis_url(redis), cluster)
    yield found
    await found.close()


@pytest.mark.redis
async def test_scripts_and_keys_work_over_tls_as_a_user_restricted_to_its_own_keys(
    redis: SecuredServer, cluster: str, ledger: RedisLedger
) -> None:
    taken = await ledger.take("a", "requests", 100, want=10, least=1)
    assert taken.granted == 10
    store = RedisKeys(redis_url(redis), cluster)
    _, key = draw_key("a", now_s=0)
    await store.change(lambda book: book.with_key(key, 0))
    loaded = await store.load()
    await store.close()
    assert loaded is not None and isinstance(loaded.book, KeySet) and loaded.book.keys == (key,)
    client = make_redis(redis_url(redis), timeout_ms=3000)
    for forbidden in (("SET", "other:key", "x"), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("ACL", "LIST")):
        with pytest.raises(NoPermissionError):
            await client.execute_command(*forbidden)
    await client.aclose()


@pytest.mark.redis
async def test_strangers_plaintext_and_unknown_authorities_are_refused(redis: SecuredServer, cluster: str) -> None:
    wrong = make_redis(redis_url(redis, password="wrong"), timeout_ms=3000)
    with pytest.raises(AuthenticationError):
        await wrong.ping()
    await wrong.aclose()
    unknown = f"rediss://{USER}:{redis.password}@{redis.address}/0"
    for url in (redis_url(redis, user=STRANGER), redis_url(redis, scheme="redis"), unknown):
        stranger = RedisLedger(url, cluster)
        with pytest.raises(LedgerDown):
            await stranger.take("a", "requests", 100, want=1, least=1)
        with suppress(Exception):
            await stranger.close()


def test_a_user_without_a_password_is_one_line_that_names_the_variables() -> None:
    with pytest.raises(ValueError, match="FULCRUM_KAFKA_USER and _PASSWORD"):
        CommonSettings.model_validate({"kafka_protocol": "SASL_SSL", "kafka_user": "fulcrum"})
    settings = CommonSettings.model_validate({"kafka_protocol": "SSL", "kafka_ca": "/none.pem"})
    with pytest.raises(StartupError, match="FULCRUM_KAFKA_CA"):
        brokers_of(settings)
    assert client_options("a:1") == {"bootstrap_servers": "a:1"}
