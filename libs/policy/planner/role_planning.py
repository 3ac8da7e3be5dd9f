"""Which of a model's workers take which role and budget now. Pure: what was done before comes in and goes out.

Every split of the workers that limits allow is weighed by the pressure that it would leave (libs/policy/pressure).
Roles change only where something presses, and another split relieves it by more than predictions are off; so a level
load, or one that dithers, moves nobody. Budgets rise before roles change: they cost nothing. A decode worker is
`Role.MIXED` with a budget of 0: `mixed` counts decode workers too, as the limits' `decode_*` do.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isinf
from types import MappingProxyType
from typing import Final, NamedTuple

from libs.policy.planner.limits import MAX_WORKERS, ModelLimits
from libs.policy.planner.pay_back import UNMEASURED, MoveEvidence
from libs.policy.planner.splits import EVERY, Weighed, weigh
from libs.policy.planner.steady import DecodePace
from libs.policy.pressure.numbers import Numbers
from libs.policy.pressure.splits import DECODE_FULL, Split, WorkerProfile, Workload, pressed, split
from libs.policy.roles import Role

PROMPTS_PRESS: Final = 0.7
DECODES_PRESS: Final = 0.85
"""Below both pressures a split is good enough, whatever others would leave. Prompts queue long before a phase is full,
as they come in clusters; decodes are not late before it is."""
GAIN: Final = 0.15
"""Share of the pressure by which another split must relieve it."""
APART_GAIN: Final = 0.05
"""The same of leaving decodes alone, and of no longer doing so: a budget costs nothing to change."""
RAISE: Final = 0.5
LOWER: Final = 0.2
"""Budgets rise where prompts would press so hard on prefill workers alone, and fall after `CALM_NS` below the other."""
CALM_NS: Final = 5_000_000_000
MAX_CANDIDATES: Final = 8
"""Of all splits that are weighed, those that are shown."""
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


class RoleOrder(NamedTuple):
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
    """Of those that were weighed, the best few, the best first."""
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
    pool = _Pool.of(workers)
    if not pool.prefill and not pool.mixed:
        nobody = Split(0, 0, 0.0, 0.0)
        return RolePlan((), (), RoleReason.BEST, nobody, nobody, (), memory)
    if len(pool) == 1 or pool.alike or not limits.prefill_max:
        limits = limits.without_prefill()
    apart, now, weighed = _weighed(engine, work, pool, limits, was_apart=memory.apart)
    resting = {name: paid_ns for name, paid_ns in memory.paid_ns.items() if now_ns - evidence.age_ns < paid_ns}
    lacking_since_ns = 0 if pool.mixed or not now.pressure else (memory.lacking_since_ns or now_ns)
    rests = lacking_since_ns and now_ns - lacking_since_ns < LACKING_NS
    wanted = 0 if rests else _more_mixed(now, weighed, limits)
    if apart and wanted < 0:  # what decodes now has to find room until fewer do
        wanted = min(max(wanted, _fewest_mixed(engine, work) - len(pool.mixed)), 0)
    moves = _role_changes(engine, wanted, pool, resting, apart=apart)[:most_moves]
    then = now
    if moves:
        to_mixed = sum(1 if change.role is Role.MIXED else -1 for change in moves)
        roles = len(pool.prefill) - to_mixed, len(pool.mixed) + to_mixed
        then = weighed.of(roles[0]) or split(engine, work, *roles, budgets=not apart)
        paid_ns = now_ns + evidence.pay_back_ns(_relieved(now, then))
        resting |= dict.fromkeys((change.worker_id for change in moves), paid_ns)
    calm = _is_calm(engine, work, pool)
    calm_since_ns = (memory.calm_since_ns or now_ns) if calm else 0
    going = {change.worker_id for change in moves}
    budgets = [
        change
        for change in _budgets(engine, pool.mixed, calm_since_ns, now_ns, apart=apart)
        if change.worker_id not in going
    ]
    code = _code(now, weighed, limits, moved=bool(moves), wanted=wanted, budgets=bool(budgets), calm=calm)
    left = Memory(MappingProxyType(resting), calm_since_ns, lacking_since_ns, apart)
    return RolePlan(moves, budgets, code, now, then, weighed.first(MAX_CANDIDATES), left)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The workers that count, by role."""

    prefill: Sequence[PlannedWorker]
    mixed: Sequence[PlannedWorker]
    chosen: bool
    """Whether somebody chose the budget of some."""

    @classmethod
    def of(cls, workers: Iterable[PlannedWorker]) -> "_Pool":
        """Of those that take work."""
        by_role: dict[Role, list[PlannedWorker]] = {Role.PREFILL: [], Role.MIXED: [], Role.STANDBY: []}
        for each in workers:
            if each.movable:
                by_role[each.role].append(each)
        mixed = by_role[Role.MIXED]
        return cls(by_role[Role.PREFILL], mixed, any(each.keeps_budget and each.budget_tokens for each in mixed))

    @property
    def alike(self) -> bool:
        """Whether somebody started mixed workers alone, who need not be split, and may be together again."""
        return self.chosen and not any(each.keeps_budget for each in self.prefill)

    def __len__(self) -> int:
        return len(self.prefill) + len(self.mixed)


def _weighed(
    engine: WorkerProfile, work: Workload, pool: _Pool, limits: ModelLimits, *, was_apart: bool
) -> tuple[bool, Split, Weighed]:
    """(whether decodes are to be left alone, the split as it is, those that could be)."""
    prefill, mixed = len(pool.prefill), len(pool.mixed)
    rides = any(each.budget_tokens for each in pool.mixed)
    pace = DecodePace.of(engine, work, prefill, mixed, rides=rides)
    least_prefill, least_mixed = _fewest(pool, limits)

    def splits_of(*, apart: bool) -> Weighed:
        def press(p: Numbers, m: Numbers) -> tuple[Numbers, Numbers]:
            decodes, kv_tokens = pace.decodes_in(p, m, rides=not apart)
            lent = 0.0 * m if apart else m
            return pressed(engine, work, decodes, kv_tokens, prefill=p, mixed=m, lent=lent)

        return weigh(press, len(pool), limits, least_prefill=least_prefill, least_mixed=least_mixed)

    together = splits_of(apart=False)
    now = together.of(prefill) or split(engine, work, prefill, mixed)
    best = together.best
    if pool.chosen or not prefill or best is None or not (_presses(best) or _presses(now)):
        return False, now, together
    alone = splits_of(apart=True)
    if alone.best is None or alone.best.cost >= best.cost * ((1 + APART_GAIN) if was_apart else (1 - APART_GAIN)):
        return False, now, together
    return True, alone.of(prefill) or split(engine, work, prefill, mixed, budgets=False), alone


def _presses(split: Split) -> bool:
    return split.prompt_pressure >= PROMPTS_PRESS or split.decode_pressure >= DECODES_PRESS


def _relieved(now: Split, then: Split) -> float:
    """Share of what presses that the new roles take away."""
    if isinf(now.cost):
        return 0.0 if isinf(then.cost) else 1.0
    return 1 - then.cost / now.cost if now.cost else 0.0


def _fewest(pool: _Pool, limits: ModelLimits) -> tuple[int, int]:
    """(prefill, mixed) workers at least, as pinned ones stay what they are."""
    least = 0 if pool.alike or len(pool) == 1 or not limits.prefill_max else min(len(pool.prefill), 1)
    pinned_prefill, pinned_mixed = (sum([each.pinned for each in role]) for role in (pool.prefill, pool.mixed))
    return max(least, pinned_prefill), max(pinned_mixed, 1)


def _fewest_mixed(engine: WorkerProfile, work: Workload) -> int:
    """That have room for what decodes now."""
    by_count = -(-work.decodes // max(engine.max_sequences, 1))
    return max(by_count, -(-work.kv_tokens // engine.kv_tokens) if engine.kv_tokens else 0)


def _code(
    now: Split, weighed: Weighed, limits: ModelLimits, *, moved: bool, wanted: int, budgets: bool, calm: bool
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
    if not limits.allow(now.prefill, now.mixed) and not len(weighed):
        return RoleReason.UNMET
    if not _presses(now):
        return RoleReason.BALANCED
    least = weighed.least_pressure() if len(weighed) else now.pressure
    return RoleReason.TOO_SMALL if least > 1 else RoleReason.BEST


def _more_mixed(now: Split, weighed: Weighed, limits: ModelLimits) -> int:
    """How many workers are to go from prefill to mixed, or below 0 the other way."""
    best = weighed.best
    if best is None:
        return 0
    if limits.allow(now.prefill, now.mixed) and (not _presses(now) or best.cost > now.cost * (1 - GAIN)):
        return 0
    # Of splits that are as good as the best, the nearest: each move costs.
    nearest = weighed.nearest(now.mixed, best.cost * (1 + GAIN / 3))
    return nearest.mixed - now.mixed if nearest is not None else 0


def _role_changes(
    engine: WorkerProfile, wanted: int, pool: _Pool, resting: Container[str], *, apart: bool
) -> list[RoleOrder]:
    """Those go for whom it costs least; pinned ones and such as rest stay."""
    if not wanted:
        return []
    free = [each for each in (pool.prefill if wanted > 0 else pool.mixed) if not each.pinned and each.id not in resting]
    if wanted > 0:
        ready = sorted(free, key=lambda each: each.prompt_tokens)
        return [RoleOrder(each.id, Role.MIXED, 0 if apart else engine.chunk_tokens) for each in ready[:wanted]]
    ready = sorted(free, key=lambda each: each.kv_tokens)
    return [RoleOrder(each.id, Role.PREFILL, 0) for each in ready[:-wanted]]


def _is_calm(engine: WorkerProfile, work: Workload, pool: _Pool) -> bool:
    """Whether prompts would not press on prefill workers alone."""
    alone = split(engine, work, len(pool.prefill), len(pool.mixed), budgets=False).prompt_pressure
    return alone < (LOWER if any(each.budget_tokens for each in pool.mixed) else RAISE)


def _budgets(
    engine: WorkerProfile, mixed: Sequence[PlannedWorker], calm_since_ns: int, now_ns: int, *, apart: bool
) -> list[RoleOrder]:
    """Of mixed workers that are not pinned: none where decodes are left alone, one where prompts press, their own after
    a calm."""
    if apart:
        return [_lends(each, 0) for each in mixed if each.budget_tokens and not each.keeps_budget and not each.pinned]
    if not calm_since_ns:
        return [_lends(each, engine.chunk_tokens) for each in mixed if not each.budget_tokens and not each.pinned]
    if now_ns - calm_since_ns < CALM_NS:
        return []
    return [
        _lends(each, each.own_budget_tokens)
        for each in mixed
        if each.budget_tokens != each.own_budget_tokens and not each.keeps_budget and not each.pinned
    ]


def _lends(worker: PlannedWorker, budget_tokens: int) -> RoleOrder:
    return RoleOrder(worker.id, Role.MIXED, budget_tokens)
