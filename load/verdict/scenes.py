"""Scenes for an operator: loads and faults on a virtual suite, each with the verdicts that are correct."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from libs.policy.verdict.causes import CauseCode
from load.chaos.suite import VirtualSuite
from load.verdict.situations import WORKERS, Device, Load, Planted, arrivals

CALM: Final = frozenset({CauseCode.IDLE, CauseCode.BALANCED})
CALLERS: Final = 300
CALL_TOKENS: Final = (1_200, 4)
FROZEN_S: Final = 13.0
AWAY_S: Final = 10.0
REFUSED_PER_S: Final = 10.0
STEADY_S: Final = 600.0
ALERT_S: Final = 75.0
"""The length of a scene whose alerts are timed. Their conditions must be true for half a minute before they fire."""


@dataclass(slots=True)
class Stage:
    """A suite on which a scene is played. `cause_s` is the time at which clients can first see its cause."""

    suite: VirtualSuite
    device: Device
    planted: Planted
    seed: int
    cause_s: float | None = None
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def caused(self) -> None:
        self.cause_s = self.suite.now_s if self.cause_s is None else self.cause_s

    @property
    def load(self) -> Load:
        return self.planted.load

    def play(self, load: Load, seconds: float) -> None:
        self.suite.play(list(arrivals(load, self.seed, seconds)))

    def keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run clients of a scene in a task that ends with the scene."""
        self._tasks.append(self.suite.cluster.loop.spawn(self.suite.client, work()))

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.suite.stop()

    @property
    def light(self) -> Load:
        """A third of the scene's load."""
        return Load(self.load.isl, self.load.osl, self.load.rate / 3)


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    load: str
    """The situation of `Situations` from which roles and load are drawn."""
    play: Callable[[Stage], Awaitable[None]]
    wanted: frozenset[str] = CALM
    """The expected verdicts, of which one must come within three seconds of the cause."""
    allowed: frozenset[str] = CALM
    """Further verdicts that are allowed during the scene. Calm ones are always allowed before and after it."""
    alerts: frozenset[str] = frozenset()
    """The alerts that must fire. In a scene without a cause, all others are false."""

    @property
    def is_calm(self) -> bool:
        return self.wanted <= CALM


async def _idle(stage: Stage) -> None:
    stage.caused()
    await asyncio.sleep(60)


async def _light(stage: Stage) -> None:
    stage.play(stage.light, 60)
    stage.caused()
    await asyncio.sleep(60)


async def _steady(stage: Stage) -> None:
    stage.play(stage.load, STEADY_S)
    stage.caused()
    await asyncio.sleep(STEADY_S)


async def _ramp(stage: Stage) -> None:
    """Raise the load in ten steps from a tenth of the drawn load to all of it."""
    stage.caused()
    for tenth in range(1, 11):
        load = Load(stage.load.isl, stage.load.osl, stage.load.rate * tenth / 10)
        stage.suite.play(list(arrivals(load, stage.seed + tenth, 15)))
        await asyncio.sleep(15)


async def _flood(stage: Stage) -> None:
    stage.play(stage.load, ALERT_S)
    await asyncio.sleep(ALERT_S)


async def _callers(stage: Stage) -> None:
    """Run callers that send their next request as soon as they have an answer."""

    async def call() -> None:
        while True:
            await stage.suite.ask(*CALL_TOKENS)

    for _ in range(CALLERS):
        stage.keep(call)
    await asyncio.sleep(ALERT_S)


async def _refused(stage: Stage) -> None:
    """Send only requests for a model that does not exist."""

    async def ask() -> None:
        while True:
            stage.keep(one)
            await asyncio.sleep(1 / REFUSED_PER_S)

    async def one() -> None:
        await stage.suite.ask(20, 4, model="none")

    stage.caused()
    stage.keep(ask)
    await asyncio.sleep(ALERT_S)


async def _frozen(stage: Stage) -> None:
    await _away(stage, lambda: stage.suite.cluster.freeze(_last()), lambda: stage.suite.cluster.thaw(_last()), FROZEN_S)


async def _killed(stage: Stage) -> None:
    cluster = stage.suite.cluster
    await _away(stage, lambda: cluster.kill(_last()), lambda: cluster.start_worker(_last(), "decode"), AWAY_S)


async def _broker_away(stage: Stage) -> None:
    broker = stage.suite.cluster.stores.broker
    await _away(stage, broker.cut_off, broker.start, AWAY_S)


async def _redis_away(stage: Stage) -> None:
    redis = stage.suite.cluster.stores.redis
    await _away(stage, redis.cut_off, redis.start, AWAY_S)


async def _away(stage: Stage, go: Callable[[], object], come: Callable[[], object], seconds: float) -> None:
    stage.play(stage.light, 30 + seconds)
    await asyncio.sleep(10)
    go()
    stage.caused()
    await asyncio.sleep(seconds)
    come()
    await asyncio.sleep(20)


async def _batch(stage: Stage) -> None:
    stage.play(stage.light, 60)
    stage.caused()
    await asyncio.sleep(60)


def _last() -> str:
    return f"w{WORKERS - 1}"


_SHORT: Final = frozenset({CauseCode.PREFILL_BOUND, CauseCode.DECODE_BOUND_TPOT, CauseCode.DECODE_BOUND_KV})
SCENES: Final = (
    Scene("idle", "busy", _idle),
    Scene("light", "busy", _light),
    Scene("steady", "busy", _steady),
    Scene("ramp", "busy", _ramp),
    Scene("batch beside people", "busy", _batch),
    # Without a role change, this backlog would outgrow any split of roles.
    Scene(
        "prefill flood", "prefill_bound", _flood, frozenset({CauseCode.PREFILL_BOUND}),
        frozenset({CauseCode.TOO_SMALL}),
        alerts=frozenset({"FulcrumImbalance"}),
    ),
    Scene(
        "decode flood", "decode_bound_tpot", _flood, frozenset({CauseCode.DECODE_BOUND_TPOT}),
        frozenset({CauseCode.TOO_SMALL}),
        alerts=frozenset({"FulcrumImbalance"}),
    ),
    Scene(
        "overload", "too_small", _flood, frozenset({CauseCode.TOO_SMALL}), _SHORT,
        frozenset({"FulcrumTooSmall"}),
    ),
    Scene("300 callers", "busy", _callers, frozenset({CauseCode.PREFILL_BOUND, CauseCode.TOO_SMALL})),
    Scene(
        "refused", "busy", _refused, frozenset({CauseCode.REFUSED}), alerts=frozenset({"FulcrumRequestsRefused"})
    ),
    Scene("worker frozen", "busy", _frozen, frozenset({CauseCode.SILENT_WORKER})),
    Scene("worker killed", "busy", _killed, frozenset({CauseCode.SILENT_WORKER, *CALM})),
    Scene("broker away", "busy", _broker_away, frozenset({CauseCode.UNKNOWN})),
    Scene("Redis away", "busy", _redis_away, frozenset({CauseCode.UNKNOWN, *CALM})),
)  # fmt: skip
