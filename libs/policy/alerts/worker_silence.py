"""Silences that are a worker's own rather than common to all workers or to those of one reader.

A worker is not blamed while no worker reports or telemetry is late, nor just after, nor while its reader is silent.
"""

from typing import Final

from libs.policy.alerts.rules import AlertLimits
from libs.policy.alerts.snapshot import Snapshot, WorkerReport

# Share of the time after which a worker counts as silent. If no worker reported for this long, the cause is
# elsewhere.
ALL_SILENT_SHARE: Final = 0.5
# Workers find a returned broker within this time, some sooner than others. Instances that share telemetry take over
# the partitions of a lost one within it.
RETURN_NS: Final = 3 * 10**9


class CommonSilence:
    """The part of workers' silence that has a common cause; `note` must see every snapshot."""

    def __init__(self, limits: AlertLimits) -> None:
        self._long_ns = ALL_SILENT_SHARE * limits.stale_s.fire * 1e9
        self.all_silent = False
        """Whether nothing recent is known of most workers, so that nothing can be judged by it."""
        self._resumed_ns: int | None = None
        """The time at which the last common silence ended."""
        self._silent_readers: frozenset[str] = frozenset()

    def note(self, snapshot: Snapshot) -> None:
        staying = [worker for worker in snapshot.workers if not worker.left]
        silent = bool(staying) and max(snapshot.silent_ns or 0, snapshot.behind_ns) >= self._long_ns
        if self.all_silent and not silent:
            self._resumed_ns = snapshot.at_ns
        self.all_silent = silent
        heard = {worker.reader for worker in staying if worker.silent_ns < self._long_ns}
        self._silent_readers = frozenset(worker.reader for worker in staying) - heard if heard else frozenset()

    def own_silent_ns(self, worker: WorkerReport, now_ns: int) -> int:
        """Return how long the worker itself has been silent, without silences of its reader or of all workers."""
        silent_ns = worker.silent_ns
        if self._resumed_ns is not None:
            silent_ns = min(silent_ns, max(now_ns - self._resumed_ns - RETURN_NS, 0))
        return max(silent_ns - RETURN_NS, 0) if worker.reader in self._silent_readers else silent_ns
