"""Pressure against the knee that a search finds: whole suites in virtual time, at rates around what they can carry.

The knee is the highest rate at which `IN_TIME` of the requests have their first token within the TTFT limit and their
others within the TPOT target; pressure says it where its 90th percentile over time crosses 1.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from load.chaos.suite import Asked, SuiteSpec, VirtualSuite, run_virtual
from load.verdict.drawn import DrawnSuite, draw_suite
from load.verdict.judge import Reported
from load.verdict.situations import WORKERS, Load, arrivals, presses
from load.verdict.virtual import POLL_S

IN_TIME: Final = 0.95
RUN_S: Final = 60.0
"""At a tenth over what prefill can do, prompts are late by the TTFT limit after two thirds of it."""
SETTLED_S: Final = 15.0
"""Requests from then on count, and pressures."""
DRAIN_S: Final = 12.0
SHARES: Final = (0.75, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5)
"""Of what the phase that is worse off can do by its step times, rates that are run."""
WORKLOADS: Final = (("long prompts, short answers", 3, 380, 16), ("short prompts, long answers", 5, 80, 200),
                    ("between them", 3, 240, 60))  # fmt: skip
"""(name, prefill workers of eight, ISL, OSL)"""


@dataclass(frozen=True, slots=True)
class AtRate:
    """One run."""

    rate: float
    in_time: float
    pressure_p90: float


@dataclass(frozen=True, slots=True)
class Knee:
    """What came of a workload."""

    name: str
    prefill: int
    runs: Sequence[AtRate]
    knee: float | None
    """Requests a second; None: no rate that was run is beyond it."""
    pressed: float | None
    """Where the 90th percentile of pressure crosses 1."""

    @property
    def off(self) -> float | None:
        """`pressed` over `knee`, less 1."""
        return None if self.knee is None or self.pressed is None else self.pressed / self.knee - 1


def find_knee(name: str, prefill: int, isl: int, osl: int, seed: int) -> Knee:
    """Run all rates of a workload on a device drawn by seed."""
    drawn = draw_suite(seed, little_kv=False)
    full = _full_rate(drawn, prefill, isl, osl)
    runs = [_at(drawn, prefill, Load(isl, osl, share * full), seed) for share in SHARES]
    return Knee(
        name, prefill, runs,
        _crossing([each.rate for each in runs], [-each.in_time for each in runs], -IN_TIME),
        _crossing([each.rate for each in runs], [each.pressure_p90 for each in runs], 1.0),
    )  # fmt: skip


def _full_rate(drawn: DrawnSuite, prefill: int, isl: int, osl: int) -> float:
    """The rate that presses the worse phase by 1, in truth: more sequences decode more slowly, so it is searched."""
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        if max(presses(drawn.device, Load(isl, osl, middle), prefill)[:3]) < 1:
            low = middle
        else:
            high = middle
    return low


def _at(drawn: DrawnSuite, prefill: int, load: Load, seed: int) -> AtRate:
    spec = SuiteSpec(
        roles=["prefill"] * prefill + ["decode"] * (WORKERS - prefill),
        worker=drawn.worker(), gateway=drawn.targets(), planner=drawn.planner(), metrics=drawn.targets(),
    )  # fmt: skip

    async def play(suite: VirtualSuite) -> AtRate:
        reported = Reported()

        async def poll() -> None:
            while True:
                reported.take(suite.status(), suite.now_s)
                await asyncio.sleep(POLL_S)

        polling = suite.cluster.loop.spawn(suite.client, poll())
        began_s = suite.now_s
        suite.play(list(arrivals(load, seed, RUN_S)))
        await asyncio.sleep(RUN_S)
        ended_s = suite.now_s
        await asyncio.sleep(DRAIN_S)
        polling.cancel()
        judged = [each for each in suite.asked if began_s + SETTLED_S <= each.sent_s <= ended_s]
        pressures = [max(each[1:4]) for each in reported.pressures if began_s + SETTLED_S <= each[0] <= ended_s]
        good = [_in_time(each, drawn) for each in judged]
        return AtRate(load.rate, sum(good) / len(good), float(np.percentile(pressures, 90)))

    return run_virtual(spec, seed, play)


def _in_time(asked: Asked, drawn: DrawnSuite) -> bool:
    first = asked.first_s and asked.first_s - asked.sent_s <= drawn.device.ttft_s
    if not first:
        return False
    took_s = asked.last_s - asked.first_s
    return bool(asked.tokens < 2 or took_s / (asked.tokens - 1) <= drawn.device.tpot_ns / 1e9)


def _crossing(rates: Sequence[float], figures: Sequence[float], at: float) -> float | None:
    """The rate at which figures that grow first pass `at`, between two of them by a line."""
    for number in range(1, len(rates)):
        low, high = figures[number - 1], figures[number]
        if low < at <= high:
            return rates[number - 1] + (rates[number] - rates[number - 1]) * (at - low) / (high - low)
    return None


def rows(found: Sequence[Knee]) -> list[dict[str, Any]]:
    """For printing."""
    return [
        {
            "workload": each.name, "split": f"{each.prefill}P+{WORKERS - each.prefill}D", "knee": each.knee,
            "pressed": each.pressed, "off": each.off,
            "runs": [(round(run.rate, 2), round(run.in_time, 3), round(run.pressure_p90, 2)) for run in each.runs],
        }
        for each in found
    ]  # fmt: skip
