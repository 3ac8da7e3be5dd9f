"""Stores for all tests: one server of each kind for a whole run, started on first use."""

import logging
import uuid
from collections.abc import Iterator

import pytest
import structlog

from libs.testing.servers.stores import (
    KafkaServer,
    KafkaUnavailable,
    RedisServer,
    RedisUnavailable,
    embedded_kafka,
    embedded_redis,
    real_kafka,
    real_redis,
)
from tests.programs import skip_or_fail_in_ci

pytest_plugins = ["tests.hung_tasks", "tests.tiers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-examples", type=int, default=0, help="examples that each test under tests/fuzz tries")
    parser.addoption("--device", default="cpu", help="of the torch engine in the engines' contract suite, e.g. cuda:0")


@pytest.fixture(scope="module")
def quiet_lab() -> Iterator[None]:
    """A module whose simulations would log a line for each of a million requests; its neighbours log as before."""
    before = structlog.get_config()
    # A logger that is cached now would stay silent in the modules after this one.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR), cache_logger_on_first_use=False
    )
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def embedded_kafka_server() -> Iterator[KafkaServer]:
    with embedded_kafka() as server:
        yield server


@pytest.fixture(scope="session")
def real_kafka_server() -> Iterator[KafkaServer]:
    try:
        context = real_kafka()
        server = context.__enter__()
    except KafkaUnavailable as error:
        skip_or_fail_in_ci(error)
    else:
        yield server
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def embedded_redis_server() -> Iterator[RedisServer]:
    with embedded_redis() as server:
        yield server


@pytest.fixture(scope="session")
def real_redis_server() -> Iterator[RedisServer]:
    try:
        context = real_redis()
        server = context.__enter__()
    except RedisUnavailable as error:
        skip_or_fail_in_ci(error)
    else:
        yield server
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's program."""
    from libs.testing.suites.browser import BrowserUnavailable, find_browser  # not where the engines' own tests run

    try:
        return find_browser()
    except BrowserUnavailable as error:
        skip_or_fail_in_ci(error)
        raise


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.kafka)])
def kafka(request: pytest.FixtureRequest) -> KafkaServer:
    """Yield each Kafka in turn."""
    server: KafkaServer = request.getfixturevalue(f"{request.param}_kafka_server")
    return server


@pytest.fixture(params=["embedded", pytest.param("real", marks=pytest.mark.redis)])
def redis(request: pytest.FixtureRequest) -> RedisServer:
    """Yield each Redis in turn."""
    server: RedisServer = request.getfixturevalue(f"{request.param}_redis_server")
    return server


@pytest.fixture
def cluster() -> str:
    """A cluster name of the test's own, so that tests share servers but nothing in them."""
    return f"test-{uuid.uuid4().hex[:12]}"
