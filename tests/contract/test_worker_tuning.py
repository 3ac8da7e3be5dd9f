"""A worker finds its prefill chunk: at its start where asked to, and by an administrator's verb."""

import pytest
from structlog.testing import capture_logs

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2_grpc as pb_grpc
from libs.runtime.rpc import make_channel
from libs.testing.worker import TOKEN, LocalWorker, gateway_probe, local_worker, submit

METADATA = (("authorization", f"Bearer {TOKEN}"),)


async def tune(worker: LocalWorker, **fields: int) -> pb.TunePrefillResponse:
    async with make_channel(worker.settings, worker.address) as channel:
        stub = pb_grpc.WorkerAdminServiceStub(channel)  # type: ignore[no-untyped-call]
        answer: pb.TunePrefillResponse = await stub.TunePrefill(pb.TunePrefillRequest(**fields), metadata=METADATA)
        return answer


async def step_sizes(worker: LocalWorker, prompt_tokens: int) -> int:
    """The largest prompt step of one prompt."""
    async with gateway_probe(worker) as gateway:
        await gateway.until(lambda: gateway.prefill_credits)
        before = len(worker.batches())
        await gateway.submit(submit(1, pb.PHASE_PREFILL, [7] * prompt_tokens))
        await gateway.event(1, "prefilled")
        await gateway.until(lambda: any(batch.steps for batch in worker.batches()[before:]))
    return max(step.prefill_tokens for batch in worker.batches()[before:] for step in batch.steps)


async def test_the_verb_measures_chooses_and_applies() -> None:
    async with local_worker("p", "prefill", sim_speedup=1.0, sim_profile="llama3.1-8b-h200-aic") as worker:
        only = await tune(worker, most_tokens=1024, limit_ms=4000, measure_only=True)
        assert only.chunk_tokens_before == 512 and len(only.curve) >= 6
        assert only.decode_batch == 0, "no sequence decodes within no time"
        found = await tune(worker, most_tokens=1024, limit_ms=4000, tpot_target_us=1_000_000)
        assert found.decode_batch == worker.host.engine.capabilities.max_sequences
        assert found.chunk_tokens_before == 512, "only measured before"
        assert 32 <= found.chunk_tokens <= 1024 and found.plateau_tokens_per_s > 0
        assert found.prompt_ns > 0 and found.prompt_ns_before > 0
        assert worker.host.engine.integrity().referenced_blocks == 0
        assert await step_sizes(worker, 2 * found.chunk_tokens) == found.chunk_tokens


async def test_a_prefill_worker_told_to_choose_measures_before_it_serves() -> None:
    settings = {"prefill_chunk_tokens": 0, "sim_speedup": 20.0}
    async with local_worker("p", "prefill", **settings) as worker:
        steps = [step for batch in worker.batches() for step in batch.steps]
        assert len({step.prefill_tokens for step in steps}) >= 3 or worker.host.engine.load().running == 0
        assert (await tune(worker, most_tokens=512, limit_ms=500, measure_only=True)).chunk_tokens_before != 0


@pytest.mark.parametrize(
    ("chunk_tokens", "reason"), [(256, "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS names a size"), (0, "no room")]
)
async def test_a_prefill_worker_that_did_not_measure_at_its_start_says_why(chunk_tokens: int, reason: str) -> None:
    settings = {"prefill_chunk_tokens": chunk_tokens, "sim_kv_memory_mb": 6, "sim_speedup": 20.0}
    with capture_logs() as logs:
        async with local_worker("p", "prefill", **settings):
            pass
    (told,) = [entry for entry in logs if entry["event"] == "prefill not measured at start"]
    assert reason in told["reason"] and told["chunk_tokens"] == (chunk_tokens or 512)
