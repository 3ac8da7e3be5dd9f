"""Measure the CPU time and memory of telemetry in a metrics service, in virtual time, and extrapolate to 10,000 GPUs.

The service's own code decodes, enters, writes and encodes a synthetic fleet's batches. They are processed one after the
other in this process, without broker, socket or reader. The figures are CPU time of this thread, so other work of the
machine changes them little. With `--heard` it also reads another instance's windows, as each of several instances does.

An instance that reads `own` workers beside `received` ones of others needs `own x a + received x b` cores and `m x (own
+ received)` memory. The constants a, b and m are measured here. The bench prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import SharedWindows
from libs.contracts.topics import STEPS, WINDOWS
from libs.policy.alerts.store import Alert
from libs.policy.reading import Shares
from libs.runtime.service import collect_seldom
from libs.telemetry.columns import prefill_shares
from load.metrics.synthetic_fleet import ARRIVAL_NS, PERIOD_NS, SyntheticWorker, synthetic_fleet
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.sharing import Sharing
from services.metrics.state import MetricsState
from services.metrics.stream import ROUND_NS, TICK_NS, Hub, TickWriter, tick

MS_NS: Final = 1_000_000
WARM_UP_S: Final = 3
WHOLE_GPUS: Final = 10_000
MOST_CORES_PER_1000: Final = 0.2
PARTS: Final = {
    "parse": "batches, from bytes",
    "take": "batches, noted as they come",
    "whole": "rounds that end a window",
    "part": "rounds between",
    "look": "looks for alerts",
    "heard": "windows of another instance",
}


class Replay:
    """The telemetry of a fleet through one metrics service, in rounds of virtual time."""

    def __init__(self, fleet: list[SyntheticWorker], name: str = "", start_ns: int = 0) -> None:
        """Start the service at `start_ns`. An instance with a name shares the fleet with others."""
        settings = MetricsSettings()
        self.sent: list[bytes] = []
        """The records for other instances since they were last taken."""
        self._lag_ns = settings.live_lag_ms * MS_NS
        sharing = Sharing(Shares(name), self._send, began_ns=start_ns) if name else None
        self._state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()), sharing)
        self._hub = Hub()
        self._desk = AlertEvaluator(self._state, settings.alert_limits(), lag_ns=self._lag_ns)
        self._writer = TickWriter(window_ns=TICK_NS, settled_ns=settings.lag_ms * MS_NS)
        self._alerts: list[Alert] = []
        self._seen_number = -1
        self._batches = _arrivals(fleet, start_ns)
        self._next = next(self._batches)
        self.took_ms: dict[str, list[float]] = {part: [] for part in PARTS}

    def _send(self, message: SharedWindows) -> None:
        self.sent.append(message.SerializeToString())

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_ns = time.thread_time_ns()
        yield
        self.took_ms[part].append((time.thread_time_ns() - began_ns) / 1e6)

    async def round(self, now_ns: int, shared: list[bytes]) -> None:
        """Process the batches that arrived by `now_ns`, and the records of other instances, as the service does."""
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
        with self._timed("heard"):
            for value in shared:
                self._state.take(Record(WINDOWS, "", WINDOWS.value.FromString(value), 0, 0), now_ns)
        number = (now_ns - self._lag_ns) // TICK_NS
        whole, self._seen_number = number != self._seen_number, number
        with self._timed("whole" if whole else "part"):
            tick(self._state, self._hub, self._writer, self._alerts, now_ns, lag_ns=self._lag_ns, whole=whole)
        with self._timed("look"):
            self._alerts = await self._desk.look(now_ns)


def _arrivals(fleet: list[SyntheticWorker], start_ns: int) -> Iterator[tuple[int, bytes]]:
    while True:
        for worker in fleet:
            sent_ns = start_ns + worker.phase_ns
            yield sent_ns + ARRIVAL_NS, worker.batch(sent_ns)
        start_ns += PERIOD_NS


async def replay(own: int, received: int, seconds: float, repeats: int) -> dict[str, float]:
    """Return the CPU ms of each part in 100 ms of the fleet's time, of the fastest of `repeats` runs."""
    start_ns = time.time_ns() // PERIOD_NS * PERIOD_NS
    whole = synthetic_fleet(own + received)
    # Workers are in the order of their phase, so each instance gets an even part of them.
    others = set(np.linspace(0, own + received - 1, received, dtype=int).tolist())
    mine = [worker for place, worker in enumerate(whole) if place not in others]
    service = Replay(mine, "one" if received else "", start_ns)
    other = Replay([whole[place] for place in sorted(others)], "other", start_ns) if received else None
    end_ns, found = start_ns + ARRIVAL_NS, []
    for repeat in range(repeats + 1):
        for took in service.took_ms.values():
            took.clear()
        for _ in range(int((seconds if repeat else WARM_UP_S) * 1e9 / ROUND_NS)):
            end_ns += ROUND_NS
            if other is not None:
                await other.round(end_ns, service.sent)
                service.sent = []
            await service.round(end_ns, other.sent if other else [])
            if other is not None:
                other.sent = []
        if repeat:
            found.append({part: sum(took) / seconds / 10 for part, took in service.took_ms.items()})
    return min(found, key=lambda each: sum(each.values()))


def law(alone: dict[str, float], beside: dict[str, float], own: int, received: int) -> tuple[float, float]:
    """Return the cores for 1,000 own workers and for 1,000 of another instance, from CPU ms per 100 ms."""
    per_own = sum(alone.values()) / 100 * 1000 / own
    return per_own, (sum(beside.values()) - sum(alone.values())) / 100 * 1000 / received if received else 0.0


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--gpus", type=int, default=1000)
    parser.add_argument("--heard", type=int, default=1000, help="workers that another instance reads; 0: none")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the fleet's time, a repeat")
    parser.add_argument("--repeats", type=int, default=5, help="of which the least counts")
    options = parser.parse_args()
    collect_seldom()  # as services do
    began_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    alone = await replay(options.gpus, 0, options.seconds, options.repeats)
    mb_per_1000 = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - began_mb) * 1000 / options.gpus
    beside = await replay(options.gpus, options.heard, options.seconds, options.repeats) if options.heard else alone
    per_own, per_peer = law(alone, beside, options.gpus, options.heard)
    print(f"CPU ms in 100 ms, {options.gpus} workers{'':<6}{'alone':>10}{f'+ {options.heard} heard':>16}")
    for part, words in PARTS.items():
        print(f"{words:<34}{alone[part]:>10.1f}{beside[part]:>16.1f}")
    print(f"{'together':<34}{sum(alone.values()):>10.1f}{sum(beside.values()):>16.1f}")
    print(
        f"cores for 1,000 workers: {per_own:.2f} (aim {MOST_CORES_PER_1000}), {per_peer:.2f} where another instance "
        f"reads them; {mb_per_1000:.0f} MB for 1,000"
    )
    spread = {str(by): WHOLE_GPUS / 1000 * (per_own / by + per_peer * (1 - 1 / by)) for by in (1, 4, 10)}
    print(
        f"{WHOLE_GPUS} GPUs, extrapolated: "
        + ", ".join(f"{cores:.1f} cores each of {by}" for by, cores in spread.items())
    )
    found = {
        "gpus": options.gpus, "heard": options.heard, "alone_ms": alone, "beside_ms": beside,
        "cores_per_1000": per_own, "cores_per_1000_heard": per_peer, "mb_per_1000": mb_per_1000,
        "extrapolated_cores_each": spread,
    }  # fmt: skip
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
