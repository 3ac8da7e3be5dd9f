"""The decision core: from a snapshot and limits to a decision with its reason. Pure: no clock, no I/O, no logging.

It weighs one thing so far: how far apart the busy shares of prefill and decode are, and what a single move of a worker
would make of that. It always keeps, and says what it would weigh. A move is scored as if the work of the window had
been spread over the pools as they would then be; waiting work shows in the reason only.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from libs.policy.planner.snapshot import ClusterSnapshot, RolePool
from libs.policy.roles import Role

MAX_ALTERNATIVES: Final = 32
"""Moves listed in a decision, the best first."""
KEEP: Final = "keep"
REST_S: Final = 1.0
"""From one decision about a cluster at rest to the next, which says the same; those who read them know by it that the
planner lives."""
ROLE_WORDS: Final[Mapping[int, str]] = {Role.PREFILL: "prefill", Role.MIXED: "decode", Role.STANDBY: "standby"}
"""Of pools: mixed workers are in the decode pool."""


class Action(IntEnum):
    """What a record on the decisions topic is about, numbered as in proto/fulcrum/planner."""

    KEEP = 1
    SET_ROLE = 2
    ROLE_MOVED = 3
    """Seen, not decided: a worker has taken a role, whoever gave it."""
    SET_MODE = 4
    SET_BUDGET = 5


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """What a decision must hold to."""

    min_workers_per_pool: int = 1
    """A move must leave so many ready workers behind."""
    min_coverage: float = 0.5
    """Moves are weighed only for a model whose two pools are covered at least so far."""
    min_gain: float = 0.1
    """A move is worth a mention in the reason when it lowers the imbalance by so much."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Something that could be done, and the imbalance it would leave: 0 is balance, 1 one pool full and one idle.

    Above 1, a pool would get more work than it could do.
    """

    name: str
    score: float


@dataclass(frozen=True, slots=True)
class MovePlan:
    """What was decided, why, and what else was weighed, the choice first."""

    action: Action
    reason: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class _Sides:
    """Prefill and decode of one model, with the busy share of each."""

    prefill: RolePool
    decode: RolePool
    prefill_busy: float
    decode_busy: float

    @property
    def gpus(self) -> int:
        return self.prefill.gpus + self.decode.gpus

    @property
    def imbalance(self) -> float:
        return abs(self.prefill_busy - self.decode_busy)


def is_due(*, at_rest: bool, since_s: float, period_s: float) -> bool:
    """Whether to decide in this round, `since_s` after the last decision: in each of them, and every `REST_S` about a
    cluster at rest. Rounds come on a beat of periods: half of one is what they may be off."""
    return not at_rest or since_s >= REST_S - period_s / 2


def decide(snapshot: ClusterSnapshot, limits: MoveLimits) -> MovePlan:
    """What to do now. Scores are means over models, weighed by their GPUs."""
    if not snapshot.pools:
        return MovePlan(Action.KEEP, "keep: no workers are registered", ())
    described = "; ".join(_describe(pool) for pool in snapshot.pools)
    models = _weighable(snapshot.pools, limits)
    if not models:
        return MovePlan(
            Action.KEEP,
            f"keep: {described}. Nothing to weigh: no model has both prefill and decode with telemetry of at least "
            f"{limits.min_coverage:.0%} of the last {snapshot.window_ms} ms (it tells of {snapshot.coverage:.0%})",
            (),
        )
    gpus = sum(sides.gpus for sides in models)
    now = sum(sides.imbalance * sides.gpus for sides in models) / gpus
    moves = [
        Alternative(name, now + (after - sides.imbalance) * sides.gpus / gpus)
        for sides in models
        for name, after in _moves(sides, limits)
    ]
    moves.sort(key=lambda move: (move.score, move.name))
    reason = f"keep: {described}. {_weigh(now, moves, limits)}"
    return MovePlan(Action.KEEP, reason, (Alternative(KEEP, now), *moves[:MAX_ALTERNATIVES]))


def _weighable(pools: Iterable[RolePool], limits: MoveLimits) -> list[_Sides]:
    by_key = {(pool.model, pool.role): pool for pool in pools}
    found = []
    for model in sorted({pool.model for pool in pools}):
        prefill, decode = by_key.get((model, Role.PREFILL)), by_key.get((model, Role.MIXED))
        if prefill is None or decode is None or prefill.busy is None or decode.busy is None:
            continue
        if min(prefill.coverage, decode.coverage) >= limits.min_coverage:
            found.append(_Sides(prefill, decode, prefill.busy, decode.busy))
    return found


def _moves(sides: _Sides, limits: MoveLimits) -> Iterator[tuple[str, float]]:
    """Every single move that limits allow, with the imbalance of the model after it."""
    prefill_work, decode_work = sides.prefill_busy * sides.prefill.gpus, sides.decode_busy * sides.decode.gpus
    for source, to_word, sign in ((sides.prefill, "decode", -1), (sides.decode, "prefill", 1)):
        ready = [worker for worker in source.workers if worker.movable]
        if len(ready) <= limits.min_workers_per_pool:
            continue
        for worker in ready:
            moved = sign * worker.gpus
            after = abs(prefill_work / (sides.prefill.gpus + moved) - decode_work / (sides.decode.gpus - moved))
            yield f"{worker.id} to {to_word}", after


def _weigh(now: float, moves: list[Alternative], limits: MoveLimits) -> str:
    if not moves:
        return f"Imbalance {now:.2f}; no worker can move without leaving its pool too small"
    best = moves[0]
    if now - best.score < limits.min_gain:
        return f"Imbalance {now:.2f}; no single move lowers it by {limits.min_gain:.2f} or more"
    return f"Imbalance {now:.2f}; worth weighing: {best.name}, which would leave {best.score:.2f}"


def _describe(pool: RolePool) -> str:
    busy = "busy unknown" if pool.busy is None else f"{pool.busy:.0%} busy"
    role = "no role" if pool.role is None else ROLE_WORDS[pool.role]
    return (
        f"{pool.model} {role}: {len(pool.workers)} workers on {pool.gpus} GPUs, {busy}, {pool.running} running, "
        f"{pool.waiting} waiting with {pool.waiting_prefill_tokens} prompt tokens"
    )
