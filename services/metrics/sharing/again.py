"""Windows that could not be told in their time: only from when on is remembered, since roll-ups hold them. Pure."""

from collections.abc import Collection, Sequence

from libs.telemetry.history import MAX_FRESH, WrittenWindow
from libs.telemetry.ring import NO_ROLE
from libs.telemetry.rollups import RollUps, Series, Written
from libs.telemetry.timeline import PhaseTime


class Again:
    """A place in time, from which on windows are told again as they are known by then."""

    def __init__(self) -> None:
        self._from_ns: int | None = None

    def untold(self, windows: Sequence[WrittenWindow]) -> None:
        """These were not told, nor will be those that follow before the next `take`."""
        starts = [window.start_ns for window in windows]
        if self._from_ns is not None:
            starts.append(self._from_ns)
        self._from_ns = min(starts, default=None)

    def take(self, rollups: RollUps, workers: Collection[str], now_ns: int) -> list[WrittenWindow]:
        """The next `MAX_FRESH` windows of some workers; those that are no longer kept are lost."""
        if self._from_ns is None:
            return []
        tier = rollups.tiers[0]
        newest_ns = now_ns - now_ns % tier.window_ns
        from_ns = max(self._from_ns, newest_ns - tier.window_ns * tier.windows)
        to_ns = min(from_ns + MAX_FRESH * tier.window_ns, newest_ns)
        self._from_ns = to_ns if to_ns < newest_ns else None
        known = [worker_id for worker_id in rollups.worker_ids() if worker_id in workers]
        return _windows(rollups.read(tier.window_ns, from_ns, to_ns, known))


def _windows(series: Series) -> list[WrittenWindow]:
    """Of each window the workers of which something was written."""
    rows = zip(
        series.starts_ns.tolist(),
        series.times_ns.tolist(),
        series.roles.tolist(),
        series.provisional.tolist(),
        strict=True,
    )
    return [
        WrittenWindow(
            start_ns,
            [
                Written(worker_id, PhaseTime(covered, prefill, decode, kv_wait, provisional), role)
                for worker_id, (covered, prefill, decode, kv_wait), role, provisional in zip(
                    series.worker_ids, times, roles, flags, strict=True
                )
                if role != NO_ROLE
            ],
            revised=True,
        )
        for start_ns, times, roles, flags in rows
    ]
