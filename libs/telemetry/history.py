"""Keeps roll-ups true to the fleet: a window is written when its time has come, and again when something late changes
it. Pure; time is passed in."""

from collections import defaultdict

from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import StepBatch
from libs.contracts.roles import ROLE_NAMES, role_name
from libs.telemetry.fleet import Fleet
from libs.telemetry.rollups import RollUps, Written

MAX_REVISED = 65_536
"""Windows waiting to be written again, of one worker each; further ones keep what they had, which is counted."""


class History:
    """Follows a fleet, window by window."""

    def __init__(self, fleet: Fleet, rollups: RollUps) -> None:
        self._fleet = fleet
        self._rollups = rollups
        self._window_ns = rollups.tiers[0].window_ns
        self._kept_ns = self._window_ns * rollups.tiers[0].windows
        self._written_to_ns: int | None = None
        self._revised: dict[int, set[str]] = defaultdict(set)
        self._waiting = 0
        self.unrevised_windows = 0
        """Changed by late telemetry and left as they were, for want of room to note it."""

    def note(self, batch: StepBatch) -> None:
        """A batch was counted by the fleet: windows that were written before it came are written again."""
        if self._written_to_ns is None:
            return
        starts = [step.start_unix_ns for step in batch.steps]
        oldest_ns = self._written_to_ns - self._kept_ns
        low_ns = max(min([batch.covered_from_unix_ns, *starts]), oldest_ns)
        high_ns = min(batch.covered_to_unix_ns, self._written_to_ns)
        for start_ns in range(low_ns // self._window_ns * self._window_ns, high_ns, self._window_ns):
            waiting = self._revised[start_ns]
            if batch.worker_id in waiting:
                continue
            if self._waiting >= MAX_REVISED:
                self.unrevised_windows += 1
                continue
            waiting.add(batch.worker_id)
            self._waiting += 1

    def advance(self, end_ns: int) -> list[int]:
        """Write what has changed, and all windows that end by `end_ns`; the starts of those written, in order."""
        end_ns -= end_ns % self._window_ns
        written_to_ns = end_ns - self._window_ns if self._written_to_ns is None else self._written_to_ns
        revised, self._revised, self._waiting = self._revised, defaultdict(set), 0
        for start_ns, worker_ids in revised.items():
            self._write(start_ns, sorted(worker_ids))
        # After a pause only what is kept is worth writing.
        fresh = range(max(written_to_ns, end_ns - self._kept_ns), end_ns, self._window_ns)
        for start_ns in fresh:
            self._write(start_ns, [facts.worker_id for facts in self._fleet.listed(end_ns)])
        self._written_to_ns = max(written_to_ns, end_ns)
        return sorted({*revised, *fresh})

    def _write(self, start_ns: int, worker_ids: list[str]) -> None:
        written = []
        for worker_id in worker_ids:
            facts = self._fleet.facts(worker_id)
            if facts is None:
                continue
            time = self._fleet.phases(worker_id, start_ns, start_ns + self._window_ns)
            written.append(Written(worker_id, time, 1 + ROLE_NAMES.index(role_name(facts.assignment))))
        self._rollups.write(start_ns, written)
