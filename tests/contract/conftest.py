"""Fixtures that run each contract test over every implementation of a store's port."""

import pytest

from libs.testing.contract.brokers import Broker, KafkaUnderTest, MemoryUnderTest
from libs.testing.contract.databases import Database, MemoryDatabase, RedisDatabase


@pytest.fixture(params=["memory", "embedded", pytest.param("real", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Yield the broker that simulations use, the embedded one, and Apache Kafka."""
    if request.param == "memory":
        return MemoryUnderTest()
    return KafkaUnderTest(request.getfixturevalue(f"{request.param}_kafka_server"))


@pytest.fixture(params=["memory", "embedded", "real"])
def database(request: pytest.FixtureRequest) -> Database:
    """Yield the store that simulations use, the embedded Redis, and a real one."""
    if request.param == "memory":
        return MemoryDatabase()
    return RedisDatabase(request.getfixturevalue(f"{request.param}_redis_server"))
