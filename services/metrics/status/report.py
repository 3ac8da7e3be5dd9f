"""The answer of `/v1/status`, built from one evaluation, and its route."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
from fastapi import APIRouter, Response

from libs.contracts.roles import NO_REASON, PLANNERS
from libs.policy.alerts.store import AlertStore
from libs.policy.roles import Role
from libs.policy.verdict.advice import Action
from libs.policy.verdict.assessment import bounded
from libs.policy.verdict.causes import Cause, CauseCode
from libs.policy.verdict.state import ModelState
from libs.policy.verdict.watch import Verdict
from libs.runtime.clock import Clock
from libs.telemetry.estimates import bounds_of
from services.metrics.accounting.answer import EstimatedPrefill
from services.metrics.state import MS_NS, MetricsState
from services.metrics.status.evaluator import PoolTime, StatusLook, VerdictEvaluator
from services.metrics.status.observed import ObservedFleetStatus, ObservedView
from services.metrics.status.score import FigureScore, Outcomes, PromiseScore, figure_scores, promise_score
from services.metrics.status.traffic import LastMove, PlannerStatus, Traffic, with_refusals

BEHIND_MS = 2_000
"""The age from which figures no longer count as current."""
ESTIMATED_NS = 2_000_000_000
MOVED_MS = 30_000
"""The time for which a move by the planner is shown with the verdict."""


@dataclass(frozen=True, slots=True)
class ReportedAction:
    """A change of workers' roles that the verdict advises."""

    command: str
    workers: list[str]
    role: str
    budget_tokens: int
    pressure_then: float
    """Predicted pressure of the worse phase after the change."""
    pressure_least: float
    pressure_most: float
    """Bounds between which that pressure is predicted."""
    backlog_least_s: float | None
    """This and the next field bound the time until the waiting prompts are done; null if none wait or the backlog would
    remain.
    """
    backlog_most_s: float | None
    ttft_p95_least_ms: float | None
    """This and the next field bound the TTFT p95 of later requests; null if a queue would remain."""
    ttft_p95_most_ms: float | None
    tpot_p95_least_ms: float | None
    """This and the next field bound the TPOT p95 of the same requests; null without pressure from decodes."""
    tpot_p95_most_ms: float | None
    id: str
    """The identity of the advice, which persists while the same change is advised."""
    since_unix_ms: int
    replaces: str
    """The command previously advised for the same cause; empty for the first."""
    instruction: str = ""
    """The manual change at observed servers, for which there is no command."""


@dataclass(frozen=True, slots=True)
class ReportedCause:
    """A cause that holds a model's requests up."""

    code: str
    model: str
    sentence: str
    since_unix_ms: int
    action: ReportedAction | None
    workers: list[str]
    """The slow or silent workers, or the receivers of a slow link."""


@dataclass(frozen=True, slots=True)
class ReportedVerdict:
    """The first cause that holds requests up, or the absence of any."""

    code: str
    model: str
    sentence: str
    since_unix_ms: int
    action: ReportedAction | None
    """Null if there is nothing to do, or if a planner acts."""
    causes: list[ReportedCause]


@dataclass(frozen=True, slots=True)
class SplitOfRoles:
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class PrefillStatus:
    """Prefill's figures for one model; null where unknown."""

    pressure: float | None
    """The highest ratio over all horizons: GPU time for prompts due by then, divided by the time that prefill has until
    then.
    """
    workers: int
    gpus: int
    busy: float | None
    """The share of the last two seconds spent in steps."""
    encode: float | None
    """The part of `busy` in steps that encoded images."""
    starved: float | None
    kv_wait: float | None
    waiting_prompt_tokens: int | None
    waiting_requests: int | None
    waiting_s: float | None
    """The time that the workers need for the waiting prompts."""
    horizon_ms: float | None
    """The horizon at which the pressure is highest."""


@dataclass(frozen=True, slots=True)
class DecodeStatus:
    """Decode's figures for one model; null where unknown."""

    pressure: float | None
    """The greater of `batch_pressure` and `kv_pressure` below."""
    batch_pressure: float | None
    """Sequences relative to the largest batches that meet TPOT."""
    kv_pressure: float | None
    """KV that the sequences need relative to the KV space."""
    bound: str | None
    """The name of the greater pressure: tpot or kv."""
    workers: int
    gpus: int
    busy: float | None
    encode: float | None
    """The part of `busy` in steps that encoded images, on workers that compute prompts too."""
    starved: float | None
    """The share of the last two seconds, a part of idle, in which all awaited KV was still to be computed."""
    kv_wait: float | None
    running: int | None
    held: int | None
    """The number of sequences that wait to decode."""
    slots: int
    """The maximum number of sequences that the workers run, by their settings."""
    largest_batch: int | None
    """Sequences within the TPOT target on all workers, at present context lengths."""
    kv_used: float | None
    kv_tokens: int | None
    kv_tokens_room: int | None
    context_tokens: int | None
    tpot_ms: float | None
    """TPOT as measured over the last two seconds."""
    tpot_target_ms: float | None


@dataclass(frozen=True, slots=True)
class MixedStatus:
    """Decode workers that also compute prompts; each counts once."""

    workers: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    model: str
    known: bool
    unknown_because: str | None
    verdict: str
    cluster_pressure: float | None
    """The least pressure that any split of the workers' roles would leave."""
    best_split: SplitOfRoles | None
    """The split of roles with that pressure."""
    prefill: PrefillStatus
    decode: DecodeStatus
    mixed: MixedStatus
    estimate: EstimatedPrefill | None = None
    """The estimated phases; null where the times are measured."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker and its state, which has the same names in the planner's `/v1/workers`."""

    id: str
    model: str
    role: str
    life: str
    """One of starting, running, silent, restarting, gone and back."""
    life_since_unix_ms: int
    estimate: EstimatedPrefill | None = None
    """The estimated phases; null where the times are measured."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    as_of_unix_ms: int
    age_ms: int | None
    """The age of the newest telemetry behind the status."""
    live: bool
    not_live_because: str | None
    verdict: ReportedVerdict
    planner: PlannerStatus
    models: list[ModelStatus]
    traffic: Traffic
    alerts_firing: int
    workers: list[WorkerStatus]
    """The workers whose telemetry this service reads, by id."""
    advice_kept: list[FigureScore]
    """The number of promises kept by followed commands, by figure; figures without any are left out."""
    estimate: EstimatedPrefill | None = None
    """The estimate over all workers whose times are estimated; null where all times are measured."""
    observed: ObservedFleetStatus | None = None
    """Observed servers, which replace a suite; null for a suite."""


def cluster_status(
    seen: StatusLook | None,
    planner: PlannerStatus,
    traffic: Traffic,
    *,
    now_ns: int,
    age_ms: int | None,
    not_live: str | None,
    waiting: dict[str, int],
    alerts_firing: int,
    outcomes: Outcomes = MappingProxyType({}),
) -> ClusterStatus:
    """Build the current status; `waiting` holds requests that wait for prefill, by model."""
    if seen is None:
        seen = StatusLook(now_ns, Verdict(CauseCode.UNKNOWN, "", "Not known yet: the service has just begun.", now_ns))
    behind = age_ms is not None and age_ms > BEHIND_MS
    if not_live is None and behind:
        not_live = f"telemetry is {(age_ms or 0) / 1000:.1f} s old"
    verdict = _verdict(seen.verdict, planner)
    if not_live is not None and verdict.code != CauseCode.IDLE and age_ms is not None:
        verdict = replace(verdict, code=CauseCode.UNKNOWN, sentence=f"Not known: {not_live}.", action=None)
    return ClusterStatus(
        as_of_unix_ms=now_ns // MS_NS,
        age_ms=age_ms,
        live=not_live is None,
        not_live_because=not_live,
        verdict=verdict,
        planner=planner,
        models=[_model(each.model, seen, waiting.get(each.model)) for each in seen.models],
        traffic=traffic,
        alerts_firing=alerts_firing,
        workers=[
            WorkerStatus(each.id, each.model, each.role, each.life.state, each.life.since_ns // MS_NS)
            for each in seen.workers
        ],
        advice_kept=figure_scores(outcomes),
    )


def _verdict(verdict: Verdict, planner: PlannerStatus) -> ReportedVerdict:
    causes = [_cause(each, planner) for each in verdict.causes]
    first = causes[0] if causes else None
    sentence = verdict.sentence
    if first is not None and planner.acts and (move := planner.last_move) is not None and move.age_ms <= MOVED_MS:
        sentence += f" {_moved(move, planner)}"
    return ReportedVerdict(
        code=verdict.code,
        model=verdict.model,
        sentence=sentence,
        since_unix_ms=verdict.since_ns // MS_NS,
        action=first.action if first is not None else None,
        causes=causes,
    )


def _moved(move: LastMove, planner: PlannerStatus) -> str:
    """Describe a move with its reason, since it may go against the present figures."""
    did = f"{move.actor} moved {move.worker} to {move.to_role}"
    ago = f"{did} {move.age_ms / 1000:.0f} s ago"
    why = move.reason.removeprefix(f"{did}: ")
    if why in ("", move.reason, NO_REASON):
        return f"{ago}."
    if move.actor != planner.leader and not move.actor.startswith(PLANNERS):
        return f"{ago} with the reason: {why}."
    # The predicted effect of the move belongs to another time than the figures beside it.
    why, *_ = why.split(";")
    return f"{ago}; its reason then: {why}."


def _cause(cause: Cause, planner: PlannerStatus) -> ReportedCause:
    # Moves of a planner that acts need no operator.
    action = None if planner.acts else _action(cause.action)
    since_ms = cause.since_ns // MS_NS
    return ReportedCause(cause.code, cause.model, cause.sentence, since_ms, action, list(cause.workers))


def _action(action: Action | None) -> ReportedAction | None:
    if action is None:
        return None
    least, most = action.pressure_range
    return ReportedAction(
        command=action.command,
        workers=list(action.workers),
        role=action.role,
        budget_tokens=action.budget_tokens,
        pressure_then=bounded(action.pressure_then),
        pressure_least=bounded(least),
        pressure_most=bounded(most),
        backlog_least_s=action.backlog_s.least if action.backlog_s else None,
        backlog_most_s=action.backlog_s.most if action.backlog_s else None,
        ttft_p95_least_ms=action.ttft_ms.least if action.ttft_ms else None,
        ttft_p95_most_ms=action.ttft_ms.most if action.ttft_ms else None,
        tpot_p95_least_ms=action.tpot_ms.least if action.tpot_ms else None,
        tpot_p95_most_ms=action.tpot_ms.most if action.tpot_ms else None,
        id=action.id,
        since_unix_ms=action.since_ns // MS_NS,
        replaces=action.replaces,
        instruction=action.instruction,
    )


def _model(model: str, seen: StatusLook, waiting_requests: int | None) -> ModelStatus:
    subject = next(each for each in seen.models if each.model == model)
    state = subject if isinstance(subject, ModelState) else None
    pools = dict(seen.pools)
    prefill, decode = pools.get((model, "prefill"), PoolTime()), pools.get((model, "decode"), PoolTime())
    own = [each for each in seen.verdict.causes if each.model in (model, "")]
    calm = CauseCode.UNKNOWN if state is None else CauseCode.IDLE if state.at_rest else CauseCode.BALANCED
    least = state.pressures.least if state else None
    return ModelStatus(
        model=model,
        known=state is not None,
        unknown_because=None if isinstance(subject, ModelState) else subject.why,
        verdict=own[0].code if own else calm,
        cluster_pressure=bounded(least.pressure) if least else None,
        best_split=SplitOfRoles(least.prefill, least.mixed) if least else None,
        prefill=_prefill(state, prefill, waiting_requests),
        decode=_decode(model, state, decode, seen),
        mixed=MixedStatus(round(state.standing.lending) if state else 0),
    )


def _prefill(state: ModelState | None, time: PoolTime, waiting_requests: int | None) -> PrefillStatus:
    waiting_s = None
    if state is not None:
        waiting_s = state.work.waiting_ns / 1e9 / max(state.standing.prefill, 1)
    return PrefillStatus(
        pressure=bounded(state.pressures.prefill) if state else None,
        workers=time.workers,
        gpus=time.gpus,
        busy=time.busy,
        encode=time.encode,
        starved=time.starved,
        kv_wait=time.kv_wait,
        waiting_prompt_tokens=state.waiting_tokens if state else None,
        waiting_requests=(waiting_requests or 0) + state.queued if state else None,
        waiting_s=waiting_s,
        horizon_ms=state.horizon_ns / MS_NS if state else None,
    )


def _decode(model: str, state: ModelState | None, time: PoolTime, seen: StatusLook) -> DecodeStatus:
    found = state.pressures if state else None
    decode = [each for each in state.workers if each.role is Role.MIXED] if state else []
    whole = state.engine.kv_tokens * len(decode) if state else 0
    return DecodeStatus(
        pressure=bounded(found.decode) if found else None,
        batch_pressure=bounded(found.batch) if found else None,
        kv_pressure=bounded(found.kv) if found else None,
        bound=("kv" if found.kv > found.batch else "tpot") if found else None,
        workers=time.workers,
        gpus=time.gpus,
        busy=time.busy,
        encode=time.encode,
        starved=time.starved,
        kv_wait=time.kv_wait,
        running=state.running if state else None,
        held=state.held if state else None,
        slots=dict(seen.places).get(model, 0),
        largest_batch=found.largest_batch if found else None,
        kv_used=sum(each.kv_tokens for each in decode) / whole if whole else None,
        kv_tokens=found.kv_tokens if found else None,
        kv_tokens_room=found.kv_room_tokens if found else None,
        context_tokens=found.kv_tokens // found.sequences if found and found.sequences else None,
        tpot_ms=dict(seen.tpot_ms).get(model),
        tpot_target_ms=dict(seen.tpot_target_ms).get(model),
    )


def firing_codes(causes: Sequence[Cause]) -> frozenset[tuple[str, str]]:
    """Return (model, code) of the causes that hold."""
    return frozenset((each.model, str(each.code)) for each in causes)


def status_now(state: MetricsState, verdicts: VerdictEvaluator, book: AlertStore, now_ns: int) -> ClusterStatus:
    """Build the status from the evaluator's last result, with its age and its estimated times."""
    status = measured_status(state, verdicts, book, now_ns)
    return status if verdicts.observed is None else _with_estimates(status, state, verdicts.observed, now_ns)


def measured_status(state: MetricsState, verdicts: VerdictEvaluator, book: AlertStore, now_ns: int) -> ClusterStatus:
    """Build the status without estimates, whose computation takes most of the time for many observed servers."""
    aged_ns, backlog = state.age_ns(now_ns), state.gateways.waiting(now_ns)
    awaited = [each for model in state.gateways.awaited(now_ns).values() for each in model.ages]
    waiting, traffic = backlog or {}, verdicts.traffic.traffic(now_ns, awaited)
    if backlog is not None:
        traffic = replace(
            traffic,
            batch_waiting=sum(each.batch_requests for each in backlog.values()),
            batch_at_workers=sum(each.batch_bound for each in backlog.values()),
        )
    traffic = with_refusals(traffic, verdicts.refused.recent(now_ns), verdicts.refusals.total_per_s(now_ns))
    return cluster_status(
        verdicts.seen,
        verdicts.planner.status(now_ns),
        traffic,
        now_ns=now_ns,
        age_ms=None if aged_ns is None else aged_ns // MS_NS,
        not_live=state.not_live(now_ns),
        waiting={model: max(each.prefill_requests, 0) for model, each in waiting.items()},
        alerts_firing=len(book.firing()),
        outcomes=verdicts.promises,
    )


def _with_estimates(status: ClusterStatus, state: MetricsState, observed: ObservedView, now_ns: int) -> ClusterStatus:
    """Add the estimates of times, and the servers about which nothing is known."""
    from_ns = now_ns - ESTIMATED_NS
    times = {each.id: state.fleet.estimates.times(each.id, from_ns, now_ns) for each in status.workers}

    def share_of(worker_ids: Iterable[str]) -> EstimatedPrefill | None:
        estimated = [each for each in worker_ids if each in state.fleet.estimates]
        return EstimatedPrefill(*bounds_of(times[each] for each in estimated)) if estimated else None

    workers = [replace(each, estimate=share_of([each.id])) for each in status.workers]
    models = [
        replace(each, estimate=share_of(worker.id for worker in workers if worker.model == each.model))
        for each in status.models
    ]
    verdict = status.verdict
    if status.age_ms is None and status.not_live_because is not None:  # otherwise the server would count as idle
        verdict = replace(verdict, code=CauseCode.UNKNOWN, sentence=f"Not known: {status.not_live_because}.")
    return replace(
        status,
        verdict=verdict,
        workers=workers,
        models=models,
        estimate=share_of(times),
        observed=observed.status(),
    )


def status_router(state: MetricsState, verdicts: VerdictEvaluator, book: AlertStore, clock: Clock) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/status", response_model=ClusterStatus)
    async def status() -> Response:
        """Return whether the cluster is balanced, with the causes of delays, the remedy and the figures behind them."""
        report = status_now(state, verdicts, book, clock.now_ns())
        return Response(msgspec.json.encode(report), media_type="application/json")

    @router.get("/v1/advice")
    async def advice() -> PromiseScore:
        """Return the promised and the measured effects of followed commands."""
        return promise_score(verdicts.promises)

    return router
