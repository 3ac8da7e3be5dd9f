"""The responses of the planner's routes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

from google.protobuf.message import Message

from libs.contracts.pb.fulcrum.planner.v1.planner_pb2 import ACTION_RECOMMEND, Decision, WorkerChange
from libs.contracts.roles import role_name
from libs.policy.roles import Role
from services.planner.kept import mode_word
from services.planner.messages import CODE_UNKNOWN, action_word, seen
from services.planner.role_planner import ModelPlan
from services.planner.state import PlannerState

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Answer = TypeVar("_Answer", bound="DataclassInstance")

# The names of pools. Mixed workers belong to the decode pool.
ROLE_WORDS: Final[Mapping[int, str]] = {Role.PREFILL: "prefill", Role.MIXED: "decode", Role.STANDBY: "standby"}


@dataclass(frozen=True, slots=True)
class PoolAnswer:
    """A model's workers in one role, as a decision saw them."""

    model: str
    role: str
    workers: int
    gpus: int
    busy: float | None
    running: int
    waiting: int
    waiting_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class AlternativeAnswer:
    """A split of a model's workers, with its name and the pressure that it would leave."""

    name: str
    score: float


@dataclass(frozen=True, slots=True)
class ChangeAnswer:
    """A worker's assignment after a change. The epoch is 0 if the change was only recommended."""

    worker: str
    role: str
    budget_tokens: int
    epoch: int
    before: str = ""
    """The worker's role when the change was decided; empty if the change was only recommended."""
    before_budget_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CandidateAnswer:
    """A split of a model's workers and its predicted effect if demand stays as it is.

    Pressure is work over capacity: above 1, a queue grows. `served` is the share of the work that would be done in
    time.
    """

    prefill: int
    decode: int
    prompt_pressure: float
    decode_pressure: float
    ttft_ms: float
    tpot_ms: float
    served: float


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """A model's workers and the pressure on them. `waiting_ms` is the time one worker would take for the waiting
    prompts.
    """

    prefill: int
    decode: int
    prompt_pressure: float
    decode_pressure: float
    waiting_ms: float
    decodes: int


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """The state before a decision and `after_ms` after it. Other things changed meanwhile, so it proves no cause."""

    before: SeenAnswer
    after: SeenAnswer
    after_ms: int


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """A replayed split of roles; figures are means over the replayed time."""

    prefill: int
    decode: int
    ttft_ms: float
    tpot_ms: float
    served: float


@dataclass(frozen=True, slots=True)
class CounterfactualAnswer:
    """The demand in the `over_ms` after a decision, replayed without and with it by a closed form, not by
    simulation.
    """

    method: str
    over_ms: int
    without: ReplayedAnswer
    with_it: ReplayedAnswer


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """Worker counts of a model: those in a role, on standby and wanted, and those that an actuator should run."""

    serving: int
    standby: int
    wished: int
    started_from: int
    started_to: int
    actuator: str


@dataclass(frozen=True, slots=True)
class AdviceAnswer:
    """Advice to an operator. `figure` is expected to change by an amount between `low` and `high`; `came` is the change
    measured after the advice was applied. `outcome` is open, applied or expired.
    """

    kind: str
    figure: str
    low: float
    high: float
    confidence: float
    command: str
    outcome: str
    came: float


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """A decision with its inputs and its reason.

    Actions set_role and set_budget list the changes requested from workers in mode auto; recommend lists what they
    would have been. `predicted` is the chosen candidate. Action role_moved reports an observed move, whoever made
    it. set_mode and set_limits report a change of settings. `worker`, `role` and `epoch` describe the first worker,
    and are empty and 0 if the action concerns none.
    """

    id: str
    time: str
    """The time of the decision in ISO 8601, UTC."""
    planner_id: str
    sequence: int
    decided_unix_ns: int
    mode: str
    action: str
    reason_code: str
    reason: str
    actor: str
    model: str
    workers: list[str]
    changes: list[ChangeAnswer]
    worker: str
    role: str
    epoch: int
    window_ms: int
    coverage: float
    pools: list[PoolAnswer]
    alternatives: list[AlternativeAnswer]
    candidates: list[CandidateAnswer]
    predicted: CandidateAnswer | None
    measured: MeasuredAnswer | None
    counterfactual: CounterfactualAnswer | None
    scale: ScaleAnswer | None
    advice: AdviceAnswer | None


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """A model's workers and the pressure on them; null where too little is known."""

    model: str
    code: str
    unknown: str
    """The reason why too little is known for a decision; empty if enough is known."""
    now: SeenAnswer | None
    pinned: list[str]


@dataclass(frozen=True, slots=True)
class PlannerAnswer:
    planner_id: str
    mode: str
    lead: str
    """The state of the leader lease: ours, anothers (another planner leads), or unknown while Redis does not answer."""
    not_live: str
    """The sources that are silent, in words; empty if all are live."""
    decisions: dict[str, int]
    """The number of decisions since the start by action."""
    models: list[ModelAnswer]


def decision_id(decision: Decision) -> str:
    """Return an id that is unique over all planners and their restarts."""
    return f"{decision.planner_id}.{decision.incarnation // 1_000_000_000}.{decision.sequence}"


def decision_answer(decision: Decision) -> DecisionAnswer:
    """Convert a decision for the HTTP API and `fulcrum planner decisions`."""
    changes = [_change(each) for each in decision.changes]
    if decision.worker_id:
        moved = WorkerChange(worker_id=decision.worker_id, assignment=decision.assignment)
        changes.append(_change(moved))
    first = changes[0] if changes else ChangeAnswer("", "", 0, 0)
    candidates = [_fields(CandidateAnswer, each) for each in decision.candidates]
    changing = bool(decision.changes)
    return DecisionAnswer(
        id=decision_id(decision),
        time=iso(decision.decided_unix_ns),
        planner_id=decision.planner_id,
        sequence=decision.sequence,
        decided_unix_ns=decision.decided_unix_ns,
        mode=mode_word(decision.mode),
        action=action_word(decision.action),
        reason_code=decision.reason_code,
        reason=decision.reason,
        actor=decision.actor,
        model=decision.model,
        workers=[each.worker for each in changes],
        changes=changes,
        worker=first.worker,
        role=first.role,
        epoch=first.epoch if decision.action != ACTION_RECOMMEND else 0,
        window_ms=decision.inputs.window_ms,
        coverage=decision.inputs.coverage,
        pools=[
            PoolAnswer(
                model=pool.model,
                role=ROLE_WORDS.get(pool.role, "none"),
                workers=pool.workers,
                gpus=pool.gpus,
                busy=pool.busy if pool.HasField("busy") else None,
                running=pool.running,
                waiting=pool.waiting,
                waiting_prefill_tokens=pool.waiting_prefill_tokens,
            )
            for pool in decision.inputs.pools
        ],
        alternatives=[AlternativeAnswer(each.name, each.score) for each in decision.alternatives],
        candidates=candidates,
        predicted=candidates[0] if changing and candidates else None,
        measured=_measured(decision),
        counterfactual=_counterfactual(decision),
        scale=_fields(ScaleAnswer, decision.scale) if decision.HasField("scale") else None,
        advice=_fields(AdviceAnswer, decision.advice) if decision.HasField("advice") else None,
    )


def planner_answer(state: PlannerState, now_ns: int) -> PlannerAnswer:
    """Return the planner's state at the last decision, or the present state if there was no decision."""
    return PlannerAnswer(
        planner_id=state.identity.planner_id,
        mode=mode_word(state.identity.mode),
        lead=state.lead.value,
        not_live=state.not_live(now_ns) or "",
        decisions={action_word(action): count for action, count in sorted(state.published.items())},
        models=[_model(plan) for plan in state.looked(now_ns)],
    )


def iso(unix_ns: int) -> str:
    """Format a Unix time in ISO 8601, UTC, with milliseconds."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _model(plan: ModelPlan) -> ModelAnswer:
    now = seen(plan)
    return ModelAnswer(
        model=plan.observed.model,
        code=plan.assigned.code.value if plan.assigned else CODE_UNKNOWN,
        unknown=plan.observed.unknown,
        now=_fields(SeenAnswer, now) if now else None,
        pinned=[each.id for each in plan.observed.standings if each.pinned],
    )


def _change(change: WorkerChange) -> ChangeAnswer:
    assignment, before = change.assignment, change.before
    return ChangeAnswer(
        change.worker_id,
        role_name(assignment),
        assignment.budget_tokens,
        assignment.epoch,
        role_name(before) if change.HasField("before") else "",
        before.budget_tokens,
    )


def _fields(answer: type[_Answer], message: Message) -> _Answer:
    """Build an answer from a message's fields with the same names."""
    return answer(**{each.name: getattr(message, each.name) for each in fields(answer)})


def _measured(decision: Decision) -> MeasuredAnswer | None:
    if not decision.HasField("measured"):
        return None
    measured = decision.measured
    return MeasuredAnswer(_fields(SeenAnswer, measured.before), _fields(SeenAnswer, measured.after), measured.after_ms)


def _counterfactual(decision: Decision) -> CounterfactualAnswer | None:
    if not decision.HasField("counterfactual"):
        return None
    found = decision.counterfactual
    with_it = getattr(found, "with")
    return CounterfactualAnswer(
        found.method, found.over_ms, _fields(ReplayedAnswer, found.without), _fields(ReplayedAnswer, with_it)
    )
