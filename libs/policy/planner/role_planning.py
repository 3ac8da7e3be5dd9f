"""Which of a model's workers take which role and budget now. Pure: what was done before comes in and goes out.

Every split of the workers that limits allow is weighed by the pressure that it would leave (libs/policy/pressure).
Roles change only where something presses, and another split relieves it by more than predictions are off; so a level
load, or one that dithers, moves nobody. Budgets rise before roles change: they cost nothing. A decode worker is
`Role.MIXED` with a budget of 0: `mixed` counts decode workers too, as the limits' `decode_*` do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isinf
from types import MappingProxyType
from typing import Final, NamedTuple

from libs.policy.planner.limits import MAX_WORKERS, ModelLimits
from libs.policy.planner.pay_back import UNMEASURED, MoveEvidence
from libs.policy.planner.splits import EVERY, Press, weigh
from libs.policy.planner.steady import DecodePace
from libs.policy.pressure.splits import DECODE_FULL, Split, WorkerProfile, Workload, split
from libs.policy.roles import Role

PRESSES: Final = 0.7
"""Below this pressure a split is good enough, whatever others would leave."""
GAIN: Final = 0.15
"""Share of the pressure by which another split must relieve it."""
APART_GAIN: Final = 0.05
"""The same of leaving decodes alone, and of no longer doing so: a budget costs nothing to change."""
RAISE: Final = 0.5
LOWER: Final = 0.2
"""Budgets rise where prompts would press so hard on prefill workers alone, and fall after `CALM_NS` below the other."""
CALM_NS: Final = 5_000_000_000
LACKING_NS: Final = 2_000_000_000
"""For so long nobody decodes, before a prefill worker is made to: a worker that restarts is back sooner."""


class RoleReason(Enum):
    """Why workers are changed, or stay as they are."""

    PROMPTS_PRESS = "prompts_press"
    DECODES_PRESS = "decodes_press"
    CALM = "calm"
    """Prompts have not pressed for a while: decode workers give their budgets back."""
    LIMITS = "limits"
    """Workers had roles in numbers that limits do not allow."""
    UNMET = "limits_unmet"
    """They have, and no numbers that could be reached are allowed."""
    BALANCED = "balanced"
    """Nothing presses."""
    TOO_SMALL = "too_small"
    """Work presses beyond what there is in any split."""
    BEST = "best"
    """Something presses, and no other split relieves it by enough."""
    HELD = "held"
    """Another split would relieve it; resting workers, limits or quiet hours stand against it."""


class PlannedWorker(NamedTuple):
    """One worker."""

    id: str
    role: Role
    budget_tokens: int
    movable: bool
    """Whether it takes new work."""
    prompt_tokens: int
    """Waiting there."""
    kv_tokens: int
    """That its sequences hold: what a move to prefill has to carry away."""
    pinned: bool = False
    """Whether it keeps the role and budget that a person gave it."""
    keeps_budget: bool = False
    """Whether it was started with its role and budget, or a person set them: what was lent alone is taken back."""
    own_budget_tokens: int = 0
    """That it had by its start or a person's word before it was changed here: what it goes back to."""


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """An order to a worker."""

    worker_id: str
    role: Role
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision leaves to the next one."""

    paid_ns: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """By worker that was moved, when that will have paid: until something dates from after that, it rests."""
    calm_since_ns: int = 0
    """0: prompts press, or would without budgets."""
    lacking_since_ns: int = 0
    """Nobody decodes though there is work; 0: somebody does."""
    apart: bool = False
    """Whether decodes are left alone though prompts press: more is done so."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """What was decided about one model."""

    moves: Sequence[RoleOrder]
    """To another role."""
    budgets: Sequence[RoleOrder]
    """Of workers that keep their role."""
    code: RoleReason
    now: Split
    """As roles stand, with budgets."""
    then: Split
    """As they will; equal to `now` where no role changes."""
    candidates: Sequence[Split]
    """All splits that were weighed, the best first."""
    memory: Memory

    @property
    def changes(self) -> Sequence[RoleOrder]:
        """All of them."""
        return (*self.moves, *self.budgets)


def assign(
    engine: WorkerProfile,
    work: Workload,
    workers: Sequence[PlannedWorker],
    memory: Memory,
    now_ns: int,
    *,
    limits: ModelLimits = EVERY,
    most_moves: int = MAX_WORKERS,
    evidence: MoveEvidence = UNMEASURED,
) -> RolePlan:
    """Decide. Workers that are not movable, and those on standby, stay as they are and count for nothing; pinned ones
    stay and count. `most_moves`: workers that may change their role now. `evidence`: how old what is known is, and how
    long moves take."""
    pool = [each for each in workers if each.movable and each.role is not Role.STANDBY]
    prefill = [each for each in pool if each.role is Role.PREFILL]
    mixed = [each for each in pool if each.role is Role.MIXED]
    if not pool:
        nobody = Split(0, 0, 0.0, 0.0)
        return RolePlan((), (), RoleReason.BEST, nobody, nobody, (), memory)
    apart, now, weighed = _weighed(engine, work, pool, limits, was_apart=memory.apart)
    resting = {name: paid_ns for name, paid_ns in memory.paid_ns.items() if now_ns - evidence.age_ns < paid_ns}
    lacking_since_ns = 0 if mixed or not now.pressure else (memory.lacking_since_ns or now_ns)
    rests = lacking_since_ns and now_ns - lacking_since_ns < LACKING_NS
    wanted = 0 if rests else _more_mixed(now, weighed, limits)
    if apart and wanted < 0:  # what decodes now has to find room until fewer do
        wanted = min(max(wanted, _fewest_mixed(engine, work) - len(mixed)), 0)
    free = [each for each in pool if not each.pinned and each.id not in resting]
    moves = _role_changes(engine, wanted, free, apart=apart)[:most_moves]
    then = now
    if moves:
        to_mixed = sum(1 if change.role is Role.MIXED else -1 for change in moves)
        roles = len(prefill) - to_mixed, len(mixed) + to_mixed
        then = _of(weighed, *roles) or split(engine, work, *roles, budgets=not apart)
        paid_ns = now_ns + evidence.pay_back_ns(_relieved(now, then))
        resting |= dict.fromkeys((change.worker_id for change in moves), paid_ns)
    calm = _is_calm(engine, work, prefill, mixed)
    calm_since_ns = (memory.calm_since_ns or now_ns) if calm else 0
    staying = {each.id for each in mixed if not each.pinned} - {change.worker_id for change in moves}
    budgets = [
        change
        for each in mixed
        if each.id in staying
        if (change := _budget(engine, each, calm_since_ns, now_ns, apart=apart))
    ]
    code = _code(now, weighed, limits, moved=bool(moves), wanted=wanted, budgets=bool(budgets), calm=calm)
    left = Memory(MappingProxyType(resting), calm_since_ns, lacking_since_ns, apart)
    return RolePlan(moves, budgets, code, now, then, weighed, left)


def _weighed(
    engine: WorkerProfile, work: Workload, pool: Sequence[PlannedWorker], limits: ModelLimits, *, was_apart: bool
) -> tuple[bool, Split, list[Split]]:
    """(whether decodes are to be left alone, the split as it is, those that could be with the best first)."""
    here = [each for each in pool if each.role is Role.MIXED]
    prefill, mixed = len(pool) - len(here), len(here)
    rides = any(each.budget_tokens for each in here)
    pace = DecodePace.of(engine, work, prefill, mixed, rides=rides)

    def splits_of(*, apart: bool) -> list[Split]:
        def press(p: int, m: int) -> Split:
            return split(engine, pace.work_in(p, m, rides=not apart), p, m, budgets=not apart)

        return sorted(_reachable(press, pool, limits), key=lambda each: each.cost)

    together = splits_of(apart=False)
    now = _of(together, prefill, mixed) or split(engine, work, prefill, mixed)
    chosen = any(each.keeps_budget and each.budget_tokens for each in here)
    if chosen or not prefill or not together or (together[0].cost < PRESSES and now.cost < PRESSES):
        return False, now, together
    alone = splits_of(apart=True)
    if alone[0].cost >= together[0].cost * ((1 + APART_GAIN) if was_apart else (1 - APART_GAIN)):
        return False, now, together
    return True, _of(alone, prefill, mixed) or split(engine, work, prefill, mixed, budgets=False), alone


def _relieved(now: Split, then: Split) -> float:
    """Share of what presses that the new roles take away."""
    if isinf(now.cost):
        return 0.0 if isinf(then.cost) else 1.0
    return 1 - then.cost / now.cost if now.cost else 0.0


def _of(weighed: Iterable[Split], prefill: int, mixed: int) -> Split | None:
    return next((each for each in weighed if each.prefill == prefill and each.mixed == mixed), None)


def _reachable(press: Press, pool: Sequence[PlannedWorker], limits: ModelLimits) -> list[Split]:
    """Splits that limits allow and pinned workers leave."""
    prefill = [each for each in pool if each.role is Role.PREFILL]
    pinned_prefill = sum(each.pinned for each in prefill)
    pinned_mixed = sum(each.pinned for each in pool) - pinned_prefill
    # Whoever started mixed workers alone is not made to split them, and can have them together again.
    alike = any(each.keeps_budget and each.budget_tokens for each in pool) and not any(
        each.keeps_budget for each in prefill
    )
    least = 0 if alike or len(pool) == 1 or not limits.prefill_max else min(len(prefill), 1)
    return weigh(press, len(pool), limits, least_prefill=max(least, pinned_prefill), least_mixed=max(pinned_mixed, 1))


def _fewest_mixed(engine: WorkerProfile, work: Workload) -> int:
    """That have room for what decodes now."""
    by_count = -(-work.decodes // max(engine.max_sequences, 1))
    return max(by_count, -(-work.kv_tokens // engine.kv_tokens) if engine.kv_tokens else 0)


def _code(
    now: Split, weighed: Sequence[Split], limits: ModelLimits, *, moved: bool, wanted: int, budgets: bool, calm: bool
) -> RoleReason:
    if moved:
        if not limits.allow(now.prefill, now.mixed):
            return RoleReason.LIMITS
        decodes = now.decode_pressure > min(now.prompt_pressure, DECODE_FULL)
        return RoleReason.DECODES_PRESS if decodes else RoleReason.PROMPTS_PRESS
    if budgets:
        return RoleReason.CALM if calm else RoleReason.PROMPTS_PRESS
    if wanted:
        return RoleReason.HELD
    if not limits.allow(now.prefill, now.mixed) and not weighed:
        return RoleReason.UNMET
    if now.cost < PRESSES:
        return RoleReason.BALANCED
    return (
        RoleReason.TOO_SMALL if min((each.pressure for each in weighed), default=now.pressure) > 1 else RoleReason.BEST
    )


def _more_mixed(now: Split, weighed: Sequence[Split], limits: ModelLimits) -> int:
    """How many workers are to go from prefill to mixed, or below 0 the other way."""
    if not weighed:
        return 0
    if limits.allow(now.prefill, now.mixed) and (now.cost < PRESSES or weighed[0].cost > now.cost * (1 - GAIN)):
        return 0
    # Of splits that are as good as the best, the nearest: each move costs.
    good = [each for each in weighed if each.cost <= weighed[0].cost * (1 + GAIN / 3)]
    return min(good, key=lambda each: abs(each.mixed - now.mixed)).mixed - now.mixed


def _role_changes(engine: WorkerProfile, wanted: int, free: Sequence[PlannedWorker], *, apart: bool) -> list[RoleOrder]:
    """Those go for whom it costs least."""
    if not wanted:
        return []
    if wanted > 0:
        ready = sorted((each for each in free if each.role is Role.PREFILL), key=lambda each: each.prompt_tokens)
        return [RoleOrder(each.id, Role.MIXED, 0 if apart else engine.chunk_tokens) for each in ready[:wanted]]
    ready = sorted((each for each in free if each.role is Role.MIXED), key=lambda each: each.kv_tokens)
    return [RoleOrder(each.id, Role.PREFILL, 0) for each in ready[:-wanted]]


def _is_calm(
    engine: WorkerProfile, work: Workload, prefill: Sequence[PlannedWorker], mixed: Sequence[PlannedWorker]
) -> bool:
    """Whether prompts would not press on prefill workers alone."""
    alone = split(engine, work, len(prefill), len(mixed), budgets=False).prompt_pressure
    return alone < (LOWER if any(each.budget_tokens for each in mixed) else RAISE)


def _budget(
    engine: WorkerProfile, worker: PlannedWorker, calm_since_ns: int, now_ns: int, *, apart: bool
) -> RoleOrder | None:
    if apart:
        return RoleOrder(worker.id, Role.MIXED, 0) if worker.budget_tokens and not worker.keeps_budget else None
    if not calm_since_ns and not worker.budget_tokens:
        return RoleOrder(worker.id, Role.MIXED, engine.chunk_tokens)
    lent = worker.budget_tokens != worker.own_budget_tokens and not worker.keeps_budget
    if calm_since_ns and now_ns - calm_since_ns >= CALM_NS and lent:
        return RoleOrder(worker.id, Role.MIXED, worker.own_budget_tokens)
    return None
