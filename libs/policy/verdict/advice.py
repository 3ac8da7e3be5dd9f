"""The choice of workers to give another role when one phase is short and the other is not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from libs.policy.planner.role_planning import GAIN
from libs.policy.pressure.pools import RoleCounts
from libs.policy.pressure.splits import Split, prompt_speed, split
from libs.policy.roles import Role
from libs.policy.verdict.cause import Action
from libs.policy.verdict.state import ModelState, WorkerState, role_counts

# The smallest move that leaves at most this pressure is preferred.
GOOD: Final = 0.9
# This many standard errors of the prompts' rate on either side hold in seven of eight cases.
ERRORS: Final = 1.5
# Sequences end and begin while workers move, so decode pressure is uncertain by this share.
DECODE_ERROR: Final = 0.1
LEAST_ERROR: Final = 0.1
"""The least relative error of the prompts' pressure, however steadily they arrive."""

_Tried = tuple[Sequence[WorkerState], Split]
"""Workers to move, and the split that results."""


def advice(state: ModelState) -> Action | None:
    """Return the smallest move that leaves at most `GOOD`, or else the one that leaves least.

    If no move relieves pressure by `GAIN`, decode workers may compute prompts too. None means that nothing helps.
    """
    now = _split(state, role_counts(state.workers))
    best = _least(state, now)
    if best is not None and best[1].pressure <= 1:
        return _move(state, *best)
    lent = _lent(state)
    if lent is not None and lent[1].pressure < (best[1] if best else now).pressure * (1 - GAIN):
        return _action(state, *lent, "mixed", state.engine.chunk_tokens)
    return _move(state, *best) if best is not None else None


def _split(state: ModelState, counts: RoleCounts) -> Split:
    """Return the split for these counts, in which slow workers count for less than one.

    While prompts wait, computing them faster brings proportionally more decodes.
    """
    work, engine, now = state.work, state.engine, role_counts(state.workers)
    served = min(prompt_speed(engine, work, now.prefill, now.mixed, now.lending), work.prompts)
    then = min(prompt_speed(engine, work, counts.prefill, counts.mixed, counts.lending), work.prompts)
    if 0 < served < then:
        more = then / served
        work = replace(work, decodes=round(work.decodes * more), kv_tokens=round(work.kv_tokens * more))
    return split(engine, work, counts.prefill, counts.mixed, lending=counts.lending)


def _least(state: ModelState, now: Split) -> _Tried | None:
    """Return the best move, searching the ones of fewest workers first."""
    near = sorted([*_to_prefill(state), *_to_decode(state)], key=lambda each: len(each[0]))
    found = next((each for each in near if each[1].pressure <= GOOD), None)
    found = found or min(near, key=lambda each: each[1].pressure, default=None)
    return found if found is not None and found[1].pressure < now.pressure * (1 - GAIN) else None


def _to_prefill(state: ModelState) -> Iterator[_Tried]:
    """Yield moves of decode workers, adding one at a time, those with the least KV first; the last one stays."""
    order, counts = _cheapest(state.workers, Role.MIXED, lambda each: each.kv_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = RoleCounts(
            counts.prefill + each.speed, counts.mixed - each.speed, counts.lending - each.speed * each.lends
        )
        yield order[: number + 1], _split(state, counts)


def _to_decode(state: ModelState) -> Iterator[_Tried]:
    """Yield moves of prefill workers, adding one at a time, those with the fewest prompt tokens first."""
    order, counts = _cheapest(state.workers, Role.PREFILL, lambda each: each.prompt_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = RoleCounts(counts.prefill - each.speed, counts.mixed + each.speed, counts.lending)
        yield order[: number + 1], _split(state, counts)


def _lent(state: ModelState) -> _Tried | None:
    """Return all decode workers as computing prompts too; None if they already do."""
    counts = role_counts(state.workers)
    chosen = [each for each in state.workers if each.role is Role.MIXED and not each.budget_tokens]
    return (chosen, _split(state, replace(counts, lending=counts.mixed))) if chosen else None


def _move(state: ModelState, chosen: Sequence[WorkerState], then: Split) -> Action:
    role = "prefill" if chosen[0].role is Role.MIXED else "decode"
    return _action(state, chosen, then, role, 0)


def _action(state: ModelState, chosen: Sequence[WorkerState], then: Split, role: str, budget_tokens: int) -> Action:
    """Return the action with the predicted pressure and its range."""
    share = max(ERRORS * state.prompts_error, LEAST_ERROR)
    least = max(then.prompt_pressure * max(1 - share, 0.0), then.decode_pressure * (1 - DECODE_ERROR))
    most = max(then.prompt_pressure * (1 + share), then.decode_pressure * (1 + DECODE_ERROR))
    ids = tuple(sorted(each.id for each in chosen))
    return Action(ids, role, budget_tokens, then.pressure, (least, most))


def _cheapest(workers: Sequence[WorkerState], role: Role, cost: Callable[[WorkerState], int]) -> list[WorkerState]:
    """Sort the workers of a role by `cost`, slow ones last."""
    own = [each for each in workers if each.role is role]
    return sorted(own, key=lambda each: ((each.slowness or 1.0) > 1 + GAIN * 2, cost(each), each.id))
