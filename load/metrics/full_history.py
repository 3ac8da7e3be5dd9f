"""Fills a metrics service's state to all of its bounds, as if it had lived for two days with a fleet."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Compute
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_OK, RequestEvent, StepBatch
from libs.contracts.step_row import StepRow, step_columns
from libs.telemetry.fleet import MAX_FLEET_STEPS
from libs.telemetry.members import Member
from libs.telemetry.windows.rollups import KeptWindow, Written
from libs.telemetry.worker.phase_time import PhaseTime
from libs.telemetry.worker.timeline import MAX_STEPS
from services.metrics.requests.log import MAX_REQUESTS
from services.metrics.state import MetricsState

STEP_NS: Final = 16_000_000
MS_NS: Final = 1_000_000
DECODE: Final = 2
"""The role's number in roll-ups."""


def fill(state: MetricsState, worker_ids: Sequence[str], now_ns: int) -> None:
    """Windows of all tiers, steps with what they computed, requests: of the time until `now_ns`."""
    _fill_windows(state, worker_ids, now_ns)
    steps = min(MAX_STEPS, MAX_FLEET_STEPS // len(worker_ids))
    for worker_id in worker_ids:
        busy = _busy(worker_id, steps, now_ns - MS_NS)
        state.fleet.add(busy, now_ns)
        # What is known of a worker holds its newest batch, and none that is sent is as large as that.
        newest = StepBatch(worker_id=worker_id, sequence=2, node=busy.node, gpus=busy.gpus, engine=busy.engine)
        newest.covered_from_unix_ns, newest.covered_to_unix_ns = busy.covered_to_unix_ns, now_ns
        state.fleet.add(newest, now_ns)
    for number in range(MAX_REQUESTS):
        arrival_ns = now_ns - (MAX_REQUESTS - number) * MS_NS - 400 * MS_NS
        event = RequestEvent(
            request_id=f"chatcmpl-{number:032x}", prefill_worker=worker_ids[0], decode_worker=worker_ids[-1],
            model="model-0", arrival_unix_ns=arrival_ns, ttft_ns=100 * MS_NS, decode_ns=300 * MS_NS, outcome=OUTCOME_OK,
            prompt_tokens=512, output_tokens=64,
        )  # fmt: skip
        state.requests.add(event, now_ns)


def _fill_windows(state: MetricsState, worker_ids: Sequence[str], now_ns: int) -> None:
    finest, *coarse = state.rollups.tiers
    newest_ns = now_ns - now_ns % finest.window_ns
    written = [Written(each, PhaseTime(finest.window_ns, 0, finest.window_ns // 2, 0), DECODE) for each in worker_ids]
    for back in range(finest.windows, 0, -1):
        state.rollups.write(newest_ns - back * finest.window_ns, written)
    state.members.enter(Member(each, "node", "model-0", 1) for each in worker_ids)
    for tier in coarse:
        times = np.tile(np.array([tier.window_ns, 0, tier.window_ns // 2, 0], np.int64), (len(worker_ids), 1))
        roles = np.full(len(worker_ids), DECODE, np.uint8)
        start_ns = now_ns - now_ns % tier.window_ns
        for back in range(tier.windows - 1, -1, -1):
            state.rollups.restore(
                KeptWindow(tier.window_ns, start_ns - back * tier.window_ns, worker_ids, times, roles)
            )


def _busy(worker_id: str, steps: int, now_ns: int) -> StepBatch:
    """A worker's batch with its model's shape, from an incarnation before the live one."""
    began_ns = now_ns - steps * STEP_NS
    starts_ns = range(began_ns, now_ns, STEP_NS)
    return StepBatch(
        worker_id=worker_id, sequence=1, node="node", gpus=1, engine="sim",
        covered_from_unix_ns=began_ns, covered_to_unix_ns=now_ns,
        compute=Compute(layer_parameters=10**9, parameter_bytes=2, peak_flops_per_s=1e15, peak_bytes_per_s=1e12),
        steps=step_columns(
            StepRow(start_ns, start_ns + STEP_NS, decode_sequences=16, decode_kv_tokens=16_000)
            for start_ns in starts_ns
        ),
    )  # fmt: skip
