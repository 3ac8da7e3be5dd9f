"""Windows of workers that another instance reads but no longer reports. Pure."""

from typing import Final

from libs.contracts.roles import role_name
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.history import MAX_FRESH, WrittenWindow
from libs.telemetry.windows.cells import ROLE_NUMBERS
from libs.telemetry.windows.ring import NO_ROLE
from libs.telemetry.windows.rollups import RollUps, Written
from libs.telemetry.worker.phase_time import PhaseTime

OVERDUE_NS: Final = 500_000_000
"""The time after a window's end by which a live instance has sent it."""


class Overdue:
    """The writer of overdue windows as uncovered, which lowers coverage until a later report replaces them."""

    def __init__(self) -> None:
        self._to_ns = 0

    def write(self, fleet: FleetTelemetry, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Return the windows that have become overdue since the last call, at most `MAX_FRESH`."""
        length_ns = rollups.tiers[0].window_ns
        due_ns = now_ns - OVERDUE_NS
        due_ns -= due_ns % length_ns
        from_ns, self._to_ns = max(self._to_ns, due_ns - MAX_FRESH * length_ns), due_ns
        windows = (_write(fleet, rollups, start_ns, now_ns) for start_ns in range(from_ns, due_ns, length_ns))
        return [window for window in windows if window.workers]


def _write(fleet: FleetTelemetry, rollups: RollUps, start_ns: int, now_ns: int) -> WrittenWindow:
    length_ns = rollups.tiers[0].window_ns
    end_ns, known = start_ns + length_ns, set(rollups.worker_ids())
    silent = [facts for facts in fleet.directory.silent_elsewhere(end_ns, now_ns) if facts.worker_id in known]
    roles = rollups.read(length_ns, start_ns, end_ns, [facts.worker_id for facts in silent]).roles
    unreported = [facts for facts, role in zip(silent, roles[0].tolist(), strict=True) if role == NO_ROLE]
    written = [Written(each.worker_id, PhaseTime(), ROLE_NUMBERS[role_name(each.assignment)]) for each in unreported]
    return WrittenWindow(start_ns, rollups.write(start_ns, written, fuller=True), revised=True)
