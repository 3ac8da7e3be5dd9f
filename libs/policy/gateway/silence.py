"""Which silent workers to leave because they are frozen, starved or cut off.

Silence counts only the time in which the gateway was listening. Time that it lost because its own machine was busy
does not count.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from libs.policy.gateway.view import WorkerView, serves

SILENT_MS = 350.0
"""The silence after which a worker's sequences go to other workers, if those can take them.

It is three and a half heartbeats, unless a setting overrides it.
"""
QUIET_SHARE = 2.0 / 3.5
"""The part of that silence after which new work goes to other workers, if there are any."""
MAX_AWAY_SHARE = 0.5
"""The share of a model's workers that may be left at once, at least one.

If more are quiet together, the network or this machine is the likelier cause, and they are left only after
`MAX_SILENT_MS`.
"""
MAX_SILENT_MS = 30_000.0
"""The silence after which a worker is left whatever becomes of its model, unless a setting overrides it.

It bounds the wait for a process whose event loop is stuck while its connections stay open.
"""


@dataclass(frozen=True, slots=True)
class Heard:
    """A connected worker and its silence, of which only a fifth counts if the worker is idle."""

    place: int
    """A number that distinguishes the worker from the others."""
    model: str
    silent_ms: float
    view: WorkerView | None
    """The worker's view; None if it accepts no new work."""


def whom_to_leave(
    heard: Sequence[Heard],
    away: Counter[str],
    silent_after_ms: float = SILENT_MS,
    max_silent_ms: float = MAX_SILENT_MS,
) -> list[Heard]:
    """Return the silent workers that the others can replace, and those silent for `max_silent_ms` in any case.

    `away` counts each model's workers that were left earlier and have not come back. Before `max_silent_ms` a
    worker is not left if its model would then be unserved, since waiting is all that can be done without a
    replacement.
    """
    leaving: list[Heard] = []
    for model in {each.model for each in heard}:
        of_model = [each for each in heard if each.model == model]
        rest = [each.view for each in of_model if each.silent_ms < silent_after_ms and each.view is not None]
        quiet = sum(each.silent_ms >= QUIET_SHARE * silent_after_ms for each in of_model) + away[model]
        few = quiet <= max(1, MAX_AWAY_SHARE * (len(of_model) + away[model]))
        bound_ms = silent_after_ms if few and serves(rest, model) else max_silent_ms
        leaving += [each for each in of_model if each.silent_ms >= bound_ms]
    return leaving
