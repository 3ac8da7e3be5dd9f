"""Which workers to give another role, when one phase is short and the other is not. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from libs.policy.planner.role_planning import GAIN
from libs.policy.pressure.pools import RoleCounts
from libs.policy.pressure.splits import Split, prompt_speed, split
from libs.policy.roles import Role
from libs.policy.verdict.cause import Action
from libs.policy.verdict.state import ModelState, WorkerState, role_counts

GOOD: Final = 0.9
"""Pressure that a move is to leave: among those that do, the one of fewest workers."""
ERRORS: Final = 1.5
"""Standard errors of the prompts' rate on either side of what a move is predicted to leave: seven times in eight it
does."""
DECODE_ERROR: Final = 0.1
"""Of the decodes' pressure: sequences end and begin while workers move."""
LEAST_ERROR: Final = 0.1
"""Of the prompts' pressure, however steady they come."""

_Tried = tuple[Sequence[WorkerState], Split]
"""Workers that move, and what that leaves."""


def advice(state: ModelState) -> Action | None:
    """The fewest workers whose move leaves `GOOD`, else those that leave least; None where no move relieves by
    `GAIN`. Where no move does, decode workers that compute prompts too may."""
    now = _split(state, role_counts(state.workers))
    best = _least(state, now)
    if best is not None and best[1].pressure <= 1:
        return _move(state, *best)
    lent = _lent(state)
    if lent is not None and lent[1].pressure < (best[1] if best else now).pressure * (1 - GAIN):
        return _action(state, *lent, "mixed", state.engine.chunk_tokens)
    return _move(state, *best) if best is not None else None


def _split(state: ModelState, counts: RoleCounts) -> Split:
    """With workers that count by their speed. Where prompts wait, prompts that are computed faster bring as many more
    decodes."""
    work, engine, now = state.work, state.engine, role_counts(state.workers)
    served = min(prompt_speed(engine, work, now.prefill, now.mixed, now.lending), work.prompts)
    then = min(prompt_speed(engine, work, counts.prefill, counts.mixed, counts.lending), work.prompts)
    if 0 < served < then:
        more = then / served
        work = replace(work, decodes=round(work.decodes * more), kv_tokens=round(work.kv_tokens * more))
    return split(engine, work, counts.prefill, counts.mixed, lending=counts.lending)


def _least(state: ModelState, now: Split) -> _Tried | None:
    """Numbers of workers that may move, the fewest first."""
    near = sorted([*_to_prefill(state), *_to_decode(state)], key=lambda each: len(each[0]))
    found = next((each for each in near if each[1].pressure <= GOOD), None)
    found = found or min(near, key=lambda each: each[1].pressure, default=None)
    return found if found is not None and found[1].pressure < now.pressure * (1 - GAIN) else None


def _to_prefill(state: ModelState) -> Iterator[_Tried]:
    """One decode worker more each time, those with least to carry away first; the last one stays."""
    order, counts = _cheapest(state.workers, Role.MIXED, lambda each: each.kv_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = RoleCounts(
            counts.prefill + each.speed, counts.mixed - each.speed, counts.lending - each.speed * each.lends
        )
        yield order[: number + 1], _split(state, counts)


def _to_decode(state: ModelState) -> Iterator[_Tried]:
    """The same of prefill workers."""
    order, counts = _cheapest(state.workers, Role.PREFILL, lambda each: each.prompt_tokens), role_counts(state.workers)
    for number, each in enumerate(order[:-1]):
        counts = RoleCounts(counts.prefill - each.speed, counts.mixed + each.speed, counts.lending)
        yield order[: number + 1], _split(state, counts)


def _lent(state: ModelState) -> _Tried | None:
    """All decode workers compute prompts too; None where they do."""
    counts = role_counts(state.workers)
    chosen = [each for each in state.workers if each.role is Role.MIXED and not each.budget_tokens]
    return (chosen, _split(state, replace(counts, lending=counts.mixed))) if chosen else None


def _move(state: ModelState, chosen: Sequence[WorkerState], then: Split) -> Action:
    role = "prefill" if chosen[0].role is Role.MIXED else "decode"
    return _action(state, chosen, then, role, 0)


def _action(state: ModelState, chosen: Sequence[WorkerState], then: Split, role: str, budget_tokens: int) -> Action:
    """With what it leaves, and the range that this is promised in."""
    share = max(ERRORS * state.prompts_error, LEAST_ERROR)
    least = max(then.prompt_pressure * max(1 - share, 0.0), then.decode_pressure * (1 - DECODE_ERROR))
    most = max(then.prompt_pressure * (1 + share), then.decode_pressure * (1 + DECODE_ERROR))
    ids = tuple(sorted(each.id for each in chosen))
    return Action(ids, role, budget_tokens, then.pressure, (least, most))


def _cheapest(workers: Sequence[WorkerState], role: Role, cost: Callable[[WorkerState], int]) -> list[WorkerState]:
    """Slow ones last."""
    own = [each for each in workers if each.role is role]
    return sorted(own, key=lambda each: ((each.slowness or 1.0) > 1 + GAIN * 2, cost(each), each.id))
