"""The state of every worker, from its registration, telemetry and incarnation. Pure."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

# Workers report three to ten times a second, even at rest.
SILENT_AFTER_NS: Final = 2_000_000_000
"""The silence, while others report, after which a worker is silent."""
# By then other workers have taken over its work, so nothing waits for it.
GONE_AFTER_NS: Final = 60_000_000_000
# The time within which a ready worker reports; one that does not is silent.
FIRST_REPORT_NS: Final = 10_000_000_000
BACK_FOR_NS: Final = 5_000_000_000
"""The time for which a worker that was away is listed as back."""


class LifeState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    SILENT = "silent"
    RESTARTING = "restarting"
    GONE = "gone"
    BACK = "back"


SERVING: Final = frozenset((LifeState.RUNNING, LifeState.BACK))
"""The states of workers that pools count."""


class LifeSigns(NamedTuple):
    """The evidence about one worker. Times are Unix ns on one clock."""

    incarnation: int
    """The time at which the worker's process started."""
    reported_ns: int
    """The end of the telemetry of this incarnation; 0 before its first report."""
    left: bool = False
    """True if the worker has announced its end in a last batch."""
    leased: bool = True
    """True if the worker is registered; readers without a registry assume it."""
    ready: bool = True


class WorkerLife(NamedTuple):
    """One worker's state and the time of its last change."""

    state: LifeState
    since_ns: int
    incarnation: int
    returned_ns: int = 0
    """The end of the first telemetry after its last absence; 0 if it was never away."""
    seen_ns: int = 0
    """The time at which this incarnation was first seen."""


def life_of(
    signs: LifeSigns, before: WorkerLife | None, newest_ns: int, now_ns: int, resumed_ns: int = 0
) -> WorkerLife:
    """Return a worker's state, given `before`, its previous state; None if it is new.

    Silence is measured against `newest_ns`, the newest telemetry of any worker, since a silence of all workers has
    another cause. `resumed_ns` is when the last silence of all ended; from then on each worker has the usual time to
    report.
    """
    returned_ns = before.returned_ns if before is not None else 0
    state, since_ns = _now(signs, before, min(newest_ns, now_ns), now_ns, resumed_ns)
    if state is LifeState.BACK and (before is None or before.state is not LifeState.BACK or _is_newer(signs, before)):
        returned_ns = signs.reported_ns
    if before is not None and before.state is state and not _is_newer(signs, before):
        since_ns = before.since_ns
    return WorkerLife(state, since_ns, signs.incarnation, returned_ns, _seen_ns(signs, before, now_ns))


def _now(
    signs: LifeSigns, before: WorkerLife | None, newest_ns: int, now_ns: int, resumed_ns: int
) -> tuple[LifeState, int]:
    if not signs.reported_ns:
        return _unreported(signs, before, newest_ns, now_ns)
    if signs.left:
        return LifeState.GONE, signs.reported_ns
    serves = before is not None and before.state in SERVING
    silent_ns = newest_ns - (max(signs.reported_ns, resumed_ns) if serves else signs.reported_ns)
    if silent_ns > GONE_AFTER_NS:
        return LifeState.GONE, signs.reported_ns
    if silent_ns > SILENT_AFTER_NS:
        return LifeState.SILENT, signs.reported_ns
    if not signs.ready:
        return LifeState.STARTING, signs.incarnation
    if before is None:
        return LifeState.RUNNING, min(signs.incarnation, now_ns)
    if _is_newer(signs, before) or before.state not in (LifeState.STARTING, *SERVING):
        return LifeState.BACK, now_ns
    if before.state is LifeState.BACK and now_ns - before.since_ns < BACK_FOR_NS:
        return LifeState.BACK, before.since_ns
    return LifeState.RUNNING, before.since_ns


def _unreported(signs: LifeSigns, before: WorkerLife | None, newest_ns: int, now_ns: int) -> tuple[LifeState, int]:
    """Return the state of a worker whose present incarnation has reported nothing."""
    if not signs.leased:
        return LifeState.GONE, now_ns
    began_ns = min(signs.incarnation, now_ns)
    late = newest_ns - max(signs.incarnation, _seen_ns(signs, before, now_ns)) > FIRST_REPORT_NS
    # A worker whose lease ran out registers before it reports.
    stays = before is not None and before.state is LifeState.SILENT and not _is_newer(signs, before)
    if signs.ready and (late or stays):
        return LifeState.SILENT, began_ns
    if before is not None and (_is_newer(signs, before) or before.state is LifeState.RESTARTING):
        return LifeState.RESTARTING, began_ns
    # Until telemetry has been read, the registry decides.
    if signs.ready and (not newest_ns or now_ns - signs.incarnation > FIRST_REPORT_NS):
        return LifeState.RUNNING, began_ns
    return LifeState.STARTING, began_ns


def _seen_ns(signs: LifeSigns, before: WorkerLife | None, now_ns: int) -> int:
    return now_ns if before is None or _is_newer(signs, before) else before.seen_ns


def _is_newer(signs: LifeSigns, before: WorkerLife) -> bool:
    return signs.incarnation > before.incarnation


# The bound on remembered workers that are no longer registered; the one missing longest is forgotten first.
MAX_ABSENT: Final = 4_096


class LifeWatch:
    """The states of workers over successive evaluations. A worker that disappears is remembered until it is gone."""

    def __init__(self) -> None:
        self.known: dict[str, WorkerLife] = {}
        self._signs: dict[str, LifeSigns] = {}
        self._newest_ns = 0
        self._advanced_ns = 0
        """The last evaluation at which the newest telemetry was newer than before."""
        self._all_silent = False
        self._resumed_ns = 0
        """The evaluation at which the last silence of all workers ended."""

    def look(self, signs: Mapping[str, LifeSigns], newest_ns: int, now_ns: int) -> None:
        """Process the evidence about all current workers."""
        absent = {
            name: each._replace(leased=False)
            for name, each in self._signs.items()
            if name not in signs and self.known[name].state is not LifeState.GONE
        }
        named = {
            name: each if each.reported_ns else self._with_earlier_report(name, each) for name, each in signs.items()
        }
        self._signs = {**dict(list(absent.items())[-MAX_ABSENT:]), **named}
        if newest_ns > self._newest_ns:
            if self._all_silent:  # workers that a broker had cut off report again one by one
                self._resumed_ns, self._all_silent = now_ns, False
            self._newest_ns, self._advanced_ns = newest_ns, now_ns
        elif self._newest_ns and now_ns - self._advanced_ns > SILENT_AFTER_NS:
            self._all_silent = True
        self.known = {
            name: life_of(each, self.known.get(name), newest_ns, now_ns, self._resumed_ns)
            for name, each in self._signs.items()
        }

    def _with_earlier_report(self, name: str, signs: LifeSigns) -> LifeSigns:
        # A registry that was away returns without workers, although their telemetry continued.
        before = self._signs.get(name)
        if before is None or before.incarnation != signs.incarnation or not signs.ready:
            return signs
        return signs._replace(reported_ns=before.reported_ns)

    def serves(self, worker_id: str) -> bool:
        life = self.known.get(worker_id)
        return life is not None and life.state in SERVING

    def returned_ns(self, worker_id: str) -> int:
        life = self.known.get(worker_id)
        return life.returned_ns if life is not None else 0


def newest_of(signs: Iterable[LifeSigns]) -> int:
    """Return the Unix ns of the newest telemetry of workers that have not left; 0 if there are none."""
    return max((each.reported_ns for each in signs if not each.left), default=0)
