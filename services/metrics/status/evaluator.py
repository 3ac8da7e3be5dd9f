"""Periodic evaluation of the pressure on all models and of the pace of workers."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.bus.port import Record
from libs.contracts.classes import BATCH_CLASS
from libs.contracts.pb.fulcrum.demand.v1.demand_pb2 import DemandTotals
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Decision
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import GatewayQueues, RequestEvent, StepBatch
from libs.contracts.roles import role_name
from libs.perfmodel.learner import expected_ns
from libs.policy.alerts.watch import every_ns
from libs.policy.pressure import WorkerProfile
from libs.policy.step_time import StepTimeModel
from libs.policy.verdict.assessment import Assessment, assessment_of
from libs.policy.verdict.causes import Cause
from libs.policy.verdict.late import LATE_NS, FirstTokens, late_causes
from libs.policy.verdict.promises import PromiseOutcome
from libs.policy.verdict.refused import refused_causes
from libs.policy.verdict.state import ModelState, PromisedFigure, SilentWorker, UnknownState, VerdictLimits
from libs.policy.verdict.watch import Verdict, VerdictWatch
from libs.telemetry.assessments import MAX_ASSESSED
from libs.telemetry.gateways import SPAN_NS, ArrivalRates, AwaitedTokens, FleetRefusals, ModelBacklog
from libs.telemetry.lives import LifeSigns, LifeState, LifeWatch, WorkerLife, newest_of
from libs.telemetry.refusals import WINDOW_NS as REFUSED_NS
from libs.telemetry.refusals import RefusalLog
from libs.telemetry.rollups import COVERED, DECODE, KV_WAIT, PREFILL
from libs.telemetry.steps import FinishedSteps, RanStep, StepCounts
from services.metrics.state import MetricsState
from services.metrics.status.observe import TAKES_WORK, ObservedStatus, SeenDemand, engine_of, observe
from services.metrics.status.observed import ObservedView, TrafficSource
from services.metrics.status.traffic import PlannerNews, TrafficLog

WINDOW_NS: Final = 2_000_000_000
"""The window over which shares of time and the pace of steps are measured."""
LOOK_BACK_NS: Final = 3 * WINDOW_NS
"""The time from which the newest steps count if a window holds fewer than `LEAST_STEPS`; a step may take 0.5 s."""
LEAST_STEPS: Final = 3
LEAST_NS: Final = 150_000_000
"""The minimum time in steps, in addition to `LEAST_STEPS`, for a measurement of a worker."""
LAST_STEPS: Final = 2
LAST_NS: Final = 400_000_000
"""The minimum total time of the last steps. If each of them took longer than usual, the worker has just become slow."""
_BATCH: Final = StepCounts._fields.index("decode_sequences")
_PROMPTS: Final = StepCounts._fields.index("prefill_tokens")


@dataclass(frozen=True, slots=True)
class StepPace:
    """The slowness of one worker's steps in a window."""

    slowness: float | None
    """Measured over expected duration; None if there are too few steps."""
    token_ns: float
    """Summed durations of steps that decode, each multiplied by its number of sequences."""
    tokens: float
    """Summed sequences of the steps that decode."""
    prompt_tokens: float = 0.0
    """Summed tokens of the steps that compute only prompts."""
    prompt_ns: float = 0.0
    """Summed durations of the steps that compute only prompts."""


NO_PACE: Final = StepPace(None, 0.0, 0.0)
LEAST_PEERS: Final = 3


def beside_peers(paces: Mapping[str, StepPace]) -> dict[str, float | None]:
    """Return each worker's slowness relative to the model's median worker.

    A cause that slows all workers alike thus affects none. The result is None for a worker that ran too little, and for
    all workers if fewer than `LEAST_PEERS` ran enough.
    """
    known = sorted(each.slowness for each in paces.values() if each.slowness is not None)
    if len(known) < LEAST_PEERS:
        return dict.fromkeys(paces)
    middle = max(known[(len(known) - 1) // 2], 1e-9)
    return {name: None if each.slowness is None else each.slowness / middle for name, each in paces.items()}


def pace(
    steps: FinishedSteps, usual: StepTimeModel, now_ns: int, returned_ns: int = 0, running: RanStep | None = None
) -> StepPace:
    """Measure the newest of the finished steps of `LOOK_BACK_NS` against the usual step-time model.

    Steps that began before `returned_ns`, the worker's return from an absence, do not count. A step that is `running`
    counts as one of the last once it takes longer than usual.
    """
    first = min(int(np.searchsorted(steps.ends_ns, now_ns - WINDOW_NS)), max(len(steps.ends_ns) - LEAST_STEPS, 0))
    # A stopped worker includes the pause in a step's time, but is not slow because of it.
    first = max(first, int(np.searchsorted(steps.starts_ns, returned_ns)))
    took_ns = (steps.ends_ns - steps.starts_ns)[first:].astype(np.float64)
    if not len(took_ns):
        return NO_PACE
    counts = steps.counts[:, first:]
    batch = counts[_BATCH]
    expected = expected_ns(usual, counts)
    total_ns, whole_ns = float(took_ns.sum()), float(expected.sum())
    enough = len(took_ns) >= LEAST_STEPS and total_ns >= LEAST_NS and whole_ns > 0
    late = [] if running is None or running.start_ns < returned_ns else _late(running, usual)
    lately = _lately(np.append(took_ns, late[:1]), np.append(expected, late[1:]))
    slowness = max(total_ns / whole_ns, lately) if enough else None
    prompts = np.where(batch == 0, counts[_PROMPTS], 0.0)
    prompt_ns = float(took_ns[prompts > 0].sum())
    return StepPace(slowness, float(took_ns @ batch), float(batch.sum()), float(prompts.sum()), prompt_ns)


def _late(running: RanStep, usual: StepTimeModel) -> list[float]:
    """Return the duration so far and the usual duration of a running step; empty until it exceeds the usual one."""
    counts = np.array(running.counts, np.float64)[:, None]
    ran_ns, usual_ns = float(running.end_ns - running.start_ns), float(expected_ns(usual, counts)[0])
    return [ran_ns, usual_ns] if counts.any() and ran_ns > usual_ns else []


def _lately(took_ns: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """Return the least slowness among the newest steps, so that one stall does not count; 0 if they are too short."""
    took, most = took_ns[-LAST_STEPS:], np.maximum(expected[-LAST_STEPS:], 1.0)
    return float((took / most).min()) if took.sum() >= LAST_NS else 0.0


ENGINE_EVERY_NS: Final = 1_000_000_000
"""The time for which a step-time model is reused, since it changes slowly."""
PACES_A_LOOK: Final = 100
"""Workers whose steps are measured again in one evaluation, the oldest measurements first: 10 ms."""
SMOOTHED_NS: Final = 800_000_000
"""Time constant of the running means of awaited KV."""
MOST_AGE_S: Final = 10.0
"""The bound on the age of awaited KV that enters the running mean."""
FRESH_NS: Final = 2_000_000_000
"""The age of a worker's last batch from which it no longer counts as live."""
Subject = ModelState | UnknownState


@dataclass(frozen=True, slots=True)
class PoolTime:
    """Shares of a phase's GPU time over the last two seconds; None if unknown."""

    workers: int = 0
    gpus: int = 0
    busy: float | None = None
    kv_wait: float | None = None
    starved: float | None = None
    encode: float | None = None
    """The part of `busy` in steps that encoded images."""


@dataclass(frozen=True, slots=True)
class WorkerStanding:
    id: str
    model: str
    role: str
    life: WorkerLife


@dataclass(frozen=True, slots=True)
class StatusLook:
    """The result of one evaluation over all models."""

    at_ns: int
    verdict: Verdict
    models: Sequence[Subject] = ()
    tpot_ms: tuple[tuple[str, float], ...] = ()
    """The time per output token measured over the window, by model."""
    pools: tuple[tuple[tuple[str, str], PoolTime], ...] = ()
    """The shares of time by model and phase."""
    tpot_target_ms: tuple[tuple[str, float], ...] = ()
    places: tuple[tuple[str, int], ...] = ()
    """The maximum number of sequences that decode workers run, by model."""
    workers: tuple[WorkerStanding, ...] = ()
    """Every known worker, in the order of ids."""


class VerdictEvaluator:
    """The verdict's evaluator, which collects records and evaluates them in `look`."""

    def __init__(
        self,
        state: MetricsState,
        limits: VerdictLimits,
        *,
        ttft_limit_ns: int,
        tpot_ns: int,
        lag_ns: int,
        observed: ObservedView | None = None,
    ) -> None:
        """Create an evaluator over windows that end `lag_ns` before now.

        `ttft_limit_ns` and `tpot_ns` apply where requests name no targets. `observed` are the servers observed instead
        of a suite.
        """
        self._state = state
        self._defaults = ttft_limit_ns, tpot_ns
        self._lag_ns = lag_ns
        self._watch = VerdictWatch(limits)
        self._lives = LifeWatch()
        self._arrivals = ArrivalRates()
        self.refusals = FleetRefusals()
        self.refused = RefusalLog()
        self._engines: dict[str, tuple[int, WorkerProfile | str]] = {}
        self._paces: dict[str, tuple[int, StepPace]] = {}
        self._awaited: dict[str, tuple[float, float, float]] = {}
        """The running means of `_awaits`, by worker."""
        self._first_tokens = FirstTokens()
        self._looked_ns = 0
        self._since_ns = 0
        """The time between the last two evaluations in ns."""
        self.observed = observed
        self.traffic: TrafficSource = TrafficLog() if observed is None else observed.traffic
        self.planner = PlannerNews()
        self.seen: StatusLook | None = None

    def take(self, record: Record, now_ns: int) -> None:
        """Record the data that the verdict needs in addition to the state."""
        value = record.value
        if isinstance(value, StepBatch):
            return
        if isinstance(value, GatewayQueues):
            self._arrivals.take(value, now_ns)
            self.refused.take(value, now_ns)
        elif isinstance(value, DemandTotals):
            self.refusals.take(value)
        elif isinstance(value, RequestEvent):
            self.traffic.take(value, now_ns)
            if value.ttft_ns and value.service_class != BATCH_CLASS:
                tpot_ns = value.decode_ns / (value.output_tokens - 1) if value.output_tokens > 1 else 0.0
                self._watch.promises.answered(value.model, value.arrival_unix_ns, float(value.ttft_ns), tpot_ns)
        elif isinstance(value, Decision):
            self.planner.take(value, now_ns)

    def judged(self, now_ns: int) -> tuple[Sequence[Cause], frozenset[str]]:
        """Return the named causes and the models for which enough is known; nothing if the last result is old."""
        seen = self.seen
        if seen is None or now_ns - seen.at_ns > FRESH_NS:
            return (), frozenset()
        known = frozenset(each.model for each in seen.models if isinstance(each, ModelState))
        if self.planner.status(now_ns).acts:  # such moves need no operator
            return [replace(each, action=None) for each in seen.verdict.causes], known
        return seen.verdict.causes, known

    @property
    def promises(self) -> Mapping[PromisedFigure, Sequence[PromiseOutcome]]:
        """Return, by figure, the outcomes of the latest advised commands that were followed, oldest first."""
        return self._watch.promises.outcomes

    def assessments(self, now_ns: int) -> list[Assessment]:
        """Return the assessments of models about which enough is known; nothing if the last result is old."""
        if self.seen is None or now_ns - self.seen.at_ns > FRESH_NS:
            return []
        known = [each for each in self.seen.models if isinstance(each, ModelState)]
        return [assessment_of(each, self.seen.verdict.causes) for each in known[:MAX_ASSESSED]]

    async def look(self, now_ns: int) -> None:
        """Evaluate if an evaluation is due, yielding to the event loop in between."""
        newest = self._newest()
        every = max(every_ns(len(newest)), 0 if self.observed is None else self.observed.look_every_ns)
        if now_ns // every == self._looked_ns // every:
            return
        offsets_ns = self._state.fleet.clocks.offsets_ns(now_ns)
        signs = {each.worker_id: _signs(each, offsets_ns) for each in newest}
        self._lives.look(signs, newest_of(signs.values()), now_ns)
        batches = [each for each in newest if self._takes_work(each, now_ns)]
        self._since_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        by_model: dict[str, list[StepBatch]] = {}
        for each in batches:
            by_model.setdefault(each.assignment.model, []).append(each)
        for each in batches:
            self.planner.knows_role(each.worker_id, role_name(each.assignment))
        engines = {model: self._engine(model, own, now_ns) for model, own in by_model.items()}
        await asyncio.sleep(0)
        self._look_at_paces(by_model, engines, now_ns)
        await asyncio.sleep(0)
        seen = [WorkerStanding(each.worker_id, each.assignment.model, role_name(each.assignment),
                           self._lives.known[each.worker_id]) for each in newest]  # fmt: skip
        self.seen = replace(self._seen(by_model, engines, now_ns), workers=tuple(seen))

    def _newest(self) -> list[StepBatch]:
        """Return the newest batch of each worker by id, without workers that other instances read."""
        timelines = self._state.fleet.directory.timelines
        return [each.newest for _, each in sorted(timelines.items()) if each.newest is not None]

    def _takes_work(self, batch: StepBatch, now_ns: int) -> bool:
        recent = batch.covered_to_unix_ns > now_ns - 60 * WINDOW_NS
        gone = self._lives.known[batch.worker_id].state is LifeState.GONE
        return batch.assignment.role in TAKES_WORK and recent and not gone

    def _engine(self, model: str, batches: Sequence[StepBatch], now_ns: int) -> WorkerProfile | str:
        made_ns, engine = self._engines.get(model, (0, ""))
        if now_ns - made_ns >= ENGINE_EVERY_NS:
            engine = engine_of(batches)
            self._engines[model] = now_ns, engine
        return engine

    def _look_at_paces(
        self, by_model: dict[str, list[StepBatch]], engines: dict[str, WorkerProfile | str], now_ns: int
    ) -> None:
        """Measure the pace of the workers whose measurement is oldest."""
        ids = {each.worker_id: model for model, own in by_model.items() for each in own}
        self._paces = {name: found for name, found in self._paces.items() if name in ids}
        offsets_ns = self._state.fleet.clocks.offsets_ns(now_ns)
        oldest = sorted(ids, key=lambda name: self._paces.get(name, (0, NO_PACE))[0])[:PACES_A_LOOK]
        for name in oldest:
            engine, timeline = engines[ids[name]], self._state.fleet.timeline(name)
            if timeline is not None and timeline.newest is not None and isinstance(engine, WorkerProfile):
                steps = timeline.finished(now_ns - LOOK_BACK_NS, now_ns)
                # The times of steps come from the clock of the worker's node.
                returned_ns = self._lives.returned_ns(name) + offsets_ns.get(timeline.newest.node, 0)
                found = pace(steps, engine.step_time, now_ns, returned_ns, timeline.unfinished())
                self._paces[name] = now_ns, found

    def _seen(
        self, by_model: dict[str, list[StepBatch]], engines: dict[str, WorkerProfile | str], now_ns: int
    ) -> StatusLook:
        state = self._state
        waiting = state.gateways.waiting(now_ns)
        shares = self._shares([each.worker_id for own in by_model.values() for each in own], now_ns)
        self._awaited = {each.worker_id: self._awaits(each) for own in by_model.values() for each in own}
        models: list[Subject] = []
        for model, own in sorted(by_model.items()):
            fresh = [each for each in own if each.covered_to_unix_ns > now_ns - FRESH_NS]
            paces = {each.worker_id: self._paces.get(each.worker_id, (0, NO_PACE))[1] for each in fresh}
            slowness = beside_peers(paces)
            observed = [
                self._observed(each, shares, slowness[each.worker_id], paces[each.worker_id], now_ns) for each in fresh
            ]
            demand = None if waiting is None else self._demand(model, waiting.get(model, ModelBacklog()), now_ns)
            found = observe(model, engines[model], observed, len(own) - len(fresh), demand)
            models.append(replace(found, silent=self._silent(own, now_ns), by_role=_by_role(own)))
        if self.observed is not None:
            models = _of_others(models, self.observed)
        if state.sharing is not None and state.fleet.directory.relayed:
            why = "other instances read some of its workers"
            models = [UnknownState(each.model, why, each.at_rest) for each in models]
        serving = {model: [e for e in own if self._lives.serves(e.worker_id)] for model, own in by_model.items()}
        phases = {model: _by_phase(own) for model, own in serving.items()}
        others = [*self._refused(now_ns), *self._late(models, now_ns)]
        return StatusLook(
            at_ns=now_ns,
            verdict=self._watch.look(models, now_ns, others, acts=self.planner.status(now_ns).acts),
            models=models,
            tpot_ms=tuple(
                (model, tpot)
                for model, own in by_model.items()
                if (tpot := self._tpot_ms(model, own, now_ns)) is not None
            ),
            pools=tuple(((model, p), _pool(own, shares)) for model, each in phases.items() for p, own in each.items()),
            tpot_target_ms=tuple((model, self._targets(model, now_ns)[1] / 1e6) for model in by_model),
            places=tuple((model, sum(e.max_sequences for e in each["decode"])) for model, each in phases.items()),
        )

    def _refused(self, now_ns: int) -> Iterator[Cause]:
        found = self.refused.recent(now_ns, REFUSED_NS)
        lasting = bool(self.refused.recent(now_ns).refused)
        return refused_causes(found.requests, found.refused, found.span_ns / 1e9, lasting=lasting)

    def _late(self, models: Sequence[Subject], now_ns: int) -> Iterator[Cause]:
        awaited, reported = self._state.gateways.awaited(now_ns), self._state.gateways.waiting(now_ns) is not None
        for each in models:
            if isinstance(each, ModelState):
                span = each.model, now_ns, LATE_NS
                first, own = self.traffic.late(*span), awaited.get(each.model, AwaitedTokens())
                if reported:  # otherwise overdue ones would count as answered late
                    counts = {"waiting": own.requests, "overdue": own.overdue, "ended": self.traffic.ended(*span)}
                    first = self._first_tokens.look(each.model, first, **counts, now_ns=now_ns)
                yield from late_causes(each, first, self.traffic.slow(*span))

    def _silent(self, batches: Sequence[StepBatch], now_ns: int) -> list[SilentWorker]:
        silent = []
        for each in batches:
            life = self._lives.known[each.worker_id]
            if life.state is LifeState.SILENT:
                silent_s = max(now_ns - life.since_ns, 0) / 1e9
                silent.append(SilentWorker(each.worker_id, role_name(each.assignment), silent_s))
        return silent

    def _tpot_ms(self, model: str, batches: Sequence[StepBatch], now_ns: int) -> float | None:
        if self.observed is not None:
            return self.observed.traffic.tpot_ms(model, now_ns)
        paces = [self._paces[each.worker_id][1] for each in batches if each.worker_id in self._paces]
        tokens = sum(each.tokens for each in paces)
        return sum(each.token_ns for each in paces) / tokens / 1e6 if tokens else None

    def _observed(
        self, batch: StepBatch, shares: "dict[str, _Shares]", slowness: float | None, pace: StepPace, now_ns: int
    ) -> ObservedStatus:
        share, awaited = shares.get(batch.worker_id, _Shares()), self._awaited[batch.worker_id]
        cpu_wait = self._state.fleet.cpu_waits.share(batch.worker_id, now_ns)
        measured = pace.prompt_tokens, pace.prompt_ns, share.prefill, share.encode
        return ObservedStatus(batch, slowness, share.kv_wait, *awaited, cpu_wait, *measured)

    def _awaits(self, batch: StepBatch) -> tuple[float, float, float]:
        """Return running means: the share of moments with ready KV in transit, the sequences that await it, its age in
        s.
        """
        count, since_ns = batch.load.awaiting_ready_kv, batch.load.ready_kv_since_unix_ns
        age_s = max(batch.covered_to_unix_ns - since_ns, 0) / 1e9 if since_ns else 0.0
        share, sequences, age = self._awaited.get(batch.worker_id, (0.0, 0.0, 0.0))
        weight = 1 - exp(-self._since_ns / SMOOTHED_NS)
        return (
            share + weight * (bool(count) - share),
            sequences + weight * (count - sequences),
            age + weight * (min(age_s, MOST_AGE_S) - age),
        )

    def _targets(self, model: str, now_ns: int) -> tuple[int, int]:
        """Return the TTFT limit and the TPOT target. A target that operators set at the planner precedes those of
        requests.
        """
        limit_ns, tpot_ns = self.traffic.targets_ns(model)
        tpot_ns = self.planner.tpot_ns(model, now_ns) or tpot_ns
        return limit_ns or self._defaults[0], tpot_ns or self._defaults[1]

    def _demand(self, model: str, waiting: ModelBacklog, now_ns: int) -> SeenDemand:
        limit_ns, tpot_ns = self._targets(model, now_ns)
        # Prompts refused at a full queue are assumed to be as long as the waiting ones.
        like_waiting = self.refusals.per_s(model, now_ns) * waiting.mean_prompt_tokens
        refused = max(self.traffic.refused_tokens_per_s(model, now_ns, SPAN_NS), like_waiting)
        rate = self._arrivals.rate(model, now_ns)
        mean_prompt_tokens, prompt_spread = self.traffic.prompt_lengths(model, now_ns)
        return SeenDemand(
            waiting=waiting,
            tokens_per_s=rate.tokens_per_s + refused,
            tokens_error=rate.error,
            cache_hit=self.traffic.cache_hit(model, now_ns),
            ttft_limit_ns=limit_ns,
            tpot_ns=tpot_ns,
            mean_prompt_tokens=mean_prompt_tokens,
            mean_output_tokens=self.traffic.mean_output_tokens(model, now_ns),
            prompt_spread=prompt_spread,
            images_per_token=self._arrivals.images_per_token(model, now_ns),
        )

    def _shares(self, worker_ids: Sequence[str], now_ns: int) -> "dict[str, _Shares]":
        rollups, fleet = self._state.rollups, self._state.fleet
        known = [name for name in worker_ids if rollups.knows(name)]
        end_ns = now_ns - self._lag_ns
        series = rollups.read(rollups.tiers[0].window_ns, end_ns - WINDOW_NS, end_ns, known)
        found = {}
        encodes = [0] * len(known) if series.encode_ns is None else series.encode_ns.sum(axis=0).tolist()
        for name, row, encode_ns in zip(known, series.times_ns.sum(axis=0).tolist(), encodes, strict=True):
            if covered := row[COVERED]:
                starved = fleet.starved_ns(name, end_ns - WINDOW_NS, end_ns) / WINDOW_NS
                encode, prefill = min(encode_ns, row[PREFILL]) / covered, row[PREFILL] / covered
                found[name] = _Shares(prefill + row[DECODE] / covered, row[KV_WAIT] / covered, starved, encode, prefill)
        return found


def _of_others(models: Sequence[Subject], observed: ObservedView) -> list[Subject]:
    """Describe the models as served by servers whose own router sets their roles."""
    differ = observed.roles_differ([each.model for each in models])
    return [
        replace(each, foreign=True, roles_fixed=each.model not in differ, pod_label=observed.pod_label)
        if isinstance(each, ModelState)
        else each
        for each in models
    ]


@dataclass(frozen=True, slots=True)
class _Shares:
    busy: float = 0.0
    kv_wait: float = 0.0
    starved: float = 0.0
    encode: float = 0.0
    prefill: float = 0.0


def _signs(batch: StepBatch, offsets_ns: Mapping[str, int]) -> LifeSigns:
    reported_ns = batch.covered_to_unix_ns - offsets_ns.get(batch.node, 0)
    return LifeSigns(batch.incarnation, reported_ns, left=batch.last)


def _by_role(batches: Sequence[StepBatch]) -> dict[str, int]:
    return Counter(role_name(each.assignment) for each in batches)


def _by_phase(batches: Sequence[StepBatch]) -> dict[str, list[StepBatch]]:
    found: dict[str, list[StepBatch]] = {"prefill": [], "decode": []}
    for each in batches:
        found["prefill" if role_name(each.assignment) == "prefill" else "decode"].append(each)
    return found


def _pool(batches: Sequence[StepBatch], shares: dict[str, _Shares]) -> PoolTime:
    gpus = [max(each.gpus, 1) for each in batches]
    weighted = [(shares[each.worker_id], max(each.gpus, 1)) for each in batches if each.worker_id in shares]
    whole = sum(weight for _, weight in weighted)
    if not whole:
        return PoolTime(len(batches), sum(gpus))
    each_of = np.array([[each.busy, each.kv_wait, each.starved, each.encode] for each, _ in weighted])
    mean = each_of.T @ [weight for _, weight in weighted]
    return PoolTime(len(batches), sum(gpus), *(mean / whole).tolist())
