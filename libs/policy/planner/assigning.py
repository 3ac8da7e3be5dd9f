"""Which of a model's workers take which role and budget now. Pure: what was done before comes in and goes out.

Every split of the workers is weighed by the pressure that it would leave (see capacity.py). Roles change only where
something presses, and another split relieves it by more than predictions are off; so a level load, or one that dithers,
moves nobody. Budgets rise before roles change: they cost nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from libs.policy.planner.capacity import DECODE_FULL, Engine, Split, Work, split, splits
from libs.policy.roles import Role

PRESSES: Final = 0.7
"""Below this pressure a split is good enough, whatever others would leave."""
GAIN: Final = 0.15
"""Share of the pressure by which another split must relieve it."""
REST_NS: Final = 1_000_000_000
"""A worker that has changed its role keeps it for so long."""
RAISE: Final = 0.5
LOWER: Final = 0.2
"""Budgets rise where prompts would press so hard on prefill workers alone, and fall after `CALM_NS` below the other."""
CALM_NS: Final = 5_000_000_000


class Code(Enum):
    """Why a worker is changed."""

    PROMPTS_PRESS = "prompts_press"
    DECODES_PRESS = "decodes_press"
    CALM = "calm"


@dataclass(frozen=True, slots=True)
class Standing:
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


@dataclass(frozen=True, slots=True)
class Change:
    """What a worker is to be told."""

    worker_id: str
    role: Role
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision leaves to the next one."""

    moved_ns: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """When a worker last changed its role, by id, of those that rest."""
    calm_since_ns: int = 0
    """0: prompts press, or would without budgets."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """What was decided about one model."""

    changes: Sequence[Change]
    code: Code | None
    """None: nothing changes."""
    now: Split
    """As roles stand, with budgets."""
    then: Split
    """As they will; equal to `now` where no role changes."""
    candidates: Sequence[Split]
    """All splits that were weighed, the best first."""
    memory: Memory


def assign(
    engine: Engine, work: Work, workers: Sequence[Standing], memory: Memory, now_ns: int, *, least_prefill: int = 1
) -> Assigned:
    """Decide. Workers that are not movable, and those on standby, stay as they are and count for nothing."""
    pool = [each for each in workers if each.movable and each.role is not Role.STANDBY]
    prefill = [each for each in pool if each.role is Role.PREFILL]
    mixed = [each for each in pool if each.role is Role.MIXED]
    if not mixed or len(pool) < 2:
        nothing = Split(len(prefill), len(mixed), 0.0, 0.0)
        return Assigned((), None, nothing, nothing, (), memory)
    now = split(engine, work, len(prefill), len(mixed))
    weighed = sorted(splits(engine, work, len(pool), least_prefill=least_prefill), key=lambda each: each.cost)
    resting = {name: at_ns for name, at_ns in memory.moved_ns.items() if now_ns - at_ns < REST_NS}
    wanted = _more_mixed(now, weighed)
    changes = _role_changes(engine, wanted, [each for each in pool if each.id not in resting])
    code, then = None, now
    if changes:
        decodes = now.decode_pressure > min(now.prompt_pressure, DECODE_FULL)
        code = Code.DECODES_PRESS if decodes else Code.PROMPTS_PRESS
        to_mixed = sum(1 if change.role is Role.MIXED else -1 for change in changes)
        then = split(engine, work, len(prefill) - to_mixed, len(mixed) + to_mixed)
        resting |= dict.fromkeys((change.worker_id for change in changes), now_ns)
    alone = split(engine, work, len(prefill), len(mixed), budgets=False).prompt_pressure
    calm = alone < (LOWER if any(each.budget_tokens for each in mixed) else RAISE)
    calm_since_ns = (memory.calm_since_ns or now_ns) if calm else 0
    moving = {change.worker_id for change in changes}
    budgets = [
        change for each in mixed if each.id not in moving if (change := _budget(engine, each, calm_since_ns, now_ns))
    ]
    if budgets and code is None:
        code = Code.PROMPTS_PRESS if not calm_since_ns else Code.CALM
    found = Memory(MappingProxyType(resting), calm_since_ns)
    return Assigned((*changes, *budgets), code, now, then, weighed, found)


def _more_mixed(now: Split, weighed: Sequence[Split]) -> int:
    """How many workers are to go from prefill to mixed, or below 0 the other way."""
    if now.cost < PRESSES or not weighed or weighed[0].cost > now.cost * (1 - GAIN):
        return 0
    # Of splits that are as good as the best, the nearest: each move costs.
    good = [each for each in weighed if each.cost <= weighed[0].cost * (1 + GAIN / 3)]
    return min(good, key=lambda each: abs(each.mixed - now.mixed)).mixed - now.mixed


def _role_changes(engine: Engine, wanted: int, free: Sequence[Standing]) -> list[Change]:
    """Those go for whom it costs least."""
    if wanted > 0:
        ready = sorted((each for each in free if each.role is Role.PREFILL), key=lambda each: each.prompt_tokens)
        return [Change(each.id, Role.MIXED, engine.chunk_tokens) for each in ready[:wanted]]
    ready = sorted((each for each in free if each.role is Role.MIXED), key=lambda each: each.kv_tokens)
    return [Change(each.id, Role.PREFILL, 0) for each in ready[:-wanted]]


def _budget(engine: Engine, worker: Standing, calm_since_ns: int, now_ns: int) -> Change | None:
    if not calm_since_ns and not worker.budget_tokens:
        return Change(worker.id, Role.MIXED, engine.chunk_tokens)
    if calm_since_ns and now_ns - calm_since_ns >= CALM_NS and worker.budget_tokens:
        return Change(worker.id, Role.MIXED, 0)
    return None
