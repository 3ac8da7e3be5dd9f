"""CPU time and memory that a fleet's telemetry costs the metrics service, by part, in virtual time.

A synthetic fleet's batches are decoded, entered, written and encoded for readers by the service's own code, one after
the other in this process, without broker, socket or reader. Figures are CPU time of this process alone, so other work
on the machine changes them little. Prints a table, then one JSON line.
"""

import argparse
import asyncio
import gc
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.topics import STEPS
from libs.policy.alerts.store import Alert
from libs.runtime.service import collect_seldom
from libs.telemetry.columns import prefill_shares
from load.metrics.synthetic_fleet import ARRIVAL_NS, PERIOD_NS, synthetic_fleet
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.stream import ROUND_NS, TICK_NS, Hub, TickWriter, tick

MS_NS: Final = 1_000_000
WARM_UP_S: Final = 3
PARTS: Final = {
    "parse": "batches, from bytes",
    "take": "batches, noted as they come",
    "whole": "rounds that end a window",
    "part": "rounds between",
    "look": "looks for alerts",
}


class Replay:
    """A fleet's telemetry through the parts of the service, round by round."""

    def __init__(self, gpus: int) -> None:
        settings = MetricsSettings()
        self._lag_ns = settings.live_lag_ms * MS_NS
        self._state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self._hub = Hub()
        self._desk = AlertEvaluator(self._state, settings.alert_limits(), lag_ns=self._lag_ns)
        self._writer = TickWriter(window_ns=TICK_NS, settled_ns=settings.lag_ms * MS_NS)
        self._alerts: list[Alert] = []
        self._seen_number = -1
        self._batches = self._arrivals(gpus)
        self._next = next(self._batches)
        self.took_ms: dict[str, list[float]] = {part: [] for part in PARTS}

    @staticmethod
    def _arrivals(gpus: int) -> Iterator[tuple[int, bytes]]:
        fleet, start_ns = synthetic_fleet(gpus), time.time_ns() // PERIOD_NS * PERIOD_NS
        while True:
            for worker in fleet:
                sent_ns = start_ns + worker.phase_ns
                yield sent_ns + ARRIVAL_NS, worker.batch(sent_ns)
            start_ns += PERIOD_NS

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_ns = time.thread_time_ns()
        yield
        self.took_ms[part].append((time.thread_time_ns() - began_ns) / 1e6)

    async def run(self, seconds: float) -> None:
        """Replay `seconds` of the fleet's time."""
        end_ns = self._next[0] - self._next[0] % ROUND_NS
        for _ in range(int(seconds * 1e9 / ROUND_NS)):
            end_ns += ROUND_NS
            await self._round(end_ns)

    async def _round(self, now_ns: int) -> None:
        came = []
        while self._next[0] < now_ns:
            came.append(self._next)
            self._next = next(self._batches)
        with self._timed("parse"):
            records = [(at_ns, Record(STEPS, "", STEPS.value.FromString(value), 0, 0)) for at_ns, value in came]
        with self._timed("take"):
            for at_ns, record in records:
                self._state.take(record, at_ns)
        del records
        number = (now_ns - self._lag_ns) // TICK_NS
        whole, self._seen_number = number != self._seen_number, number
        with self._timed("whole" if whole else "part"):
            tick(self._state, self._hub, self._writer, self._alerts, now_ns, lag_ns=self._lag_ns, whole=whole)
        with self._timed("look"):
            self._alerts = await self._desk.look(now_ns)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the fleet's time, after warm-up")
    options = parser.parse_args()
    collect_seldom()  # as services do
    replay = Replay(options.gpus)
    await replay.run(WARM_UP_S)
    for took in replay.took_ms.values():
        took.clear()
    await replay.run(options.seconds)
    found = {}
    print(f"{'':<30}{'ms in 100':>10}{'p50':>8}{'p99':>8}{'longest':>9}")
    for part, words in PARTS.items():
        took = replay.took_ms[part]
        p50, p99 = np.percentile(took, [50, 99]).tolist()
        per_100_ms = sum(took) / options.seconds / 10
        found[part] = {"ms_per_100_ms": per_100_ms, "p50_ms": p50, "p99_ms": p99, "max_ms": max(took)}
        print(f"{words:<30}{per_100_ms:>10.1f}{p50:>8.1f}{p99:>8.1f}{max(took):>9.1f}")
    total = sum(each["ms_per_100_ms"] for each in found.values())
    print(f"{'together':<30}{total:>10.1f}")
    print(json.dumps({"gpus": options.gpus, "seconds": options.seconds, "parts": found, "ms_per_100_ms": total}))


if __name__ == "__main__":
    asyncio.run(main())
