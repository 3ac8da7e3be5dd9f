"""The inputs of a verdict, computed from telemetry model by model. Pure; time is passed in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import ROLE_MIXED, ROLE_PREFILL
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.perfmodel.learner import usual_model
from libs.perfmodel.wire import fitted_model, link_token_ns
from libs.policy.pressure import WorkerProfile, Workload, usual_link_ns
from libs.policy.roles import MAX_BUDGET_TOKENS, Role
from libs.policy.speed import image_ns
from libs.policy.verdict.state import (
    ModelState,
    Prompts,
    UnknownState,
    WorkerState,
    pressures,
    prompt_yield,
    prompts_part,
    role_counts,
    workers_needed,
)
from libs.telemetry.gateways import ModelBacklog

REPORTING_SHARE: Final = 0.5
"""The share of a model's workers that must report for a verdict on it."""
MAX_REPORTED_MODELS: Final = 64
"""The maximum number of workers whose step-time models are compared to choose the usual one."""


@dataclass(frozen=True, slots=True)
class ObservedStatus:
    """A worker that accepts work, with its newest batch and its measurements over the last two seconds."""

    batch: StepBatch
    slowness: float | None
    kv_wait: float
    """The share of the worker's time spent waiting for KV."""
    kv_awaited: float
    """The share of moments at which KV that was ready elsewhere was in transit."""
    held_by_link: float
    """Sequences that awaited such KV, on average."""
    kv_awaited_s: float
    """The age of the longest awaited such KV in seconds, on average."""
    cpu_wait: float | None = None
    """The share of the worker's time spent waiting for a CPU; None if it does not report it."""
    prompt_tokens: float = 0.0
    """The tokens of recent steps that computed only prompts."""
    prompt_ns: float = 0.0
    """The summed durations of these steps."""
    prefill: float = 0.0
    """The share of the worker's time in prefill."""
    encode: float = 0.0
    """The part of `prefill` in steps that encoded images."""


@dataclass(frozen=True, slots=True)
class SeenDemand:
    """The demand for a model, from gateways and finished requests."""

    waiting: ModelBacklog
    tokens_per_s: float
    """Arriving prompt tokens, including those of refused requests."""
    tokens_error: float
    """Standard error of `tokens_per_s`, in the same unit."""
    cache_hit: float
    ttft_limit_ns: int
    tpot_ns: int
    mean_prompt_tokens: float = 0.0
    """The mean prompt length of recent requests, cached parts included; 0 if there were none."""
    mean_output_tokens: float = 0.0
    """The mean length of recent answers; 0 if there were none."""
    prompt_spread: float = 1.0
    """The mean prompt length by tokens over that by requests."""
    images_per_token: float | None = None
    """The images per prompt token that arrives; None if gateways do not count them."""


def engine_of(batches: Sequence[StepBatch]) -> WorkerProfile | str:
    """Return the usual profile of a model's workers with the room of the smallest, or a text that names the missing
    data.
    """
    chunks = [each.chunk_tokens for each in batches if each.chunk_tokens]
    places = [each.max_sequences for each in batches if each.max_sequences]
    if not chunks or not places:
        return "no worker has said how many tokens and sequences a step takes"
    chunk = min(*chunks, MAX_BUDGET_TOKENS)
    reported = [fitted_model(each.step_time) for each in batches[:MAX_REPORTED_MODELS] if each.HasField("step_time")]
    model = usual_model([each for each in reported if each is not None], chunk)
    if model is None:
        return "no worker has said how long its steps take"
    kv_tokens = min((each.kv_blocks * each.block_size_tokens for each in batches), default=0)
    kv_token_ns = usual_link_ns(link_token_ns(each.step_time) for each in batches)
    return WorkerProfile(model, chunk, min(places), kv_tokens, kv_token_ns)


def observe(
    model: str, engine: WorkerProfile | str, workers: Sequence[ObservedStatus], silent: int, demand: SeenDemand | None
) -> ModelState | UnknownState:
    """Compute one model's state.

    `silent` is the number of workers that should report but do not. `demand` is None while no gateway reports.
    """
    at_rest = _at_rest(workers, demand)
    if isinstance(engine, str):
        return UnknownState(model, engine, at_rest)
    reporting = len(workers)
    if reporting < (reporting + silent) * REPORTING_SHARE or not reporting:
        return UnknownState(model, f"{reporting} of {reporting + silent} workers of {model} report", at_rest)
    if demand is None:
        return UnknownState(model, "no gateway says what waits there", at_rest)
    return _state(model, engine, workers, demand, at_rest)


def _state(
    model: str, engine: WorkerProfile, workers: Sequence[ObservedStatus], demand: SeenDemand, at_rest: bool
) -> ModelState:
    states = [_worker(each) for each in workers]
    waiting, fresh = demand.waiting, 1 - demand.cache_hit
    people_tokens = max(waiting.prompt_tokens - waiting.batch_tokens, 0) * fresh
    people_tokens += sum(each.prompt_tokens for each in states)
    # Waiting prompts predict arrivals better than finished requests do. A computed token attends to cached ones too.
    mean_tokens = waiting.mean_prompt_tokens or demand.mean_prompt_tokens
    alone = engine.speed_at(mean_tokens * demand.prompt_spread * (1 + demand.cache_hit))
    encode = _encode_work(workers, demand, alone)
    speed = 1 / (1 / alone + encode.token_ns)
    waiting_ns = people_tokens / alone + encode.waiting_ns
    needed, horizon_ns = workers_needed(
        Prompts(
            # Late prompts press like all others: their clients still wait, and a backlog of more than the target's
            # worth of work delays later prompts.
            waiting=((float(demand.ttft_limit_ns), waiting_ns),),
            rate=demand.tokens_per_s * fresh / (speed * 1e9),
            limit_ns=float(demand.ttft_limit_ns),
        )
    )
    decode = [each for each in states if each.role is Role.MIXED]
    bound = sum(each.sequences for each in decode)
    people_bound = max(bound - waiting.batch_bound, 0)
    held = max(waiting.decode_requests - min(waiting.batch_requests, waiting.decode_requests), 0)
    held_tokens = waiting.decode_prompt_tokens * fresh * held / max(waiting.decode_requests, 1)
    at_decode = [each.batch.load.running for each in workers if each.batch.assignment.role == ROLE_MIXED]
    running = min(sum(at_decode), people_bound)
    kv_tokens = sum(each.kv_tokens for each in decode)
    alike = kv_tokens / bound if bound else 0.0
    work = Workload(
        prompts=needed,
        decodes=people_bound,
        kv_tokens=round(kv_tokens * people_bound / bound) if bound else 0,
        tpot_ns=demand.tpot_ns,
        waiting_ns=waiting_ns,
        held=held,
        held_kv_tokens=round(held * alike) or waiting.decode_prompt_tokens,
        held_prompts=held_tokens / speed / max(demand.ttft_limit_ns, 1),
    )
    standing, whole = role_counts(states), role_counts([replace(each, slowness=None) for each in states])
    unhindered = _unhindered(work, decode, people_bound / bound if bound else 0.0)
    found = pressures(engine, work, standing)
    to_come = max(1 - demand.ttft_limit_ns / horizon_ns, 0.0)
    return ModelState(
        model=model,
        engine=engine,
        work=work,
        standing=whole,
        workers=states,
        pressures=found,
        healthy=pressures(engine, unhindered, whole),
        horizon_ns=horizon_ns,
        waiting_tokens=round(people_tokens),
        ttft_ns=demand.ttft_limit_ns,
        running=running,
        held=found.sequences - running,
        queued=people_bound + held - found.sequences,
        at_rest=at_rest,
        prompts_error=demand.tokens_error * fresh / (speed * 1e9) * to_come / needed if needed else 0.0,
        arrival_rate=demand.tokens_per_s * fresh / (speed * 1e9),
        arrival_error=demand.tokens_error / demand.tokens_per_s if demand.tokens_per_s else 0.0,
        prompt_tokens=demand.mean_prompt_tokens * fresh,
        output_tokens=demand.mean_output_tokens,
        prompt_speed=speed,
        prompt_yield=_prompt_yield(workers, alone),
        encode_share=encode.share,
        prompt_encode_ns=demand.mean_prompt_tokens * fresh * encode.token_ns,
    )


@dataclass(frozen=True, slots=True)
class _EncodeWork:
    share: float
    """The share of encoding images in the prefill time of prefill workers."""
    token_ns: float
    """The time of one worker to encode the images that arrive with a prompt token, on average."""
    waiting_ns: float
    """The time that one worker needs to encode the images of waiting interactive prompts."""


def _encode_work(workers: Sequence[ObservedStatus], demand: SeenDemand, speed: float) -> _EncodeWork:
    share, waiting, fresh = _encode_share(workers), demand.waiting, 1 - demand.cache_hit
    loads = [each.batch.load for each in workers]
    at_workers = sum(each.waiting_prefill_tokens for each in loads)
    people_tokens = max(waiting.prompt_tokens - waiting.batch_tokens, 0) * fresh
    if demand.images_per_token is None:
        # An older gateway does not count images, so arriving prompts are assumed to have as many as those of the last
        # seconds.
        token_ns = (1 / prompts_part(share) - 1) / speed
        return _EncodeWork(share, token_ns, (people_tokens + at_workers) * token_ns)
    each_ns = image_ns((each.images_used, each.image_encode_ns) for each in loads)
    waiting_ns = people_tokens * waiting.images_per_token * each_ns + sum(each.waiting_encode_ns for each in loads)
    return _EncodeWork(share, demand.images_per_token * each_ns, waiting_ns)


def _encode_share(workers: Sequence[ObservedStatus]) -> float:
    """Return the share of encoding images in the prefill time of prefill workers, or of all workers if there are
    none.
    """
    prefilling = [each for each in workers if each.batch.assignment.role == ROLE_PREFILL] or workers
    prefill = sum(each.prefill for each in prefilling)
    return sum(each.encode for each in prefilling) / prefill if prefill else 0.0


def _prompt_yield(workers: Sequence[ObservedStatus], speed: float) -> float:
    prefilling = [each for each in workers if each.batch.assignment.role == ROLE_PREFILL]
    took_ns = sum(each.prompt_ns / max(each.slowness or 1.0, 1.0) for each in prefilling)
    return prompt_yield(sum(each.prompt_tokens for each in prefilling), took_ns, speed)


def _unhindered(work: Workload, decode: Sequence[WorkerState], people: float) -> Workload:
    """Return the work as it would be without slow workers and slow links, which hold sequences back."""
    free = sum(max(each.sequences - each.held_by_link, 0.0) * each.speed for each in decode)
    alike = work.kv_tokens / work.decodes if work.decodes else 0.0
    count = min(round(free * people), work.decodes)
    return replace(work, decodes=count, kv_tokens=round(count * alike))


def _worker(observed: ObservedStatus) -> WorkerState:
    batch, load = observed.batch, observed.batch.load
    mixed = batch.assignment.role == ROLE_MIXED
    queued = 0 if load.waiting_prefill_tokens else load.waiting  # otherwise the sequences are prompts
    held_blocks = max(batch.kv_blocks - load.free_kv_blocks, 0)
    return WorkerState(
        id=batch.worker_id,
        role=Role.MIXED if mixed else Role.PREFILL,
        budget_tokens=batch.assignment.budget_tokens,
        sequences=load.running + queued + load.awaiting_kv if mixed else 0,
        kv_tokens=held_blocks * batch.block_size_tokens,
        prompt_tokens=load.waiting_prefill_tokens,
        slowness=observed.slowness,
        kv_wait=observed.kv_wait,
        kv_awaited=observed.kv_awaited,
        held_by_link=observed.held_by_link,
        kv_awaited_s=observed.kv_awaited_s,
        cpu_wait=observed.cpu_wait,
    )


def _at_rest(workers: Iterable[ObservedStatus], demand: SeenDemand | None) -> bool:
    if demand is None or any(demand.waiting) or demand.tokens_per_s:
        return False
    loads = [each.batch.load for each in workers]
    return not any(load.running or load.waiting or load.awaiting_kv for load in loads)


TAKES_WORK: Final[Mapping[int, bool]] = {ROLE_PREFILL: True, ROLE_MIXED: True}
"""The roles whose workers count; standby does not."""
