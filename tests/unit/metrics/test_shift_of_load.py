"""Test in virtual time of a load that shifts from prefill-heavy to decode-heavy, and of the delay of ratio and alert.

Workers cut a batch every 100 ms, each at a phase of its own, which comes 30 ms later; the service ticks as it does.
"""

import json
from itertools import count

import pytest
from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.topics import STEPS
from libs.telemetry.columns import prefill_shares
from libs.testing.wait import at_once
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState
from services.metrics.stream import TICK_NS, Hub, TickWriter, tick

AT_ONCE = MetricsSettings(alert_for_ms=0, alert_clear_ms=300, alert_window_ms=500)
SHIFT_MS = 20_000
ARRIVAL_MS = 30
WORKERS = {"prefill-0": 0, "prefill-1": 35, "decode-0": 60, "decode-1": 95}
"""The phase at which each cuts its batches, in ms."""
STARVED = {"prefill": Load(running=1, waiting=4, waiting_prefill_tokens=9_000), "decode": Load(running=8, waiting=40)}


def batch(worker: str, number: int) -> StepBatch:
    """The 100 ms that end at the worker's phase of 100 ms `number`; steps are cut where the load shifts."""
    role, end_ms = worker.split("-", maxsplit=1)[0], 100 * number + WORKERS[worker]
    heavy = "prefill" if end_ms <= SHIFT_MS else "decode"
    busy_ms = 98 if role == heavy else 10
    work = step(end_ms - 100, end_ms - 100 + busy_ms, **{role: 8})
    load = STARVED[role] if role == heavy else Load()
    return step_batch(number, (end_ms - 100, end_ms), [work], worker=worker, role=role, load=load)


class Watched(Hub):
    """A hub that records what a reader would receive."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}
        self.followed_ms: int | None = None
        """The time at which the stream first showed a window after the shift with decode as the largest phase."""
        self.alerted_ms: int | None = None
        """The time at which it first showed that decode is starved."""

    def publish(self, tick: bytes, members: bytes | None = None) -> None:
        reported = json.loads(tick.split(b"data: ")[1])
        now_ms = reported["now_unix_ms"] - ORIGIN_NS // MS - SHIFT_MS
        for start_ms, places, _, prefill, decode, *_ in reported["windows"]:
            for index, used in enumerate(zip(prefill, decode, strict=True)):
                self.cells[start_ms, places[index] if places else index] = used
            window = [used for (start, _), used in self.cells.items() if start == start_ms]
            decode_most = sum(used[1] for used in window) > sum(used[0] for used in window)
            if decode_most and start_ms >= at(SHIFT_MS) // MS:
                self.followed_ms = self.followed_ms or now_ms
        if any(
            each["name"] == "FulcrumImbalance" and each["labels"]["phase"] == "decode" for each in reported["alerts"]
        ):
            self.alerted_ms = self.alerted_ms or now_ms


@pytest.mark.parametrize(
    ("settings", "alert_ms"),
    [(AT_ONCE, (0, 1_000)), (MetricsSettings(), (10_000, 12_500))],
    ids=["at once", "by default"],
)
def test_ratio_and_alert_follow_a_shift_of_load(settings: MetricsSettings, alert_ms: tuple[int, int]) -> None:
    """The ratio follows within half a second. The alert follows within a second without a delay, and by default once
    the imbalance has lasted ten."""
    state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
    desk = AlertEvaluator(state, settings.alert_limits(), lag_ns=settings.live_lag_ms * MS)
    hub, writer = Watched(), TickWriter(window_ns=TICK_NS, settled_ns=settings.lag_ms * MS)
    for now_ms in count(200, 5):
        number, phase_ms = divmod(now_ms - ARRIVAL_MS, 100)
        for worker in [name for name, phase in WORKERS.items() if phase == phase_ms]:
            state.take(Record(STEPS, worker, batch(worker, number), 0, 0), at(now_ms))
        if now_ms % 100 == settings.live_lag_ms % 100:
            tick(state, hub, writer, at_once(desk.look(at(now_ms))), at(now_ms), lag_ns=settings.live_lag_ms * MS)
        if hub.alerted_ms is not None or now_ms > SHIFT_MS + 20_000:
            break
    assert hub.followed_ms is not None and 0 < hub.followed_ms <= 500
    assert hub.alerted_ms is not None and alert_ms[0] < hub.alerted_ms <= alert_ms[1]
