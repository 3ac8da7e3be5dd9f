"""Advice on changes that the planner may not make itself, given once a change has been needed for some time. Pure."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_RECOMMEND, Decision
from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import Advice as AdviceMessage
from libs.policy.planner.advice import Advice, AdviceKind, advise, advise_links, mean_of, settled
from libs.policy.planner.limits import ModelLimits
from libs.policy.planner.scaling import workers_needed
from libs.policy.pressure import Split, Workload
from services.planner.role_planner import ModelPlan

# The time for which advice must have applied before it is published.
STOOD_NS: Final = 5_000_000_000
# The time between the moment at which advice is followed and the measurement of its effect.
CAME_NS: Final = 10_000_000_000
# Advice that no longer applies expires after this time, or after `STOOD_NS` if the model has no work.
EXPIRES_NS: Final = 60_000_000_000
# The number of a model's observations that are averaged for a prediction and for its measurement.
LOOKS: Final = 5
MAX_OPEN: Final = 256


@dataclass(slots=True)
class _OpenAdvice:
    advice: Advice
    since_ns: int
    held_ns: int
    pressure: float
    chunk_speed: float
    workers: int
    gb_per_s: float
    applied_ns: int = 0
    decision: Decision | None = None


class Advisor:
    """The open advice, by model and kind."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, AdviceKind], _OpenAdvice] = {}
        self._looks: dict[str, deque[tuple[Workload, Split]]] = {}

    def look(self, plan: ModelPlan, limits: ModelLimits, now_ns: int) -> Iterator[tuple[Decision, bool]]:
        """Yield the decisions to publish about one model, and whether each is new.

        A decision that is not new has an outcome.
        """
        engine, assigned, model = plan.observed.engine, plan.assigned, plan.observed.model
        if engine is None or assigned is None:
            return
        workers, judged = assigned.now.prefill + assigned.now.mixed, plan.assessment
        if judged is None:
            work, now = self._mean(model, plan.observed.work, assigned.now)
            needed = workers_needed(engine, settled(work), workers, limits)
        else:
            # An assessment already counts waiting prompts among its prompts.
            work, now = self._mean(model, replace(judged.work, waiting_ns=0.0), judged.standing)
            needed = workers + judged.missing_workers
        works = work.prompts or work.decodes or work.held
        advised = advise(model, engine, work, now, limits, needed=needed) if works else []
        slow = advise_links(plan.observed.links)
        slowest = min((each.gb_per_s for each in plan.observed.links), default=0.0)
        for each in (*advised, *((slow,) if slow is not None else ())):
            key = model, each.kind
            known = self._open.get(key)
            if known is None and len(self._open) < MAX_OPEN:
                speed = engine.chunk_speed * 1e9
                self._open[key] = _OpenAdvice(each, now_ns, now_ns, now.pressure, speed, workers, slowest)
            elif known is not None and not known.applied_ns:
                known.held_ns = now_ns
                if known.decision is None and now_ns - known.since_ns >= STOOD_NS:
                    known.advice, known.pressure = each, now.pressure
                    known.decision = _decision(model, each)
                    yield known.decision, True
        yield from self._follow(plan, now, workers, now_ns, EXPIRES_NS if works else STOOD_NS)

    def _mean(self, model: str, work: Workload, now: Split) -> tuple[Workload, Split]:
        """Return the mean of the latest observations, all with the present number of workers in each role."""
        looks = self._looks.setdefault(model, deque(maxlen=LOOKS))
        if looks and (looks[-1][1].prefill, looks[-1][1].mixed) != (now.prefill, now.mixed):
            looks.clear()
        looks.append((work, now))
        while len(self._looks) > MAX_OPEN:
            del self._looks[next(iter(self._looks))]
        return mean_of(looks)

    def _follow(
        self, plan: ModelPlan, now: Split, workers: int, now_ns: int, expires_ns: int
    ) -> Iterator[tuple[Decision, bool]]:
        engine, assigned, model = plan.observed.engine, plan.assigned, plan.observed.model
        slowest = min((each.gb_per_s for each in plan.observed.links), default=0.0)
        assert engine is not None and assigned is not None
        for key, known in [(key, each) for key, each in self._open.items() if key[0] == model]:
            taken = {
                AdviceKind.ADD_WORKERS: workers > known.workers,
                AdviceKind.CHUNK: engine.chunk_speed * 1e9 > known.chunk_speed * 1.01,
                AdviceKind.AGGREGATE: not assigned.now.prefill,
                AdviceKind.LINK: slowest >= known.gb_per_s + max(known.advice.low, 0.0),
            }[key[1]]
            if known.decision is None:
                if now_ns - known.held_ns > STOOD_NS:
                    del self._open[key]
            elif taken and not known.applied_ns:
                known.applied_ns = now_ns
            elif known.applied_ns and now_ns - known.applied_ns >= CAME_NS:
                came = {
                    AdviceKind.CHUNK: engine.chunk_speed * 1e9 - known.chunk_speed,
                    AdviceKind.LINK: slowest - known.gb_per_s,
                }.get(key[1], now.pressure - known.pressure)
                yield self._close(key, "applied", came), False
            elif not known.applied_ns and now_ns - known.held_ns > expires_ns:
                yield self._close(key, "expired", 0.0), False

    def _close(self, key: tuple[str, AdviceKind], outcome: str, came: float) -> Decision:
        decision = self._open.pop(key).decision
        assert decision is not None
        decision.advice.outcome, decision.advice.came = outcome, came
        return decision


def _decision(model: str, advice: Advice) -> Decision:
    return Decision(
        action=ACTION_RECOMMEND,
        model=model,
        reason_code=advice.kind.value,
        reason=advice.what,
        advice=AdviceMessage(
            kind=advice.kind.value, figure=advice.figure, low=advice.low, high=advice.high,
            confidence=advice.confidence, command=advice.command, outcome="open",
        ),
    )  # fmt: skip
