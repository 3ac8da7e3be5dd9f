"""Metrics services in the test's own process that exchange what they read."""

from array import array
from typing import Any

from prometheus_client import CollectorRegistry

from libs.bus.port import Record
from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute, StepTime
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    SharedWindows,
    StepBatch,
)
from libs.contracts.topics import STEPS, WINDOWS
from libs.policy.reading import Shares
from libs.telemetry.columns import prefill_shares
from libs.telemetry.history import WrittenWindow
from libs.testing.workers.telemetry import MS, ORIGIN_NS, at, step, step_batch
from services.metrics.requests import RequestMetrics
from services.metrics.sharing import (
    Sharing,
)
from services.metrics.state import MetricsState

COMPUTE = Compute(
    layer_parameters=7 * 10**9, head_parameters=5 * 10**8, parameter_bytes=2, attention_width=131_072,
    kv_token_bytes=131_072, peak_flops_per_s=989e12, peak_bytes_per_s=3.35e12,
)  # fmt: skip
STEP_TIME = StepTime(
    prefill_floor_ns=5e6, prefill_fixed_ns=2e6, prefill_token_ns=2e4, decode_fixed_ns=8e6, decode_sequence_ns=1e5,
    decode_kv_token_ns=10, interference=0.9,
)  # fmt: skip


class Instance:
    """The state of a metrics service with this name and clock offset; its messages are in `published`."""

    def __init__(self, name: str, *, ahead_ns: int = 0) -> None:
        self.published: list[SharedWindows] = []
        self.unsent = 0
        self.received: list[WrittenWindow] = []
        """The windows received with the last tick."""
        self.ahead_ns = ahead_ns
        self.sharing = Sharing(
            Shares(name), self.published.append, began_ns=ORIGIN_NS + ahead_ns, unsent=lambda: self.unsent
        )
        self.state = MetricsState(prefill_shares, RequestMetrics(CollectorRegistry()), self.sharing)
        self.fleet, self.rollups = self.state.fleet, self.state.rollups

    def read(self, batch: StepBatch, now_ms: float) -> None:
        self.state.take(Record(STEPS, batch.worker_id, batch, 0, 0), at(now_ms) + self.ahead_ns)

    def live(self, worker: str, from_ms: int, to_ms: int, **more: Any) -> None:
        """Send batches of which half of each 100 ms is decode."""
        for start in range(from_ms, to_ms, 100):
            batch = step_batch(
                start // 100, (start, start + 100), [step(start, start + 50, decode=1)], worker=worker, **more
            )
            self.read(batch, start + 100)

    def tick(self, now_ms: float) -> list[SharedWindows]:
        """Return the messages of that time."""
        self.published.clear()
        now_ns = at(now_ms) + self.ahead_ns
        self.sharing.keep(self.state.history.advance(now_ns))
        self.sharing.send(self.fleet, self.rollups, now_ns)
        self.received = self.sharing.take_received(self.fleet, self.rollups, now_ns)
        return list(self.published)

    def hear(self, reported: list[SharedWindows], now_ms: float) -> None:
        for message in reported:
            copy = SharedWindows.FromString(message.SerializeToString())
            self.state.take(Record(WINDOWS, copy.metrics_id, copy, 0, 0), at(now_ms) + self.ahead_ns)

    def covered_ms(self, window_ns: int, from_ms: int, to_ms: int) -> int:
        series = self.rollups.read(window_ns, at(from_ms), at(to_ms))
        return int(series.times_ns[:, :, 0].sum()) // MS


def exchange(reader: Instance, hearer: Instance, from_ms: int, to_ms: int, worker: str = "w") -> None:
    """Let one instance read a worker's telemetry, and the other receive it tick by tick."""
    for start in range(from_ms, to_ms, 100):
        reader.live(worker, start, start + 100)
        hearer.hear(reader.tick(start + 100), start + 100)


def column(*values: int) -> bytes:
    return array("Q", values).tobytes()
