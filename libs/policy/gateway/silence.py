"""Which silent workers are left: frozen, starved, or cut off. Pure.

Silence is measured in time that the gateway was there to listen in. What it spent late, because its own machine was
busy, counts for nobody's silence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from libs.policy.gateway.view import WorkerView, serves

SILENT_MS = 350.0
"""After three and a half signs of life, unless a setting says otherwise, what runs there goes to other workers, where
they can take it."""
QUIET_SHARE = 2.0 / 3.5
"""After this part of it new work goes to other workers, where there are any."""
MAX_AWAY_SHARE = 0.5
"""Of a model's workers, one at least. More that are quiet at once say more of the network, or of this machine, than of
workers: then nobody is left so soon."""
MAX_SILENT_MS = 30_000.0
"""After so long, unless a setting says otherwise, a worker is left whatever becomes of its model: a loop that is stuck
for ever in a process whose connections live is not waited for without end."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One connected worker, and how long it has said nothing; a fifth of it where it has no work."""

    place: int
    """Tells it from others."""
    model: str
    silent_ms: float
    view: WorkerView | None
    """None when it takes no new work."""


def whom_to_leave(
    heard: Sequence[Heard],
    away: Counter[str],
    silent_after_ms: float = SILENT_MS,
    max_silent_ms: float = MAX_SILENT_MS,
) -> list[Heard]:
    """Silent workers that the others can do without, and those that have been silent for too long anyway.

    `away`: workers of each model that were left before and have not come back. Until `max_silent_ms` nobody is left
    whose model would then not be served: as long as there is no one else, waiting is all that can be done.
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
