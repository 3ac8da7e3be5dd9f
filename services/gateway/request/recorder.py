"""The records that the gateway publishes: an event for each ended choice, the state of its queues, and counts of
arrivals.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final, Protocol

import xxhash

from libs.bus.port import Bus
from libs.contracts.errors import FulcrumError, QueueFull, RateLimited
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import (
    OUTCOME_CLIENT_GONE,
    OUTCOME_FAILED,
    OUTCOME_OK,
    OUTCOME_REJECTED,
    GatewayQueues,
    ModelQueue,
    Outcome,
    RequestEvent,
    WaitingAge,
)
from libs.contracts.topics import DEMAND, QUEUES, REQUESTS
from libs.demand.counts import OTHER, ArrivalCounter, DemandKey
from libs.demand.wire import totals_message
from libs.dispatch.generation import ApiFinishReason, Ending, Generation
from libs.policy.gateway.queues import Queue, WaitingAges
from libs.policy.gateway.usage import decode_gpu_ns, prompt_gpu_ns
from libs.policy.ratios import LEVELS
from libs.runtime.clock import Clock
from services.gateway.fleet import WorkerLinks
from services.gateway.link import WorkerLink
from services.gateway.metrics import GatewayMetrics
from services.gateway.refusals import RefusalCounts
from services.gateway.request.limits import TenantLimiter


class Recorder:
    """A listener that publishes and counts each choice at its end."""

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
        if generation.answered and timeline.predicted_ttft_ns and not generation.resumed:
            metrics.ttft_predicted.observe(timeline.predicted_ttft_ns / timeline.ttft_ns)
            for level, by_ns in zip(LEVELS, timeline.likely_first_ns, strict=False):
                self._metrics.ttft_likely.labels(generation.model, f"{level:g}", timeline.first_token_ns <= by_ns).inc()
        if timeline.bound_ns:
            metrics.queue_s.observe(timeline.queue_ns / 1e9)
        if generation.answered:
            metrics.ttft_s.observe(timeline.ttft_ns / 1e9)
        if len(generation.output) > 1:
            metrics.tpot_s.observe(timeline.decode_ns / (len(generation.output) - 1) / 1e9)


def request_event(generation: Generation, outcome: ApiFinishReason | FulcrumError | None) -> RequestEvent:
    """Return the event that describes an ended choice. Pure."""
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
        max_output_tokens=0 if generation.pooled else generation.max_output_tokens,
        second_token_ns=max(timeline.second_token_ns - timeline.arrival_ns, 0),
    )


def _outcome(outcome: ApiFinishReason | FulcrumError | None) -> Outcome:
    if outcome is None:
        return OUTCOME_CLIENT_GONE
    if isinstance(outcome, ApiFinishReason):
        return OUTCOME_OK
    return OUTCOME_REJECTED if outcome.http_status < 500 else OUTCOME_FAILED


class GpuCharge:
    """A listener that charges each choice's GPU time to its tenant at its end."""

    def __init__(self, limiter: TenantLimiter, fleet: WorkerLinks) -> None:
        self._limiter = limiter
        self._fleet = fleet

    def ended(self, generation: Generation, _outcome: Ending) -> None:
        """Charge the choice's GPU time at the current speed of its workers.

        A choice without a token costs nothing, nor does the part on a worker that no longer serves.
        """
        tenant = generation.context.tenant
        if not self._limiter.limits_gpu_time(tenant) or not generation.answered:
            return
        links, placement, spent_ns = self._fleet.serving(), generation.placement, 0.0
        if (link := links.get(placement.prefill_worker)) is not None and (view := link.view()) is not None:
            spent_ns += prompt_gpu_ns(view.speed, _gpus(link), generation.prompt_tokens, generation.cached_tokens)
        decoded = links.get(placement.decode_worker or placement.prefill_worker)
        if decoded is not None and (view := decoded.view()) is not None:
            tokens = max(len(generation.output) - 1, 0)
            spent_ns += decode_gpu_ns(view.speed, _gpus(decoded), tokens, view.decode_sequences, view.kv_tokens)
        self._limiter.spent_gpu_ms(tenant, round(spent_ns / 1e6))


def _gpus(link: WorkerLink) -> int:
    return link.worker.gpus if link.worker is not None else 1


QUEUES_EVERY_S: Final = 0.2
# The interval between checks while there are live choices, because the planner must see a growing queue soon.
LOOK_S: Final = 0.05
# The growth factor since the last report above which a queue is reported at once.
GROWN: Final = 1.25
# The time after which the queues are reported again: `QUEUES_EVERY_S` minus the error of timers.
QUEUES_EVERY_NS: Final = 180_000_000
# The time after which empty queues are reported again. Readers treat a gateway as silent after 2 s.
EMPTY_QUEUES_EVERY_NS: Final = 500_000_000
MAX_MODELS: Final = 64
# The number of unsent records above which the broker is treated as unreachable. Queue reports are then dropped: they
# would be outdated when sent, and the buffer is needed for request events. Arrival counts are cumulative, so one later
# record replaces the skipped ones.
MAX_UNSENT: Final = 256


class Waiting(Protocol):
    """The parts of the dispatcher that the reporter reads."""

    @property
    def live(self) -> int:
        """The number of choices that have not ended."""
        ...

    def queues(self) -> list[Queue]: ...

    def awaited(self) -> Mapping[str, WaitingAges]: ...


class QueueReporter:
    def __init__(self, bus: Bus, waiting: Waiting, refusals: RefusalCounts, gateway_id: str, clock: Clock) -> None:
        self._bus = bus
        self._waiting = waiting
        self._refusals = refusals
        self._reported_tokens = 0
        self._reported_refused = 0
        self._gateway_id = gateway_id
        self._clock = clock
        self._began_ns = clock.now_ns()
        self._left = False
        self._reported_waiting = True
        """True if any queue in the last report was not empty, and before the first report."""
        self._reported_ns = 0

    async def run(self) -> None:
        while True:
            queues = self._waiting.queues()
            since_ns = self._clock.now_ns() - self._reported_ns
            waits = self._reported_waiting or any(each.waits for each in queues)
            changes = waits or self._refusals.refused != self._reported_refused
            due = since_ns >= (QUEUES_EVERY_NS if changes else EMPTY_QUEUES_EVERY_NS)
            if due or _tokens(queues) > GROWN * self._reported_tokens:
                self.report(queues)
            await asyncio.sleep(LOOK_S if self._waiting.live else QUEUES_EVERY_S)

    def leave(self) -> None:
        self.report([], last=True)

    def report(self, queues: list[Queue], *, last: bool = False) -> None:
        """Publish the queues. If the broker is unreachable, drop the report."""
        if self._left or self._bus.stats().buffered > MAX_UNSENT:
            return
        self._left = last
        self._reported_waiting, self._reported_ns = any(each.waits for each in queues), self._clock.now_ns()
        self._reported_tokens, self._reported_refused = _tokens(queues), self._refusals.refused
        awaited = self._waiting.awaited()
        message = GatewayQueues(
            gateway_id=self._gateway_id,
            incarnation=self._began_ns,
            told_unix_ns=self._reported_ns,
            queues=[_queue_message(queue, awaited.get(queue.model)) for queue in queues[:MAX_MODELS]],
            last=last,
            posts=self._refusals.posts,
            refused=self._refusals.rows(),
        )
        self._bus.publish(QUEUES, message)


def _queue_message(queue: Queue, awaited: WaitingAges | None) -> ModelQueue:
    message = ModelQueue(**asdict(queue))
    if awaited is not None:
        counted = zip(awaited.requests, awaited.total_ms, strict=True)
        message.awaited.extend(WaitingAge(requests=n, mean_ms=total_ms // n) for n, total_ms in counted if n)
        message.overdue = awaited.overdue
    return message


def _tokens(queues: list[Queue]) -> int:
    return sum(each.prefill_tokens + each.decode_prompt_tokens for each in queues)


DEMAND_EVERY_S: Final = 2.0
NO_ROOM: Final = frozenset({429, 503})
"""The HTTP statuses of requests that were refused for lack of room and not because of their content."""


class DemandPublisher:
    def __init__(self, bus: Bus, gateway_id: str, clock: Clock) -> None:
        self.counter = ArrivalCounter()
        self._bus = bus
        self._clock = clock
        self._gateway = (gateway_id, clock.now_ns())
        self._left = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(DEMAND_EVERY_S)
            self.publish()

    def leave(self) -> None:
        self.publish(last=True)

    def publish(self, *, last: bool = False) -> None:
        """Publish the current counts.

        If the broker is unreachable, skip this record; the next one includes its counts.
        """
        if self._left or (self._bus.stats().buffered > MAX_UNSENT and not last):
            return
        self._left = last
        rows, full = self.counter.rows(), self.counter.queue_full
        self._bus.publish(DEMAND, totals_message(self._gateway, self._clock.now_ns(), rows, full, last=last))

    def arrive(self, tenant: str, service_class: str) -> "DemandArrival":
        """Create the record of a request whose body has not been read."""
        return DemandArrival(self.counter, self._clock, tenant, service_class)

    def ended(self, generation: Generation, outcome: Ending) -> None:
        """Count the end of a choice.

        The lines of batch jobs have no arrival in `arrive`, so their arrival is counted here as well.
        """
        if not self.counter.holds(generation):
            context = generation.context
            key = DemandKey(generation.model, context.service_class, context.tenant)
            self.counter.admitted(key, [generation], generation.prompt_tokens, b"", self._clock.now_ns())
        self.counter.ended(generation, well=isinstance(outcome, ApiFinishReason))


@dataclass(slots=True)
class DemandArrival:
    """The demand record of one request, from its arrival until it is admitted or refused."""

    _counter: ArrivalCounter
    _clock: Clock
    _tenant: str
    _service_class: str
    model: str = OTHER
    choices: int = 1
    _mark: bytes = b""
    _admitted: bool = field(default=False, init=False)

    def read(self, body: bytes) -> bytes:
        """Hash the body, so that a retry of the same request is recognised, and return it."""
        self._mark = xxhash.xxh3_128_digest(self._tenant.encode() + b"\0" + body)
        return body

    def admitted(self, generations: Sequence[Generation]) -> None:
        """Count the request's choices as admitted to the queue."""
        tokens = sum(each.prompt_tokens for each in generations)
        self._counter.admitted(self._key, generations, tokens, self._mark, self._clock.now_ns())
        self._admitted = True

    def failed(self, error: FulcrumError) -> None:
        """Count a refusal for lack of room as demand. Ignore other errors."""
        # An exceeded limit is not a lack of room.
        if error.http_status in NO_ROOM and not isinstance(error, RateLimited):
            full = isinstance(error, QueueFull)
            now_ns = self._clock.now_ns()
            self._counter.refused(self._key, self.choices, self._mark, now_ns, known=self._admitted, full=full)

    @property
    def _key(self) -> DemandKey:
        return DemandKey(self.model, self._service_class, self._tenant)
