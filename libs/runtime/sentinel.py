"""A Redis that fails over: the URL of its sentinels, and connections that follow its primary."""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
EXAMPLE: Final = "redis+sentinel://HOST:26379,HOST:26379,HOST:26379/NAME/0"
SENTINEL_PORT: Final = 26379
SENTINEL_TIMEOUT_MS: Final = 200
"""The timeout of one sentinel, well below that of the leader lease."""
CHECK_EVERY_S: Final = 2.0
"""The interval at which open connections are checked against the sentinels. A primary that is cut off from them may
still answer its clients.
"""
_OPTIONS: Final = ("username", "password")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ADDRESS: Final = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """The parts of a URL that names sentinels."""

    sentinels: Sequence[tuple[str, int]]
    name: str
    """The name under which the sentinels know the primary."""
    options: Mapping[str, Any]
    """Arguments of connections to Redis."""
    sentinel_options: Mapping[str, Any]
    """Arguments of connections to sentinels."""


def is_sentinel_url(url: str) -> bool:
    return url.partition("://")[0] in SCHEMES


def read_sentinel_url(url: str) -> SentinelAddress:
    """Parse redis+sentinel://[USER:PASSWORD@]HOST[:PORT],.../NAME[/DB][?OPTION=VALUE&...].

    User and password are those of Redis. The sentinels' own are the options sentinel_username and sentinel_password.
    Raise ValueError if the URL is invalid. Its text holds no secret.
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    place, _, path = rest.rpartition("@")[2].partition("/")
    user = rest.rpartition("@")[0]
    name, _, db = path.strip("/").partition("/")
    if not _NAME.fullmatch(name):
        raise ValueError(f"add the name of the primary after the sentinels, as in {EXAMPLE}")
    if db and not db.isdigit():
        raise ValueError(f"{db!r} is not the number of a database, like the 0 in {EXAMPLE}")
    given = dict(parse_url(f"redis://{user}@localhost/{db or 0}?{query}"))
    given.pop("host")
    own = {key: given.pop(f"sentinel_{key}") for key in _OPTIONS if f"sentinel_{key}" in given}
    shared = {key: value for key, value in given.items() if key.startswith("ssl_")}
    if scheme == "rediss+sentinel":
        shared["ssl"] = True
    return SentinelAddress([_address(each) for each in place.split(",")], name, given | shared, own | shared)


def _address(text: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(text)
    if not found or not 1 <= int(found[2] or SENTINEL_PORT) <= 65_535:
        raise ValueError(f"{text!r} is not the HOST:PORT of a sentinel, as in {EXAMPLE}")
    return found[1].strip("[]"), int(found[2] or SENTINEL_PORT)


def sentinel_pool(address: SentinelAddress, *, timeout_ms: float, **own: Any) -> SentinelConnectionPool:
    """Return a pool that asks the sentinels for the primary at each connect."""
    timeout_s = min(timeout_ms, SENTINEL_TIMEOUT_MS) / 1000
    bounds = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    # No retries here: redis-py's default is ten, with sleeps in between.
    asking = {**address.sentinel_options, **bounds, "retry": Retry(NoBackoff(), 0)}
    sentinels = _Sentinels(address.sentinels, sentinel_kwargs=asking)
    return _PrimaryPool(address.name, sentinels, is_master=True, **address.options, **own)


class SentinelAnswer(NamedTuple):
    """A sentinel's view of the primary."""

    epoch: int
    """The number of the fail-over that made this server the primary."""
    usable: bool
    """False if the sentinel considers the primary down."""
    host: str
    port: int


def primary_of(answers: Sequence[SentinelAnswer]) -> tuple[str, int] | None:
    """Return the address of the latest primary; None if every sentinel that knows it considers it down."""
    latest = max(answers, default=None)
    return (latest.host, latest.port) if latest is not None and latest.usable else None


class _Sentinels(Sentinel):
    """Sentinels that are queried concurrently, so that an unresponsive one delays nothing.

    The primary is decided by a majority, or by all that answer within their timeout. A sentinel that is cut off
    together with the old primary is thereby outvoted.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._asking: set[asyncio.Task[SentinelAnswer | None]] = set()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        asking = [asyncio.create_task(self._ask(each, service_name), name="ask sentinel") for each in self.sentinels]
        self._asking.update(asking)
        answers: list[SentinelAnswer] = []
        for each in asyncio.as_completed(asking):
            if (answer := await each) is not None:
                answers.append(answer)
            if len(answers) > len(asking) // 2 and primary_of(answers):
                break  # the other queries end by themselves, and keep their connections
        found = primary_of(answers)
        if found is None:
            count = f"{len(answers)} of {len(asking)} sentinels"
            raise MasterNotFoundError(f"{count} know {service_name!r}, and none reports a primary that is up")
        return found

    async def _ask(self, sentinel: Any, service_name: str) -> SentinelAnswer | None:
        try:
            state = (await sentinel.sentinel_masters()).get(service_name)
            if not state:
                return None
            usable = self.check_master_state(state, service_name)
            return SentinelAnswer(state["config-epoch"], usable, state["ip"], state["port"])
        except (RedisError, OSError, TimeoutError):
            return None
        finally:
            self._asking.discard(asyncio.current_task())

    async def aclose(self) -> None:
        await _end(self._asking)
        await super().aclose()


class _PrimaryPool(SentinelConnectionPool):
    """Connections to the primary. One to a former primary is replaced, even if that still answers."""

    def __init__(self, service_name: str, sentinel_manager: Sentinel, **options: Any) -> None:
        super().__init__(service_name, sentinel_manager, **options)  # type: ignore[no-untyped-call]
        self._found_s = 0.0
        self._finding: asyncio.Task[tuple[str, int]] | None = None

    async def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        del command_name, keys, options  # deprecated in redis-py, and unused
        if asyncio.get_running_loop().time() >= self._found_s + CHECK_EVERY_S:
            self._find()
        return await super().get_connection()  # type: ignore[no-untyped-call]

    async def get_master_address(self) -> tuple[str, int]:
        """Return the primary's address. A cancelled caller leaves the query running for the next one."""
        return await asyncio.shield(self._find())

    def _find(self) -> "asyncio.Task[tuple[str, int]]":
        if self._finding is None or self._finding.done():
            self._found_s = asyncio.get_running_loop().time()
            self._finding = asyncio.create_task(self._found(), name="find the primary")
            self._finding.add_done_callback(_seen)
        return self._finding

    async def _found(self) -> tuple[str, int]:
        known = self.master_address
        address: tuple[str, int] = await super().get_master_address()  # type: ignore[no-untyped-call]
        if known is not None and address != known:
            in_use: list[Any] = list(self._in_use_connections)
            for connection in in_use:
                if (connection.host, connection.port) == known:
                    connection.mark_for_reconnect()  # when its caller returns it
        return address

    async def aclose(self) -> None:
        await _end([self._finding] if self._finding else [])
        await super().aclose()
        await self.sentinel_manager.aclose()


def _seen(task: "asyncio.Task[Any]") -> None:
    """Retrieve the error of a task that nobody awaits. The next connect raises it too."""
    if not task.cancelled():
        task.exception()


async def _end(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
