"""The CPU time that an observed server costs a second, by part of the service, in virtual time.

`bench_observe` needs cores of its own for a thousand servers. This bench measures CPU time alone: it plays the same
recording (FULCRUM_DATA) to the parts of the metrics service, without sockets or fits of step costs. Prints a table,
then one JSON line.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from libs.bus.port import BusStats, Record
from libs.contracts.topics import Topic
from libs.observe.fleet import ObservedTarget
from libs.policy.verdict.state import VerdictLimits
from libs.telemetry.columns import prefill_shares
from load.metrics.bench_observe import LEAST_LEFT_S, SCRAPES_A_SECOND, recorded
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.observed.run import MANY_EVERY_MS, FitBudget, ObservedFleet
from services.metrics.observed.traffic import ObservedTraffic
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.status.evaluator import VerdictEvaluator
from services.metrics.status.report import measured_status

BEGAN_NS: Final = 1_800_000_000 * 10**9
TICK_NS: Final = 100_000_000
LAG_NS: Final = 1_200_000_000
UNREAD_TICKS, STATUS_TICKS = 4, 5
"""Ticks between two rounds while nobody reads, and between two statuses that are kept."""


class _Bus:
    """Hands records to the parts at once, at a time that the bench sets."""

    def __init__(self) -> None:
        self.takers: list[object] = []
        self.at_ns = BEGAN_NS

    def now_ns(self) -> int:
        return self.at_ns

    def publish(self, topic: Topic, value: Message) -> None:
        for take in self.takers:
            take(Record(topic, "", value, 0, 0), self.at_ns)  # type: ignore[operator]

    def stats(self) -> BusStats:
        return BusStats(0, 0, 0)


class _Fits(FitBudget):
    wanted = True

    def may_fit(self, first: bool) -> bool:
        return self.wanted


async def run(servers: int, seconds: int, learn_s: int) -> dict[str, float]:
    """Return milliseconds of CPU time for each server and second after `learn_s`, by part."""
    bodies, chance, bus = [each.partition(b"\r\n\r\n")[2] for each in recorded()], random.Random(1), _Bus()
    names = [f"server-{number:04}" for number in range(servers)]
    starts = [chance.randrange(len(bodies) - LEAST_LEFT_S * SCRAPES_A_SECOND) for _ in names]
    traffic = ObservedTraffic(ttft_limit_ns=5 * 10**9, tpot_ns=10**8)
    targets = [ObservedTarget(f"http://{name}:1", name) for name in names]
    fits = _Fits()
    fleet = ObservedFleet(targets, bus, bus, traffic, every_ms=MANY_EVERY_MS, budget=fits)  # type: ignore[arg-type]
    state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()), observes=True)
    verdicts = VerdictEvaluator(
        state, VerdictLimits(), ttft_limit_ns=5 * 10**9, tpot_ns=10**8, lag_ns=LAG_NS, observed=fleet
    )
    alerts = AlertEvaluator(state, MetricsSettings().alert_limits(), lag_ns=LAG_NS)
    bus.takers = [state.take, verdicts.take]
    spent: Counter[str] = Counter()

    @contextmanager
    def part(name: str) -> Iterator[None]:
        began_ns = time.process_time_ns()
        yield
        spent[name] += time.process_time_ns() - began_ns

    for second in range(learn_s + seconds):
        if second == learn_s:
            spent.clear()
            fits.wanted = False
        for tick in range(10):
            bus.at_ns += TICK_NS
            with part("scrapes, without sockets"):
                for number in range(tick, servers, 10):
                    body = bodies[(starts[number] + SCRAPES_A_SECOND * second) % len(bodies)]
                    fleet.take(fleet.server(names[number]), body)
            if tick % UNREAD_TICKS == 0:
                with part("windows"):
                    state.history.advance(bus.at_ns - LAG_NS)
                with part("alerts"):
                    await alerts.look(bus.at_ns)
                with part("verdict"):
                    await verdicts.look(bus.at_ns)
            if tick % STATUS_TICKS == 0:
                with part("status"):
                    measured_status(state, verdicts, alerts.book, bus.at_ns)
    return {name: each / 1e6 / seconds / servers for name, each in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--learn-s", type=int, default=8, help="seconds before the measurement, with fits")
    asked = parser.parse_args()
    found = asyncio.run(run(asked.servers, asked.seconds, asked.learn_s))
    for name, each in found.items():
        print(f"{name:26} {each:6.3f} ms a server and second")
    total = sum(found.values())
    print(f"{'all':26} {total:6.3f}")
    print(json.dumps({"servers": asked.servers, "ms_a_server_second": total, "parts": found}))


if __name__ == "__main__":
    main()
