"""The decision about the roles and prefill budgets of a model's workers.

Every split of the workers within the limits is rated by the pressure it would leave (libs/policy/pressure.py). Roles
change only under pressure, and only if another split relieves it by more than the error of the predictions. So a steady
or fluctuating load moves no worker. Budgets are raised before roles change, since they cost nothing. A decode worker is
`Role.MIXED` with a budget of 0: `mixed` counts decode workers too, as `decode_*` in the limits does.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import isinf
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from libs.policy.capacity import MOST_WORKERS
from libs.policy.planner.due import NOTHING_USUAL, UsualWork
from libs.policy.planner.limits import EVERY, DecodePace, ModelLimits, RatedSplits, SplitBounds, weigh
from libs.policy.planner.turns import NO_TURN, TOGETHER, TURN_NS, Apart, RoleTurn
from libs.policy.pressure import (
    DECODE_FULL,
    Numbers,
    Split,
    WorkerProfile,
    Workload,
    most_prefill_by_link,
    pressed,
    split,
)
from libs.policy.roles import Role

# A move costs the measured time from its decision until the worker serves its new role, and the same again on the way
# back. Its gain is the share of the pressure that it relieves, so it pays off after the cost divided by that share.
# Reports lag, and a move is judged only by reports from after that time.
LEAST_EFFECT_NS: Final = 20_000_000
"""The minimum cost of a move, for its KV and prefixes, even if it took no time at all."""
LEAST_PAY_BACK_NS: Final = 3 * LEAST_EFFECT_NS
"""The minimum time in which any move pays back."""
FIRST_EFFECT_NS: Final = 100_000_000.0
"""The duration assumed before any move was measured."""
WEIGHT: Final = 0.2
"""The weight of the newest move in the mean."""
LEAST_RELIEF: Final = 0.1
"""The relief assumed for a move that relieves less but that limits require."""
MOST_NS: Final = 10_000_000_000
"""The bound on a pay-back and on the age of reports; older reports carry no information."""


@dataclass(frozen=True, slots=True)
class MoveEvidence:
    """The knowledge about moves at the time of a decision."""

    age_ns: int = 0
    """The age of the facts about the workers."""
    effect_ns: float = FIRST_EFFECT_NS
    """The mean measured time from a decision until its worker has changed."""

    def measured(self, effect_ns: int) -> "MoveEvidence":
        """Return the evidence updated by the duration of one more move."""
        bounded = min(max(effect_ns, 0), MOST_NS)
        return replace(self, effect_ns=self.effect_ns + WEIGHT * (bounded - self.effect_ns))

    def aged(self, age_ns: int) -> "MoveEvidence":
        """Return the evidence with another age of the facts about the workers."""
        return replace(self, age_ns=min(max(age_ns, 0), MOST_NS))

    def pay_back_ns(self, relieved: float) -> int:
        """Return the time from a decision until its moves have recovered their cost, there and back.

        `relieved` is the share of the pressure that they relieve, 0..1.
        """
        effect_ns = max(self.effect_ns, LEAST_EFFECT_NS)
        return min(round(effect_ns + 2 * effect_ns / min(max(relieved, LEAST_RELIEF), 1.0)), MOST_NS)


UNMEASURED: Final = MoveEvidence()


# Below both pressures a split is good enough, regardless of others. Prompts come in clusters and queue long before
# their phase is full; decodes are late only once it is.
PROMPTS_PRESS: Final = 0.7
DECODES_PRESS: Final = 0.85
GAIN: Final = 0.15
"""The share of the pressure that another split must relieve."""
FAR_MORE: Final = 2.0
"""The least ratio of prompt pressure now to decode pressure after a move that overloads decode."""
BURST_NS: Final = 3_000_000_000
"""The time for which prompts must be overloaded at a smaller ratio, since bursts are shorter. `TURN_NS` applies if
decodes recently called the worker.
"""
APART_GAIN: Final = 0.05
"""The minimum share of pressure that separating decodes from prompts, or ending that separation, must relieve.

Neither moves KV, but the budgets of all decode workers change. With few sequences the gain must exceed chance.
"""
# Budgets rise once the pressure of prompts on prefill workers alone reaches `RAISE`, and fall after `CALM_NS` below
# `LOWER`.
RAISE: Final = 0.5
LOWER: Final = 0.2
CALM_NS: Final = TURN_NS
MAX_CANDIDATES: Final = 8
"""The maximum number of rated splits that are reported."""
LACKING_NS: Final = 2_000_000_000
"""The time without a decode worker before a prefill worker becomes one; a restarting worker returns sooner."""
STARTING_NS: Final = 30_000_000_000
"""The time for which limits may go unmet without pressure; by then a worker that is starting has joined."""


class RoleReason(Enum):
    """The reason why workers are changed or stay as they are."""

    PROMPTS_PRESS = "prompts_press"
    DECODES_PRESS = "decodes_press"
    # Prompts have not pressed for some time, so decode workers return their budgets.
    CALM = "calm"
    # The limits did not allow the present numbers of workers by role.
    LIMITS = "limits"
    # The limits do not allow the present numbers, and no allowed ones can be reached.
    UNMET = "limits_unmet"
    # The limits do not allow the present numbers; workers that may be starting have `STARTING_NS` to join.
    UNMET_YET = "limits_wait"
    BALANCED = "balanced"
    # The work exceeds the capacity of every split.
    TOO_SMALL = "too_small"
    # There is pressure, but no other split relieves it enough.
    BEST = "best"
    # Another split would relieve it, but resting workers, limits or quiet hours prevent it.
    HELD = "held"


class PlannedWorker(NamedTuple):
    """The facts about one worker that decisions about roles need."""

    id: str
    role: Role
    budget_tokens: int
    movable: bool
    """True if the worker takes new work, so that it may be moved."""
    prompt_tokens: int
    """The prompt tokens waiting at the worker."""
    kv_tokens: int
    """The KV tokens of its sequences, which must be transferred before a move to prefill."""
    pinned: bool = False
    """True if an operator set its role and budget, which stay."""
    keeps_budget: bool = False
    """True if the worker's role and budget were set at its start or by an operator.

    Then only budgets that the planner added are removed.
    """
    own_budget_tokens: int = 0
    """The budget that the worker had before the planner changed it, and to which it returns."""


class RoleOrder(NamedTuple):
    """A role and budget for a worker to take."""

    worker_id: str
    role: Role
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The state that one decision about roles passes to the next."""

    paid_ns: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The time at which each worker's last move will have paid off. The worker stays until there are reports from after
    that time.
    """
    calm_since_ns: int = 0
    """The time at which calm began; 0 while prompts are overloaded, or would be without budgets."""
    lacking_since_ns: int = 0
    """The time since which there is work but no decode worker; 0 if there is one."""
    limits: ModelLimits | None = None
    """The limits of the last decision; None before the first."""
    unmet_since_ns: int = 0
    """The time since which those limits do not allow the numbers of workers; 0 if they do."""
    apart: Apart = TOGETHER
    turn: RoleTurn = NO_TURN
    trades_since_ns: int = 0
    """The time since which a move that overloads decode would relieve prompts; 0 if none would."""
    usual: UsualWork = NOTHING_USUAL
    """The work of the last ten seconds, which a flood of prompts exceeds."""


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The decision about the roles and budgets of one model's workers."""

    moves: Sequence[RoleOrder]
    """The orders that change a worker's role, and possibly its budget."""
    budgets: Sequence[RoleOrder]
    code: RoleReason
    now: Split
    """The present split, with the prompts that budgets allow."""
    then: Split
    """The split after the moves; equal to `now` if no role changes."""
    candidates: Sequence[Split]
    """The best of the rated splits, best first."""
    memory: Memory

    @property
    def changes(self) -> Sequence[RoleOrder]:
        """All orders of the plan, with role changes first."""
        return (*self.moves, *self.budgets)


def assign(
    engine: WorkerProfile,
    work: Workload,
    workers: Sequence[PlannedWorker],
    memory: Memory,
    now_ns: int,
    *,
    limits: ModelLimits = EVERY,
    most_moves: int = MOST_WORKERS,
    evidence: MoveEvidence = UNMEASURED,
    lending: int | None = None,
) -> RolePlan:
    """Decide the roles and budgets of one model's workers.

    Workers that are not movable or on standby stay and do not count; pinned ones stay and count. At most `most_moves`
    change roles. `evidence` has the age of reports and the duration of moves. `lending` is the number of mixed workers
    that compute prompts if budgets cannot change; None if they can.
    """
    pool, given, usual = _RoleWorkers.of(workers), limits, memory.usual.seen(work, now_ns)
    work = memory.usual.judged(work)
    if not pool.prefill and not pool.mixed:
        nobody = Split(0, 0, 0.0, 0.0)
        return RolePlan((), (), RoleReason.BEST, nobody, nobody, (), memory)
    if len(pool) == 1 or pool.alike or not limits.prefill_max:
        limits = limits.without_prefill()
    calmed = bool(memory.calm_since_ns) and now_ns - memory.calm_since_ns >= CALM_NS
    rate = partial(_rate_splits, engine, work, pool, limits, now_ns=now_ns, calmed=calmed, lending=lending)
    parted, now, rated = rate(was=memory.apart)
    if (settled := parted.settled(now_ns)) is not parted and _better_split(now, rated, by_limits=False):
        parted, now, rated = rate(was=settled)
    apart, lately = parted.on, memory.turn.called_decodes(now_ns)
    resting = {name: paid_ns for name, paid_ns in memory.paid_ns.items() if now_ns - evidence.age_ns < paid_ns}
    lacking_since_ns = 0 if pool.mixed or not now.pressure else (memory.lacking_since_ns or now_ns)
    rests = lacking_since_ns and now_ns - lacking_since_ns < LACKING_NS
    unmet_since_ns = 0 if limits.allow(now.prefill, now.mixed) else _unmet_since_ns(memory, given, now_ns)
    by_limits = unmet_since_ns != 0 and now_ns - unmet_since_ns >= STARTING_NS
    better = None if rests else _better_split(now, rated, by_limits=by_limits)
    patience_ns = memory.turn.patience_ns(work, now_ns)
    more = usual.decodes / max(work.decodes, 1)
    trades = better is not None and not by_limits and _trades(now, better, more, lately=lately, undone=patience_ns > 0)
    trades_since_ns = (memory.trades_since_ns or now_ns) if trades else 0
    waits = trades and now_ns - trades_since_ns < (patience_ns or (TURN_NS if lately else BURST_NS))
    wanted = 0 if better is None or waits else better.mixed - now.mixed
    if apart and wanted < 0:  # the present decodes still need room
        wanted = min(max(wanted, _fewest_mixed(engine, work) - len(pool.mixed)), 0)
    turn = memory.turn.called(wanted, now_ns)
    free = not now.mixed or not limits.allow(now.prefill, now.mixed)
    turns = not (free or turn.allows(wanted, work, now_ns, too_small=len(rated) > 0 and rated.least_pressure() > 1))
    if not by_limits:
        wanted = turn.bounded(wanted, len(pool.prefill if wanted > 0 else pool.mixed), now_ns)
    moves = [] if turns else _role_changes(engine, wanted, pool, resting, apart=apart)[:most_moves]
    then, moving = now, {change.worker_id for change in moves}
    if moves:
        turn = turn.after(wanted, work, now_ns)
        to_mixed = sum(1 if change.role is Role.MIXED else -1 for change in moves)
        roles = len(pool.prefill) - to_mixed, len(pool.mixed) + to_mixed
        then = rated.of(roles[0]) or split(engine, work, *roles, budgets=not apart, lending=lending)
        paid_ns = now_ns + evidence.pay_back_ns(_relieved(now, then))
        resting |= dict.fromkeys(moving, paid_ns)
    calm = _is_calm(engine, work, pool)
    calm_since_ns = (memory.calm_since_ns or now_ns) if calm else 0
    resized = _budget_changes(engine, pool.mixed, calm_since_ns, now_ns, apart=apart)
    budgets = [change for change in resized if change.worker_id not in moving]
    if any(each.budget_tokens for each in budgets) and not calm:
        parted = parted.lent(now_ns)
    code = _code(now, rated, limits, moved=bool(moves), wanted=wanted, budgets=bool(budgets), calm=calm)
    rest = MappingProxyType(resting)
    left = Memory(rest, calm_since_ns, lacking_since_ns, given, unmet_since_ns, parted, turn, trades_since_ns, usual)
    return RolePlan(moves, budgets, code, now, then, rated.first(MAX_CANDIDATES), left)


@dataclass(frozen=True, slots=True)
class _RoleWorkers:
    """The movable workers in a role, by role."""

    prefill: Sequence[PlannedWorker]
    mixed: Sequence[PlannedWorker]
    chosen: bool
    """True if the budget of some mixed worker was set by an operator."""

    @classmethod
    def of(cls, workers: Iterable[PlannedWorker]) -> "_RoleWorkers":
        """Group the movable workers by role, without those on standby."""
        by_role: dict[Role, list[PlannedWorker]] = {Role.PREFILL: [], Role.MIXED: [], Role.STANDBY: []}
        for each in workers:
            if each.movable:
                by_role[each.role].append(each)
        mixed = by_role[Role.MIXED]
        return cls(by_role[Role.PREFILL], mixed, any(each.keeps_budget and each.budget_tokens for each in mixed))

    @property
    def alike(self) -> bool:
        """Return whether only mixed workers were started. Such workers need not be split and may all become mixed
        again.
        """
        return self.chosen and not any(each.keeps_budget for each in self.prefill)

    def __len__(self) -> int:
        return len(self.prefill) + len(self.mixed)


def _rate_splits(
    engine: WorkerProfile,
    work: Workload,
    pool: _RoleWorkers,
    limits: ModelLimits,
    *,
    was: Apart,
    now_ns: int,
    calmed: bool,
    lending: int | None,
) -> tuple[Apart, Split, RatedSplits]:
    """Return whether decodes should run without prompts, the present split, and the possible splits.

    The first stays unchanged if possible while no phase is overloaded. It ends once prompts have `calmed`, as budgets
    do. With `lending` workers, whose budgets stay, it is always true, since no other worker gets a budget.
    """
    prefill, mixed = len(pool.prefill), len(pool.mixed)
    fed = max(int(most_prefill_by_link(engine, work.prompts, prefill + mixed)), prefill, limits.prefill_min)
    limits = replace(limits, prefill_max=min(limits.prefill_max, fed))
    # Sequences present just after budgets were taken away are those of steps with prompts.
    rides = any(each.budget_tokens for each in pool.mixed) or was.is_new(now_ns)
    pace = DecodePace.of(engine, work, prefill, mixed, rides=rides)
    least_prefill, least_mixed = _fewest(pool, limits)

    def splits_of(*, apart: bool) -> RatedSplits:
        def press(p: Numbers, m: Numbers) -> tuple[Numbers, Numbers]:
            decodes, kv_tokens = pace.decodes_in(p, m, rides=bool(lending) or not apart)
            lent = np.minimum(m, float(lending or 0)) if apart else m
            return pressed(engine, work, decodes, kv_tokens, prefill=p, mixed=m, lent=lent)

        return weigh(press, len(pool), limits, least_prefill=least_prefill, least_mixed=least_mixed)

    if lending is not None:
        rated = splits_of(apart=True)
        now = rated.of(prefill) or split(engine, work, prefill, mixed, lending=lending)
        return Apart(on=True), now, rated
    together = splits_of(apart=False)
    now = together.of(prefill) or split(engine, work, prefill, mixed)
    best = together.best
    if pool.chosen or not prefill or best is None or calmed:
        return was.ended(now_ns), now, together
    presses = _presses(best) or _presses(now)
    if not (presses or was.on):
        return was.called(now_ns, better=False), now, together
    alone = splits_of(apart=True)
    if alone.best is None:
        return was.ended(now_ns), now, together
    # Sequences arrive by chance, so their number and its pressure vary by its square root.
    gain = min(max(APART_GAIN, max(work.decodes, 1) ** -0.5), GAIN)
    better = alone.best.cost < best.cost * ((1 + gain) if was.on else (1 - gain))
    apart = was.called(now_ns, better=better if presses else was.on)
    if not apart.on:
        return apart, now, together
    return apart, alone.of(prefill) or split(engine, work, prefill, mixed, budgets=False), alone


def _presses(split: Split) -> bool:
    return split.prompt_pressure >= PROMPTS_PRESS or split.decode_pressure >= DECODES_PRESS


def _relieved(now: Split, then: Split) -> float:
    """Return the share of the pressure that the new roles relieve."""
    if isinf(now.cost):
        return 0.0 if isinf(then.cost) else 1.0
    return 1 - then.cost / now.cost if now.cost else 0.0


def _fewest(pool: _RoleWorkers, limits: ModelLimits) -> tuple[int, int]:
    """Return the smallest numbers of prefill and mixed workers; pinned ones keep their role."""
    least = 0 if pool.alike or len(pool) == 1 or not limits.prefill_max else min(len(pool.prefill), 1)
    pinned_prefill, pinned_mixed = (sum([each.pinned for each in role]) for role in (pool.prefill, pool.mixed))
    return max(least, pinned_prefill), max(pinned_mixed, 1)


def _fewest_mixed(engine: WorkerProfile, work: Workload) -> int:
    """Return the fewest mixed workers with room for the present decodes."""
    by_count = -(-work.decodes // max(engine.max_sequences, 1))
    return max(by_count, -(-work.kv_tokens // engine.kv_tokens) if engine.kv_tokens else 0)


def _code(
    now: Split, rated: RatedSplits, limits: ModelLimits, *, moved: bool, wanted: int, budgets: bool, calm: bool
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
    if not limits.allow(now.prefill, now.mixed) and not len(rated):
        return RoleReason.UNMET
    if not _presses(now):
        return RoleReason.BALANCED if limits.allow(now.prefill, now.mixed) else RoleReason.UNMET_YET
    least = rated.least_pressure() if len(rated) else now.pressure
    return RoleReason.TOO_SMALL if least > 1 else RoleReason.BEST


def _unmet_since_ns(memory: Memory, limits: ModelLimits, now_ns: int) -> int:
    """Return the time since which the limits are unmet.

    New limits count as unmet for long, so that they are enforced at once.
    """
    if memory.limits not in (None, limits):
        return now_ns - STARTING_NS
    return memory.unmet_since_ns or now_ns


def _better_split(now: Split, rated: RatedSplits, *, by_limits: bool) -> Split | None:
    """Return the split to move to, or None if the present one is good enough.

    With `by_limits`, the limits must be met regardless of pressure.
    """
    best = rated.best
    if best is None:
        return None
    if not by_limits and (not _presses(now) or best.cost > now.cost * (1 - GAIN)):
        return None
    # Choose the nearest split that is about as good as the best, since each move costs, or in which nothing presses any
    # more. A growing queue makes every further worker look useful, and most of them would soon be missed elsewhere.
    enough = SplitBounds(PROMPTS_PRESS * (1 - GAIN), DECODES_PRESS * (1 - GAIN), now.cost * (1 - GAIN))
    return rated.nearest(now.mixed, best.cost * (1 + GAIN / 3), None if by_limits else enough)


def _trades(now: Split, then: Split, more: float, *, lately: bool, undone: bool) -> bool:
    """Return whether a split would relieve prompts by overloading decode, which lasts longer.

    `more` is the usual number of decodes over the present one: a momentary drop in decodes soon ends.

    Overloaded decodes take the worker back just when a burst of prompts is over. If they have just taken one back
    (`undone`), a move to prefill is such a trade unless decodes keep below half of the pressing level.
    """
    if then.mixed >= now.mixed:
        return False
    decodes = then.decode_pressure * max(more, 1.0)
    if undone:
        return decodes > DECODES_PRESS / 2
    most = DECODES_PRESS * (1 - GAIN) ** (2 if lately else 1)
    return decodes > most and now.prompt_pressure < FAR_MORE * decodes


def _role_changes(
    engine: WorkerProfile, wanted: int, pool: _RoleWorkers, resting: Container[str], *, apart: bool
) -> list[RoleOrder]:
    """Return the orders for the workers that are cheapest to move; pinned and resting ones stay."""
    if not wanted:
        return []
    free = [each for each in (pool.prefill if wanted > 0 else pool.mixed) if not each.pinned and each.id not in resting]
    if wanted > 0:
        ready = sorted(free, key=lambda each: each.prompt_tokens)
        return [RoleOrder(each.id, Role.MIXED, 0 if apart else engine.chunk_tokens) for each in ready[:wanted]]
    ready = sorted(free, key=lambda each: each.kv_tokens)
    return [RoleOrder(each.id, Role.PREFILL, 0) for each in ready[:-wanted]]


def _is_calm(engine: WorkerProfile, work: Workload, pool: _RoleWorkers) -> bool:
    """Return whether prefill workers alone have room for the prompts."""
    alone = split(engine, work, len(pool.prefill), len(pool.mixed), budgets=False).prompt_pressure
    return alone < (LOWER if any(each.budget_tokens for each in pool.mixed) else RAISE)


def _budget_changes(
    engine: WorkerProfile, mixed: Sequence[PlannedWorker], calm_since_ns: int, now_ns: int, *, apart: bool
) -> list[RoleOrder]:
    """Return the budget changes of mixed workers that are not pinned.

    With `apart`, budgets become 0. Otherwise, a worker without a budget gets one chunk while the load is not calm.
    After `CALM_NS` of calm, workers return to their own budgets. Workers with `keeps_budget` are only raised from 0.
    """
    if apart:
        return [
            _with_budget(each, 0) for each in mixed if each.budget_tokens and not each.keeps_budget and not each.pinned
        ]
    if not calm_since_ns:
        return [_with_budget(each, engine.chunk_tokens) for each in mixed if not each.budget_tokens and not each.pinned]
    if now_ns - calm_since_ns < CALM_NS:
        return []
    return [
        _with_budget(each, each.own_budget_tokens)
        for each in mixed
        if each.budget_tokens != each.own_budget_tokens and not each.keeps_budget and not each.pinned
    ]


def _with_budget(worker: PlannedWorker, budget_tokens: int) -> RoleOrder:
    return RoleOrder(worker.id, Role.MIXED, budget_tokens)
