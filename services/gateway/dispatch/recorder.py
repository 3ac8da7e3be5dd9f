"""Records an ended choice as an event on the bus and in the metrics."""

from libs.bus.port import Bus
from libs.contracts.errors import FulcrumError
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    Outcome,
    RequestEvent,
)
from libs.contracts.topics import REQUESTS
from libs.dispatch.generation import ApiFinishReason, Ending, Generation
from libs.policy.gateway.usage import decode_gpu_ns, prompt_gpu_ns
from libs.policy.ratios import LEVELS
from services.gateway.dispatch.tenant_limits import TenantLimiter
from services.gateway.metrics import GatewayMetrics
from services.gateway.workers.fleet import WorkerLinks
from services.gateway.workers.link import WorkerLink


class Recorder:
    """A callback that runs once for every choice that has ended."""

    def __init__(self, bus: Bus, metrics: GatewayMetrics) -> None:
        self._bus = bus
        self._metrics = metrics

    def ended(self, generation: Generation, outcome: ApiFinishReason | FulcrumError | None) -> None:
        event = request_event(generation, outcome)
        self._bus.publish(REQUESTS, event)
        metrics, timeline = self._metrics.of_model(generation.model), generation.timeline
        name = Outcome.Name(event.outcome).removeprefix("OUTCOME_").lower()
        self._metrics.choices.labels(generation.model, name, event.finish_reason or event.error_code).inc()
        metrics.prompt_tokens.inc(generation.prompt_tokens)
        metrics.cached_tokens.inc(generation.cached_tokens)
        metrics.output_tokens.inc(len(generation.output))
        metrics.reroutes.inc(generation.placement.reroutes)
        metrics.stale_role_retries.inc(generation.placement.stale_role_retries)
        metrics.moves.inc(generation.placement.hand_overs)
        metrics.recomputes.inc(generation.placement.recomputes)
        if generation.output and timeline.predicted_ttft_ns and not generation.resumed:
            metrics.ttft_predicted.observe(timeline.predicted_ttft_ns / timeline.ttft_ns)
            for level, by_ns in zip(LEVELS, timeline.likely_first_ns, strict=False):
                self._metrics.ttft_likely.labels(generation.model, f"{level:g}", timeline.first_token_ns <= by_ns).inc()
        if timeline.bound_ns:
            metrics.queue_s.observe(timeline.queue_ns / 1e9)
        if generation.output:
            metrics.ttft_s.observe(timeline.ttft_ns / 1e9)
        if len(generation.output) > 1:
            metrics.tpot_s.observe(timeline.decode_ns / (len(generation.output) - 1) / 1e9)


def request_event(generation: Generation, outcome: ApiFinishReason | FulcrumError | None) -> RequestEvent:
    """Return the event of one choice. Pure."""
    context, timeline = generation.context, generation.timeline
    return RequestEvent(
        request_id=generation.request_id,
        gateway_id=context.gateway_id,
        tenant=context.tenant,
        service_class=context.service_class,
        model=generation.model,
        arrival_unix_ns=timeline.arrival_ns,
        prompt_tokens=generation.prompt_tokens,
        output_tokens=len(generation.output),
        cached_tokens=generation.cached_tokens,
        queue_ns=timeline.queue_ns,
        ttft_ns=timeline.ttft_ns,
        decode_ns=timeline.decode_ns,
        prefill_worker=generation.placement.prefill_worker,
        decode_worker=generation.placement.decode_worker,
        outcome=_outcome(outcome),
        finish_reason=outcome.value if isinstance(outcome, ApiFinishReason) else "",
        error_code=outcome.code if isinstance(outcome, FulcrumError) else "",
        traceparent=context.traceparent,
        ttft_deadline_unix_ns=context.ttft_deadline_unix_ns,
        tpot_target_us=context.tpot_target_us,
        reroutes=generation.placement.reroutes + generation.placement.stale_role_retries,
        moves=generation.placement.hand_overs,
        predicted_ttft_ns=timeline.predicted_ttft_ns,
        recomputes=generation.placement.recomputes,
        max_output_tokens=generation.max_output_tokens,
    )


def _outcome(outcome: ApiFinishReason | FulcrumError | None) -> Outcome:
    if outcome is None:
        return OUTCOME_CLIENT_GONE
    if isinstance(outcome, ApiFinishReason):
        return OUTCOME_OK
    return OUTCOME_REJECTED if outcome.http_status < 500 else OUTCOME_FAILED


class GpuCharge:
    """A callback that runs once for every choice that has ended, for whatever reason."""

    def __init__(self, limiter: TenantLimiter, fleet: WorkerLinks) -> None:
        self._limiter = limiter
        self._fleet = fleet

    def ended(self, generation: Generation, _outcome: Ending) -> None:
        """Charge the choice's GPU time at its workers' current speed; charge nothing if no worker computed for it."""
        tenant = generation.context.tenant
        if not self._limiter.limits_gpu_time(tenant) or not generation.output:
            return
        links, placement, spent_ns = self._fleet.serving(), generation.placement, 0.0
        if (link := links.get(placement.prefill_worker)) is not None and (view := link.view()) is not None:
            spent_ns += prompt_gpu_ns(view.speed, _gpus(link), generation.prompt_tokens, generation.cached_tokens)
        decoded = links.get(placement.decode_worker or placement.prefill_worker)
        if decoded is not None and (view := decoded.view()) is not None:
            tokens = len(generation.output) - 1
            spent_ns += decode_gpu_ns(view.speed, _gpus(decoded), tokens, view.decode_sequences, view.kv_tokens)
        self._limiter.spent_gpu_ms(tenant, round(spent_ns / 1e6))


def _gpus(link: WorkerLink) -> int:
    return link.worker.gpus if link.worker is not None else 1
