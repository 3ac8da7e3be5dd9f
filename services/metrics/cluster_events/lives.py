"""Detection of workers that start, restart, leave, fall silent or report again. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import Final

from libs.contracts.roles import role_name
from libs.telemetry.workers import WorkerFacts

LOOK_NS: Final = 500_000_000
"""The interval between two checks of the workers."""
SILENT_NS: Final = 3_000_000_000
"""The silence, while others report, after which a worker is listed as silent. Workers report three to ten times a
second.
"""
YOUNG_NS: Final = 60_000_000_000
"""The age up to which a worker counts as new at its first report. An older one had only not been read before."""


class LifeChange(Enum):
    STARTED = "worker_started"
    RESTARTED = "worker_restarted"
    LEFT = "worker_left"
    LOST = "worker_lost"
    BACK = "worker_back"


@dataclass(frozen=True, slots=True)
class Life:
    """A change of one worker, with its reason in words."""

    change: LifeChange
    worker: str
    role: str
    reason: str


@dataclass(slots=True)
class _Known:
    incarnation: int
    covered_to_ns: int
    left: bool
    silent: bool


class WorkerLives:
    """The last known state of each worker, as many as the directory holds."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._looked_ns: int | None = None

    def look(self, workers: Iterable[WorkerFacts], newest_cover_ns: int, now_ns: int) -> list[Life]:
        """Return changes since the last check, made at most every `LOOK_NS`.

        Silence is measured against the newest report of any worker, so none is lost when all are silent. The first
        check returns nothing.
        """
        if self._looked_ns is not None and 0 <= now_ns - self._looked_ns < LOOK_NS:
            return []
        first, self._looked_ns = self._looked_ns is None, now_ns
        silent_since_ns = min(newest_cover_ns, now_ns) - SILENT_NS
        seen, found = set(), []
        for facts in workers:
            seen.add(facts.worker_id)
            known = self._known.get(facts.worker_id)
            silent = facts.covered_to_unix_ns < silent_since_ns and not facts.left
            reported = _new(facts, now_ns) if known is None else _changed(known, facts, silent=silent)
            self._known[facts.worker_id] = _Known(facts.incarnation, facts.covered_to_unix_ns, facts.left, silent)
            if reported is not None and not first:
                found.append(Life(reported[0], facts.worker_id, role_name(facts.assignment), reported[1]))
        for worker_id in self._known.keys() - seen:
            del self._known[worker_id]
        return found


def _new(facts: WorkerFacts, now_ns: int) -> tuple[LifeChange, str] | None:
    # An incarnation is the Unix time in ns at which a worker started.
    young = 0 <= now_ns - facts.incarnation < YOUNG_NS
    return (LifeChange.STARTED, "it is heard for the first time") if young and not facts.left else None


def _changed(known: _Known, facts: WorkerFacts, *, silent: bool) -> tuple[LifeChange, str] | None:
    if facts.incarnation > known.incarnation:
        away_s = max(facts.covered_to_unix_ns - known.covered_to_ns, 0) / 1e9
        how = "it had left in good order" if known.left else "it had gone without a word"
        return LifeChange.RESTARTED, f"back after {away_s:.1f} s; {how}"
    if facts.left and not known.left:
        return LifeChange.LEFT, "it has drained, and leaves in good order"
    if silent and not known.silent:
        return LifeChange.LOST, f"no telemetry for {SILENT_NS / 1e9:g} s, while others are heard"
    if known.silent and not silent and not facts.left:
        return LifeChange.BACK, "its telemetry comes again"
    return None


def together(lives: Iterable[Life]) -> Iterator[list[Life]]:
    """Group the changes of one check that are alike: eight workers of one host make one event."""
    order = sorted(lives, key=lambda life: (life.change.value, life.role, life.reason, life.worker))
    for _, alike in groupby(order, key=lambda life: (life.change, life.role, life.reason)):
        yield list(alike)
