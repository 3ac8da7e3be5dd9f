"""Windows of workers that another instance reads, and of which nobody tells any more. Pure."""

from typing import Final

from libs.contracts.roles import role_name
from libs.telemetry.cells import ROLE_NUMBERS
from libs.telemetry.fleet import Fleet
from libs.telemetry.history import MAX_FRESH, WrittenWindow
from libs.telemetry.phase_time import PhaseTime
from libs.telemetry.ring import NO_ROLE
from libs.telemetry.rollups import RollUps, Written

OVERDUE_NS: Final = 500_000_000
"""After the end of a window: an instance that lives has told of it by then."""


class Overdue:
    """Writes them as covered by nothing, so that they weigh on coverage; whatever is told later is more, and counts."""

    def __init__(self) -> None:
        self._to_ns = 0

    def write(self, fleet: Fleet, rollups: RollUps, now_ns: int) -> list[WrittenWindow]:
        """Those that have become overdue since the last call, at most `MAX_FRESH`."""
        length_ns = rollups.tiers[0].window_ns
        due_ns = now_ns - OVERDUE_NS
        due_ns -= due_ns % length_ns
        from_ns, self._to_ns = max(self._to_ns, due_ns - MAX_FRESH * length_ns), due_ns
        windows = (_write(fleet, rollups, start_ns, now_ns) for start_ns in range(from_ns, due_ns, length_ns))
        return [window for window in windows if window.workers]


def _write(fleet: Fleet, rollups: RollUps, start_ns: int, now_ns: int) -> WrittenWindow:
    length_ns = rollups.tiers[0].window_ns
    end_ns, known = start_ns + length_ns, set(rollups.worker_ids())
    silent = [facts for facts in fleet.roll.silent_elsewhere(end_ns, now_ns) if facts.worker_id in known]
    roles = rollups.read(length_ns, start_ns, end_ns, [facts.worker_id for facts in silent]).roles
    untold = [facts for facts, role in zip(silent, roles[0].tolist(), strict=True) if role == NO_ROLE]
    written = [Written(each.worker_id, PhaseTime(), ROLE_NUMBERS[role_name(each.assignment)]) for each in untold]
    return WrittenWindow(start_ns, rollups.write(start_ns, written, fuller=True), revised=True)
