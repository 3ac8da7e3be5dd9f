"""Step telemetry for tests: a worker's batches, in milliseconds since an origin, and the loads made of them."""

from collections.abc import Iterable, Sequence

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import FleetLoads, Interval, StepBatch
from libs.contracts.roles import role_from_name
from libs.contracts.step_row import StepRow, step_columns
from libs.telemetry.columns import prefill_shares
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.fleet_loads import WINDOW_NS, LoadMessageBuilder
from libs.telemetry.history import History, WrittenWindow

ORIGIN_NS = 1_700_000_000_000_000_000
MS = 1_000_000
SPAN_NS = 3_000_000_000
"""The span of windows in each message of `Telling`."""


def at(ms: float) -> int:
    """Return the Unix nanoseconds at `ms` after the origin."""
    return ORIGIN_NS + round(ms * MS)


def step(start_ms: float, end_ms: float | None, *, prefill: int = 0, decode: int = 0) -> StepRow:
    """Build a step of `prefill` prompt tokens and `decode` sequences; without an end it is only announced."""
    return StepRow(
        start_unix_ns=at(start_ms),
        end_unix_ns=0 if end_ms is None else at(end_ms),
        prefill_tokens=prefill,
        prefill_sequences=1 if prefill else 0,
        prefill_context_tokens=prefill,
        decode_sequences=decode,
        decode_kv_tokens=100 * decode,
    )


def step_batch(
    sequence: int,
    cover_ms: tuple[float, float],
    steps: Sequence[StepRow] = (),
    *,
    waits_ms: Sequence[tuple[float, float]] = (),
    worker: str = "decode-0",
    role: str = "decode",
    model: str = "sim",
    gpus: int = 1,
    incarnation: int = 1,
    load: Load | None = None,
    dropped_batches: int = 0,
) -> StepBatch:
    """Build the batch of a worker for `cover_ms`."""
    wire_role, budget_tokens = role_from_name(role, 64 if role == "mixed" else 0)
    return StepBatch(
        worker_id=worker,
        incarnation=incarnation,
        sequence=sequence,
        node="node-a",
        gpus=gpus,
        engine="sim",
        assignment=Assignment(model=model, role=wire_role, budget_tokens=budget_tokens, epoch=1),
        covered_from_unix_ns=at(cover_ms[0]),
        covered_to_unix_ns=at(cover_ms[1]),
        steps=step_columns(steps),
        kv_waits=[Interval(start_unix_ns=at(start), end_unix_ns=at(end)) for start, end in waits_ms],
        load=load,
        dropped_batches=dropped_batches,
    )


def write_windows(history: History, from_ms: float, to_ms: float) -> None:
    """Write the windows of [from, to) into the roll-ups of `history`, as the metrics service does every 100 ms."""
    if history.written_to_ns is None:
        history.resume(at(from_ms))
    written_ms = ((history.written_to_ns or 0) - ORIGIN_NS) // MS
    for ms in range(written_ms, round(to_ms) + 1, 100):
        history.advance(at(ms))


class Telling:
    """A metrics service without its history, which turns workers' batches into the messages that planners read."""

    def __init__(self, metrics_id: str = "metrics") -> None:
        self.fleet = FleetTelemetry(prefill_shares)
        self._teller = LoadMessageBuilder(metrics_id, incarnation=1)

    def loads(self, batches: Iterable[StepBatch], now_ns: int) -> FleetLoads:
        """Return the message that is sent at `now_ns`, after these batches have been received."""
        for batch in batches:
            self.fleet.add(batch, now_ns)
        ids = self.fleet.directory.listing(now_ns).own_ids
        end_ns = now_ns // WINDOW_NS * WINDOW_NS
        written = [
            WrittenWindow(start_ns, self.fleet.cells(ids, start_ns, start_ns + WINDOW_NS), revised=False)
            for start_ns in range(end_ns - SPAN_NS, end_ns, WINDOW_NS)
        ]
        reported = self._teller.message(self.fleet, written, now_ns)
        return reported.message if reported is not None else FleetLoads(metrics_id="metrics", told_unix_ns=now_ns)
