"""Tests that a worker learns its step times, reports them and stores them for the next one."""

from libs.contracts.pb.fulcrum.worker.v1 import worker_pb2 as pb
from libs.perfmodel.learner import StepKind
from libs.perfmodel.profiles import prior_step_time
from libs.perfmodel.wire import fitted_model
from libs.policy.step_time import StepWork
from libs.stores.steps import StepTimeKey
from libs.testing.workers.hosts import RecordingStepTimes, eventually, gateway_probe, local_worker, submit
from libs.worker.telemetry import StepTimes

DEVICE = "sim:llama-8b-h100/x4"
DECODE = StepWork(decode_sequences=1, decode_kv_tokens=100)


async def test_step_times_are_learned_reported_in_telemetry_and_stored_at_the_end() -> None:
    async with local_worker("w", "mixed", budget_tokens=512, sim_speedup=4.0) as worker:
        async with gateway_probe(worker) as gateway:
            await gateway.until(lambda: gateway.decode_credits)
            await gateway.submit(submit(1, pb.PHASE_BOTH, range(64), output=80))
            await gateway.event(1, "finished")
            await eventually(lambda: worker.batches()[-1].step_time.decode.steps)
        fitted = fitted_model(worker.batches()[-1].step_time)
        assert fitted is not None and fitted.decode.steps >= 79
        kept = worker.step_times
    fits = await kept.load(StepTimeKey("sim", "sim@builtin-sim-1", DEVICE))
    assert set(fits) == {StepKind.DECODE}, "one prompt step does not suffice for a fit"
    true_ns = prior_step_time("sim", DEVICE).decode_ns(DECODE)
    assert 0.5 < fits[StepKind.DECODE].model.decode_ns(DECODE) / true_ns < 2


async def test_a_worker_starts_from_step_times_that_another_has_learned() -> None:
    store, key = RecordingStepTimes(), StepTimeKey("torch", "m", "cpu")
    prior = prior_step_time("torch", "cpu")
    first = StepTimes(store, key, prior.scaled(2))
    store.fits[key][StepKind.DECODE] = first.fitted
    second = StepTimes(store, key, prior)
    await second.restore()
    assert second.fitted.model.decode_ns(DECODE) == 2 * prior.decode_ns(DECODE)
    assert second.fitted.model.prefill_token_ns == prior.prefill_token_ns
