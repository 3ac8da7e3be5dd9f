"""A cluster over whose snapshots alerts are evaluated."""

from collections import deque

from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Load
from libs.contracts.topics import QUEUES, STEPS
from libs.telemetry.columns import prefill_shares
from libs.testing.wait import at_once
from libs.testing.workers.telemetry import at, step, step_batch
from services.metrics.alerts.evaluator import AlertEvaluator
from services.metrics.requests import RequestMetrics
from services.metrics.settings import MetricsSettings
from services.metrics.state import MetricsState

SETTINGS = MetricsSettings(alert_for_ms=1_000, alert_clear_ms=2_000, alert_queue_tokens=1_000)


class Cluster:
    """The service's state and watch over workers that send a batch every 100 ms, all in virtual time."""

    def __init__(self, settings=SETTINGS):
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()))
        self.desk = AlertEvaluator(self.state, settings.alert_limits(), lag_ns=0)
        self.now_ms = 0
        self.sequences = {}
        self.under_way = deque()
        """(arrival, record) of what the reader has not read yet."""
        self.published = []
        self.desk.observers.append(self.published.extend)

    def run(self, seconds, *workers, gateways=(), behind_ms=0):
        """Enter a window and return what changed. Each worker is (id, role, busy share, load) and further arguments
        of `step_batch`. The reader sees telemetry with the given delay."""
        before = len(self.published)
        for _ in range(round(seconds * 10)):
            start_ms, self.now_ms = self.now_ms, self.now_ms + 100
            for worker_id, role, busy, load, *more in workers:
                number = self.sequences[worker_id] = self.sequences.get(worker_id, -1) + 1
                kind = {"prefill": 8} if role == "prefill" else {"decode": 1}
                steps = [step(start_ms, start_ms + 100 * busy, **kind)] if busy else []
                batch = step_batch(
                    number, (start_ms, self.now_ms), steps, worker=worker_id, role=role, load=Load(**load)
                )
                for key, value in (more[0] if more else {}).items():
                    if key == "kv_waits":
                        batch.kv_waits.extend(value(start_ms))
                    else:
                        setattr(batch, key, value)
                self.under_way.append((self.now_ms + behind_ms, Record(STEPS, worker_id, batch, 0, 0)))
            if not behind_ms:  # it has caught up
                self.under_way = deque((self.now_ms, record) for _, record in self.under_way)
            while self.under_way and self.under_way[0][0] <= self.now_ms:
                self.state.take(self.under_way.popleft()[1], at(self.now_ms))
            for message in gateways:
                message.told_unix_ns = at(self.now_ms)
                self.state.take(Record(QUEUES, message.gateway_id, message, 0, 0), at(self.now_ms))
            self.state.history.advance(at(self.now_ms))
            at_once(self.desk.look(at(self.now_ms)))
        return [(alert.name, alert.state, alert.labels) for alert in self.published[before:]]

    @property
    def reasons(self):
        return {alert.name: alert.reason for alert in self.desk.book.firing()}


def prefill(busy, waiting=0, tokens=0, worker="prefill-0"):
    return (worker, "prefill", busy, {"running": int(busy > 0), "waiting": waiting, "waiting_prefill_tokens": tokens})


def decode(busy, worker="decode-0", **load):
    return (worker, "decode", busy, load)
