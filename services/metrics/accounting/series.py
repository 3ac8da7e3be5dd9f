"""GPU time by phase of a scope, window by window. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.rollups import COVERED, DECODE, KV_WAIT, NO_ROLE, PREFILL, ROLE_NUMBERS, RollUps, Series, Tier
from libs.telemetry.workers import Members
from services.metrics.accounting.scope import Scope

CELLS_AT_ONCE: Final = 100_000
"""Windows x workers that are read between two turns of the event loop, a few ms."""
MS_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """GPU-nanoseconds by window: `prefill`, `decode`, `kv_wait` and `idle` add exactly to `covered`."""

    covered: list[int]
    prefill: list[int]
    decode: list[int]
    kv_wait: list[int]
    idle: list[int]


@dataclass(frozen=True, slots=True)
class OccupancyHistory:
    """Consecutive windows, the oldest first; every list has one entry for each window."""

    scope: str
    window_ms: int
    starts_unix_ms: list[int]
    gpu_ns: GpuTimes
    gpus: list[int]
    """GPUs in the scope that were present by then and not silent for five minutes, whether or not they are covered."""
    coverage: list[float]
    """Share of the time of `gpus` that telemetry covers; for the current window, of its time so far."""
    provisional: list[bool]
    """Whether the window is not over, or includes a step that still ran at the last report (in windows of 100 ms
    only).
    """
    roles: dict[str, list[int]]
    """GPUs by the role that their worker had at the end of the window."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The windows of a scope, summed over its workers."""

    starts_ns: NDArray[np.int64]
    times_ns: NDArray[np.int64]
    """[windows, 4] int64 in GPU-ns, as in `Cells.times_ns`."""
    roles: NDArray[np.int64]
    """[windows, roles] GPUs by role in the order of `ROLE_NAMES`."""
    provisional: NDArray[np.bool_]


def sums(members: Members, rollups: RollUps, scope: Scope, tier: Tier, bounds_ns: tuple[int, int]) -> Iterator[Sums]:
    """Yield a tier's windows within the bounds piece by piece, so that the event loop gets turns in between."""
    ids = scope.of(members, rollups.worker_ids())
    gpus = {worker_id: member.gpus for worker_id in ids if (member := members.get(worker_id))}
    low_ns, high_ns = bounds_ns
    step_ns = max(CELLS_AT_ONCE // max(len(ids), 1), 1) * tier.window_ns
    for start_ns in range(low_ns, max(high_ns, low_ns + 1), step_ns):  # at least one piece
        yield _sum(rollups.read(tier.window_ns, start_ns, min(start_ns + step_ns, high_ns), ids), gpus, scope.role)


def _sum(series: Series, gpus: Mapping[str, int], role: int | None) -> Sums:
    counts = series.roles != NO_ROLE if role is None else series.roles == role
    weights = np.array([gpus.get(worker_id, 1) for worker_id in series.worker_ids], np.int64)
    weighed = counts * weights  # [windows, workers] GPUs
    return Sums(
        series.starts_ns,
        np.einsum("nwp,nw->np", series.times_ns, weighed),
        np.stack([(weighed * (series.roles == ROLE_NUMBERS[name])).sum(1) for name in ROLE_NAMES], axis=1),
        (series.provisional & counts).any(axis=1),
    )


def history(pieces: list[Sums], scope: Scope, window_ns: int, written_to_ns: int) -> OccupancyHistory:
    """Join all pieces to one answer; windows are written up to `written_to_ns`."""
    starts_ns = np.concatenate([piece.starts_ns for piece in pieces])
    running = np.concatenate([piece.provisional for piece in pieces])
    over_ns = np.clip(written_to_ns - starts_ns, 0, window_ns)
    times = np.concatenate([piece.times_ns for piece in pieces])
    roles = np.concatenate([piece.roles for piece in pieces])
    gpus = roles.sum(axis=1)
    covered = times[:, COVERED]
    return OccupancyHistory(
        scope=scope.text,
        window_ms=window_ns // MS_NS,
        starts_unix_ms=(starts_ns // MS_NS).tolist(),
        gpu_ns=GpuTimes(
            covered=covered.tolist(),
            prefill=times[:, PREFILL].tolist(),
            decode=times[:, DECODE].tolist(),
            kv_wait=times[:, KV_WAIT].tolist(),
            idle=(covered - times[:, PREFILL] - times[:, DECODE] - times[:, KV_WAIT]).tolist(),
        ),
        gpus=gpus.tolist(),
        coverage=(covered / np.maximum(gpus * over_ns, 1)).tolist(),
        provisional=(running | ((over_ns < window_ns) & (gpus > 0))).tolist(),
        roles={name: roles[:, index].tolist() for index, name in enumerate(ROLE_NAMES)},
    )
