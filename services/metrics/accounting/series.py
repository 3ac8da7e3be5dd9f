"""GPU time by phase of a scope, window by window, with the scopes and durations that users write. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import InvalidRequest
from libs.contracts.roles import ROLE_NAMES
from libs.telemetry.rollups import (
    COVERED,
    DECODE,
    KV_WAIT,
    NO_ROLE,
    PREFILL,
    ROLE_NUMBERS,
    TIERS,
    RollUps,
    Series,
    Tier,
)
from libs.telemetry.workers import Member, Members

ALLOWED_SCOPES: Final = f"cluster, model:NAME, pool:{'|'.join(ROLE_NAMES)}, node:NAME, group:MODEL/NAME or worker:ID"
MAX_NAMES: Final = 8
"""The maximum number of existing names that an error lists."""
_OF_WORKER: Final[dict[str, Callable[[Member], str]]] = {
    "model": lambda member: member.model,
    "node": lambda member: member.node,
    "group": lambda member: member.group_name,
    "worker": lambda member: member.worker_id,
}


@dataclass(frozen=True, slots=True)
class Scope:
    """A requested scope.

    A pool is matched by the role that a worker had in each window, all others by the worker's last report.
    """

    text: str
    kind: str = "cluster"
    name: str = ""

    @property
    def role(self) -> int | None:
        """The number of the pool's role in roll-ups; None if workers of every role count."""
        return ROLE_NUMBERS[self.name] if self.kind == "pool" else None

    def of(self, members: Members, worker_ids: Sequence[str]) -> list[str]:
        """Return the workers among `worker_ids` that may count. Raise InvalidRequest if the scope's name does not
        exist.
        """
        attribute = _OF_WORKER.get(self.kind)
        if attribute is None:
            return list(worker_ids)
        names = {worker_id: attribute(member) for worker_id in worker_ids if (member := members.get(worker_id))}
        names = {worker_id: name for worker_id, name in names.items() if name}  # most workers have no group
        found = [worker_id for worker_id, name in names.items() if name == self.name]
        if not found:
            known = sorted(set(names.values()))
            more = ", ..." if len(known) > MAX_NAMES else ""
            raise InvalidRequest(
                f"scope={self.text[:80]!r}: there is no such {self.kind}; known: "
                f"{', '.join(known[:MAX_NAMES]) or 'none'}{more}",
                param="scope",
            )
        return found


def parse_scope(text: str) -> Scope:
    """Parse "cluster" or "kind:name". Raise InvalidRequest, which names the allowed forms."""
    kind, _, name = text.strip().partition(":")
    if kind == "cluster" and not name:
        return Scope(text)
    if (kind == "pool" and name in ROLE_NAMES) or (kind in _OF_WORKER and name):
        return Scope(text, kind, name)
    raise InvalidRequest(f"scope={text[:80]!r} is not {ALLOWED_SCOPES}", param="scope")


CELLS_AT_ONCE: Final = 100_000
"""Windows x workers that are read between two turns of the event loop, a few ms."""
MS_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class GpuTimes:
    """GPU-nanoseconds by window: `prefill`, `decode`, `kv_wait` and `idle` add exactly to `covered`.

    `encode` is the part of `prefill` in steps that encoded images.
    """

    covered: list[int]
    prefill: list[int]
    decode: list[int]
    kv_wait: list[int]
    idle: list[int]
    encode: list[int]


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
    """The share of the time of `gpus` that telemetry covers; for the current window, of its time so far."""
    provisional: list[bool]
    """True if the window is not over, or includes a step that still ran at the last report (in windows of 100 ms
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
    encode_ns: NDArray[np.int64]
    """[windows] int64 in GPU-ns: the part of prefill in steps that encoded images."""
    roles: NDArray[np.int64]
    """[windows, roles] GPUs by role in the order of `ROLE_NAMES`."""
    provisional: NDArray[np.bool_]


def sums(members: Members, rollups: RollUps, scope: Scope, tier: Tier, bounds_ns: tuple[int, int]) -> Iterator[Sums]:
    """Yield a tier's windows within the bounds piece by piece, so that the event loop gets turns in between."""
    ids = scope.of(members, rollups.worker_ids())
    gpus = {worker_id: member.gpus for worker_id in ids if (member := members.get(worker_id))}
    low_ns, high_ns = bounds_ns
    step_ns = max(CELLS_AT_ONCE // max(len(ids), 1), 1) * tier.window_ns
    for start_ns in range(low_ns, max(high_ns, low_ns + 1), step_ns):  # yields at least one piece
        yield _sum(rollups.read(tier.window_ns, start_ns, min(start_ns + step_ns, high_ns), ids), gpus, scope.role)


def _sum(series: Series, gpus: Mapping[str, int], role: int | None) -> Sums:
    counts = series.roles != NO_ROLE if role is None else series.roles == role
    weights = np.array([gpus.get(worker_id, 1) for worker_id in series.worker_ids], np.int64)
    weighed = counts * weights  # [windows, workers] GPUs
    none = np.zeros(len(series.starts_ns), np.int64)
    return Sums(
        series.starts_ns,
        np.einsum("nwp,nw->np", series.times_ns, weighed),
        none if series.encode_ns is None else (series.encode_ns * weighed).sum(axis=1),
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
            encode=np.concatenate([piece.encode_ns for piece in pieces]).tolist(),
        ),
        gpus=gpus.tolist(),
        coverage=(covered / np.maximum(gpus * over_ns, 1)).tolist(),
        provisional=(running | ((over_ns < window_ns) & (gpus > 0))).tolist(),
        roles={name: roles[:, index].tolist() for index, name in enumerate(ROLE_NAMES)},
    )


MAX_WINDOW_NS: Final = 600 * 1_000_000_000
MIN_WINDOW_NS: Final = 100_000_000
ALLOWED_WINDOWS: Final = "a number and ms, s or m, from 100ms to 10m, for example 500ms, 2s or 1m"
TIER_NAMES: Final = {
    f"{tier.window_ns // 1_000_000}ms" if tier.window_ns < 10**9 else f"{tier.window_ns // 10**9}s": tier
    for tier in TIERS
}
_UNIT_NS: Final = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "h": 3_600_000_000_000}
_PATTERN: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(ms|s|m|h)", re.ASCII)


def parse_window_ns(text: str) -> int:
    """Return the window in whole ns. Raise InvalidRequest, which names the parameter and the allowed values."""
    window_ns = _parse_ns(text)
    if not MIN_WINDOW_NS <= window_ns <= MAX_WINDOW_NS:
        raise InvalidRequest(f"window={text[:40]!r} is not {ALLOWED_WINDOWS}", param="window")
    return window_ns


def parse_tier(text: str) -> Tier:
    """Return the tier of that window length. Raise InvalidRequest, which names those that exist."""
    tier = TIER_NAMES.get(text.strip())
    if tier is None:
        raise InvalidRequest(f"window={text[:40]!r} is not one of {', '.join(TIER_NAMES)}", param="window")
    return tier


def parse_span_ns(text: str, tier: Tier) -> int:
    """Return the span in whole ns, at least one window and at most as many as are kept. Raise InvalidRequest
    otherwise.
    """
    span_ns, longest_ns = _parse_ns(text), tier.window_ns * tier.windows
    if not tier.window_ns <= span_ns <= longest_ns:
        raise InvalidRequest(
            f"span={text[:40]!r} is not a number and ms, s, m or h, from {tier.window_ns / 1e9:g}s "
            f"to {longest_ns / 1e9:g}s for these windows",
            param="span",
        )
    return span_ns


def _parse_ns(text: str) -> int:
    """Return the duration in ns; 0 if the text is not a duration."""
    match = _PATTERN.fullmatch(text.strip())
    return round(float(match[1]) * _UNIT_NS[match[2]]) if match else 0
