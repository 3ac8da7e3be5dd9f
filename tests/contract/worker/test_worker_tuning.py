"""Tests of how a worker finds its prefill chunk: at its start if configured, and by an admin call."""

import time
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL, Role
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.contracts.step_row import StepRow
from libs.perfmodel.profiles import profile
from libs.policy.worker.saturation import MIN_SIZES, Point, PrefillCurve, Saturation
from libs.runtime.net.rpc import make_channel
from libs.stores.steps import StepTimeKey
from libs.testing.workers.hosts import (
    TOKEN,
    LocalWorker,
    RecordingStepTimes,
    eventually,
    gateway_probe,
    local_worker,
    submit,
)

PROFILE = "llama3.1-8b-h200-aic"

PATIENT_MS = 40_000
"""Bound that only an overloaded machine reaches."""
METADATA = (("authorization", f"Bearer {TOKEN}"),)


async def tune(worker: LocalWorker, **fields: Any) -> pb.TunePrefillResponse:
    async with make_channel(worker.settings, worker.address) as channel:
        answer: pb.TunePrefillResponse = await admin(channel).TunePrefill(
            pb.TunePrefillRequest(**fields), metadata=METADATA
        )
        return answer


async def tune_decode(worker: LocalWorker, **fields: int) -> pb.TuneDecodeResponse:
    async with make_channel(worker.settings, worker.address) as channel:
        answer: pb.TuneDecodeResponse = await admin(channel).TuneDecode(
            pb.TuneDecodeRequest(**fields), metadata=METADATA
        )
        return answer


async def set_role(worker: LocalWorker, role: Role, *, budget_tokens: int = 0) -> None:
    request = pb.SetRoleRequest(
        expected_epoch=worker.host.assignment.current.epoch, role=role, budget_tokens=budget_tokens
    )
    async with make_channel(worker.settings, worker.address) as channel:
        await admin(channel).SetRole(request, metadata=METADATA)


def admin(channel: grpc.aio.Channel) -> Any:
    return pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]


async def step_sizes(worker: LocalWorker, prompt_tokens: int) -> int:
    """Return the largest prompt step of one prompt."""

    def steps() -> list[StepRow]:
        return [step for step in worker.steps(before) if step.start_unix_ns >= requested_unix_ns]

    async with gateway_probe(worker) as gateway:
        await gateway.until(lambda: gateway.prefill_credits)
        before = len(worker.batches())
        requested_unix_ns = time.time_ns()  # measuring steps may be reported only now
        await gateway.submit(submit(1, pb.PHASE_PREFILL, [7] * prompt_tokens))
        await gateway.event(1, "prefilled")
        await gateway.until(lambda: bool(steps()))
    return max(step.prefill_tokens for step in steps())


async def test_the_tune_call_measures_chooses_and_applies_a_chunk() -> None:
    async with local_worker("p", "prefill", sim_speedup=20.0, sim_profile=PROFILE) as worker:
        only = await tune(worker, most_tokens=1024, limit_ms=PATIENT_MS, measure_only=True)
        assert only.chunk_tokens_before == 512 and len(only.curve) >= 6
        assert only.decode_batch == 0, "no sequence decodes within no time"
        found = await tune(worker, most_tokens=1024, limit_ms=PATIENT_MS, tpot_target_us=1_000_000)
        assert found.decode_batch == worker.host.engine.capabilities.max_sequences
        assert found.chunk_tokens_before == 512, "only measured before"
        assert 16 <= found.chunk_tokens <= 1024 and found.plateau_tokens_per_s > 0
        assert found.prompt_ns > 0 and found.prompt_ns_before > 0
        assert worker.host.engine.integrity().referenced_blocks == 0
        assert await step_sizes(worker, 2 * found.chunk_tokens) == found.chunk_tokens


def trial_tokens(worker: LocalWorker) -> list[int]:
    """Return the prompt tokens of the steps reported so far."""
    return [step.prefill_tokens for step in worker.steps() if step.end_unix_ns]


KEY = StepTimeKey("sim", "sim@builtin-sim-1", f"sim:{PROFILE}/x20")
CURVE = PrefillCurve(Saturation(208, 1000.0, (Point(208, 1000.0, 1000.0),), profile(PROFILE).step_time), 1)
AT_ONCE = {"prefill_chunk_tokens": 0, "sim_speedup": 20.0, "sim_profile": PROFILE}


async def test_the_first_prefill_worker_measures_before_it_serves_and_stores_the_result() -> None:
    async with local_worker("p", "prefill", **AT_ONCE) as worker:
        await eventually(lambda: len(set(trial_tokens(worker))) >= MIN_SIZES)
        assert set(worker.step_times.curves) == {KEY}
        chunk_tokens = worker.host.speed.speed.chunk_tokens
        assert worker.step_times.curves[KEY].saturation.chunk_tokens == chunk_tokens
        assert not worker.step_times.claimed
        assert await step_sizes(worker, chunk_tokens + 64) == chunk_tokens, "and it is in effect"


async def test_the_next_worker_of_its_kind_uses_the_stored_result_and_measures_nothing() -> None:
    kept = RecordingStepTimes()
    kept.curves[KEY] = CURVE
    async with local_worker("next", "prefill", step_times=kept, **AT_ONCE) as worker:
        assert worker.host.speed.speed.chunk_tokens == 208
        assert trial_tokens(worker) == []
        reported = await tune(worker, kept=True)
        assert reported.chunk_tokens == reported.chunk_tokens_before == 208 and reported.chunk_tokens_default == 512
        assert len(reported.curve) == 1 and reported.measured_unix_ns == CURVE.unix_ns
        assert trial_tokens(worker) == [], "a report is no measurement either"


async def test_a_worker_that_moves_to_prefill_uses_what_others_have_measured() -> None:
    async with local_worker("d", "decode", **AT_ONCE) as worker:
        await set_role(worker, ROLE_MIXED, budget_tokens=64)
        worker.step_times.curves[KEY] = CURVE
        assert worker.host.speed.speed.chunk_tokens == 512
        await set_role(worker, ROLE_PREFILL)
        await eventually(lambda: worker.host.speed.speed.chunk_tokens == 208)
        assert trial_tokens(worker) == [], "no measurement runs during a role move"


async def test_a_named_chunk_size_is_applied_without_a_measurement() -> None:
    async with local_worker("p", "prefill") as worker:
        answer = await tune(worker, set_tokens=96)
        assert (answer.chunk_tokens, answer.chunk_tokens_before) == (96, 512) and not answer.curve
        assert await step_sizes(worker, 300) == 96
        with pytest.raises(grpc.aio.AioRpcError, match="1 to 8192 prompt tokens, not 10000"):
            await tune(worker, set_tokens=10_000)
        with pytest.raises(grpc.aio.AioRpcError, match="no worker of this kind has measured prefill"):
            await tune(worker, kept=True)


async def test_the_largest_decode_batch_within_a_target_is_reported_with_its_basis() -> None:
    async with local_worker("d", "mixed", budget_tokens=512, sim_speedup=4.0) as worker:
        guess = await tune_decode(worker, tpot_target_us=2_500, context_tokens=1024)
        assert guess.steps == 0 and 0 < guess.batch <= guess.max_sequences == 8
        assert guess.step_ns <= 2_500_000 and (guess.next_step_ns > 2_500_000 or guess.batch == 8)
        none = await tune_decode(worker, tpot_target_us=1, context_tokens=1024)
        assert none.batch == 0 and none.step_ns > 1000
        async with gateway_probe(worker) as gateway:
            await gateway.until(lambda: gateway.decode_credits)
            await gateway.submit(submit(1, pb.PHASE_BOTH, range(64), output=80))
            await gateway.event(1, "finished")
        await eventually(lambda: worker.batches()[-1].step_time.decode.steps)
        assert (await tune_decode(worker, tpot_target_us=2_500, context_tokens=1024)).steps >= 79


@pytest.mark.parametrize(
    ("chunk_tokens", "reason"), [(256, "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS names a size"), (0, "no room")]
)
async def test_a_prefill_worker_that_did_not_measure_at_its_start_logs_the_reason(
    chunk_tokens: int, reason: str
) -> None:
    settings = {"prefill_chunk_tokens": chunk_tokens, "sim_kv_memory_mb": 6, "sim_speedup": 20.0}
    with capture_logs() as logs:
        async with local_worker("p", "prefill", **settings):
            pass
    (reported,) = [entry for entry in logs if entry["event"] == "prefill not measured at start"]
    assert reason in reported["reason"] and reported["chunk_tokens"] == (chunk_tokens or 512)
