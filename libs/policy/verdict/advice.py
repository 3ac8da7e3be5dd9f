"""Which workers to give another role, when one phase is short and the other is not. Pure."""

from collections.abc import Callable, Sequence
from typing import Final

from libs.policy.planner.role_planning import GAIN
from libs.policy.pressure.splits import Split, split
from libs.policy.roles import Role
from libs.policy.verdict.cause import Action
from libs.policy.verdict.state import ModelState, WorkerState

GOOD: Final = 0.9
"""Pressure that a move is to leave: among those that do, the one of fewest workers."""


def advice(state: ModelState) -> Action | None:
    """The fewest workers whose move leaves `GOOD`, else those that leave least; None where no move relieves by
    `GAIN`. Where no move does, decode workers that compute prompts too may."""
    now = _split(state, state.prefill, state.lending)
    best = _least(state, now)
    if best is not None and best.pressure <= 1:
        return _move(state, best)
    lent = _split(state, state.prefill, state.mixed)
    if state.lending < state.mixed and lent.pressure < (best or now).pressure * (1 - GAIN):
        return _lend(state, lent)
    return _move(state, best) if best is not None else None


def _split(state: ModelState, prefill: int, lending: int) -> Split:
    return split(state.engine, state.work, prefill, state.standing.workers - prefill, lending=lending)


def _least(state: ModelState, now: Split) -> Split | None:
    """Of all numbers of prefill workers; a worker that leaves decode lends no more."""
    workers = state.prefill + state.mixed
    tried = [
        _split(state, prefill, min(state.lending, workers - prefill))
        for prefill in range(min(state.prefill, 1), workers)
        if prefill != state.prefill
    ]
    near = sorted(tried, key=lambda each: abs(each.prefill - state.prefill))
    found = next((each for each in near if each.pressure <= GOOD), None)
    found = found or min(near, key=lambda each: each.pressure, default=None)
    return found if found is not None and found.pressure < now.pressure * (1 - GAIN) else None


def _move(state: ModelState, then: Split) -> Action:
    """Those with least to carry away go, slow ones last."""
    change = then.prefill - state.prefill
    if change > 0:
        chosen = _cheapest(state.workers, Role.MIXED, lambda each: each.kv_tokens)[:change]
        return Action(_ids(chosen), "prefill", 0, then.pressure)
    chosen = _cheapest(state.workers, Role.PREFILL, lambda each: each.prompt_tokens)[:-change]
    return Action(_ids(chosen), "decode", 0, then.pressure)


def _lend(state: ModelState, then: Split) -> Action:
    chosen = [each for each in state.workers if each.role is Role.MIXED and not each.budget_tokens]
    return Action(_ids(chosen), "mixed", state.engine.chunk_tokens, then.pressure)


def _cheapest(workers: Sequence[WorkerState], role: Role, cost: Callable[[WorkerState], int]) -> list[WorkerState]:
    own = [each for each in workers if each.role is role]
    return sorted(own, key=lambda each: ((each.slowness or 1.0) > 1 + GAIN * 2, cost(each), each.id))


def _ids(workers: Sequence[WorkerState]) -> tuple[str, ...]:
    return tuple(sorted(each.id for each in workers))
