"""A worker's time in a span divided by the roles that it had then, window by window. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.windows.cells import COVERED, DECODE, KV_WAIT, PREFILL
from libs.telemetry.windows.ring import NO_ROLE
from libs.telemetry.windows.rollups import Series
from libs.telemetry.worker.phase_time import PhaseTime


@dataclass(frozen=True, slots=True)
class RoleGpuTime:
    """A worker's GPU time while it had one role."""

    role: str
    gpus: int
    time: PhaseTime
    """Time by phase in GPU-nanoseconds."""
    due_ns: int
    """GPU-nanoseconds that the worker's telemetry should cover."""
    runs_ns: list[tuple[int, int]]
    """The windows as [low, high) in Unix ns, with neighbours joined."""


def role_text(number: int) -> str:
    """Return the name of a role's number in windows; empty for `NO_ROLE`."""
    return "" if number == NO_ROLE else ROLE_NAMES[number - NO_ROLE - 1]


def last_roles(roles: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return each worker's last written role [workers] from roles [windows, workers]; `NO_ROLE` if there is none."""
    from_the_end = roles[::-1]
    latest = (from_the_end != NO_ROLE).argmax(axis=0)
    last: NDArray[np.uint8] = from_the_end[latest, np.arange(roles.shape[1])]
    return last


def moved(roles: NDArray[np.uint8], last: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask [workers] of those with more than one role in [windows, workers]."""
    found: NDArray[np.bool_] = ((roles != last) & (roles != NO_ROLE)).any(axis=0)
    return found


def parts_of(series: Series, place: int, due: NDArray[np.bool_], gpus: int) -> list[RoleGpuTime]:
    """Return the time of the worker at `place` by role, in order of role.

    `due` [windows] marks the windows that telemetry should cover. Where nothing is written they count for the last
    role.
    """
    written = series.roles[:, place]
    last = last_roles(written[:, None])[0]
    roles = np.where(written != NO_ROLE, written, np.where(due, last, NO_ROLE))
    parts = []
    for number in np.unique(roles[roles != NO_ROLE]).tolist():
        then = roles == number
        times = series.times_ns[then, place].sum(axis=0).tolist()
        running = bool(series.provisional[then, place].any())
        time = PhaseTime(times[COVERED], times[PREFILL], times[DECODE], times[KV_WAIT], running).times(gpus)
        due_ns = int((due & then).sum()) * series.window_ns * gpus
        parts.append(RoleGpuTime(role_text(number), gpus, time, due_ns, _runs(series, then)))
    return sorted(parts, key=lambda part: part.role)


def _runs(series: Series, then: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(then.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    first_ns = int(series.starts_ns[0])
    return [(first_ns + low * series.window_ns, first_ns + high * series.window_ns) for low, high in edges.tolist()]
