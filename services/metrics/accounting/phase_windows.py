"""GPU time of workers over a span by phase and role, from the windows that history, stream and page use too. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.pb.fulcrum.common.v1.common_pb2 import Assignment, Load
from libs.contracts.roles import ROLE_NAMES, role_from_name, role_name
from libs.telemetry.fleet import FleetTelemetry
from libs.telemetry.rollups import COVERED, DECODE, KV_WAIT, NO_ROLE, PREFILL, RollUps, Series
from libs.telemetry.steps import PhaseTime
from libs.telemetry.workers import UNKNOWN, Member, Members, WorkerFacts


@dataclass(frozen=True, slots=True)
class RoleGpuTime:
    """A worker's GPU time while it had one role."""

    role: str
    gpus: int
    time: PhaseTime
    """The time of each phase, in nanoseconds times GPUs."""
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


def parts_of(series: Series, index: int, expected: NDArray[np.bool_], gpus: int) -> list[RoleGpuTime]:
    """Return the time of the worker at `index` by role, in order of role.

    `expected` [windows] marks the windows that telemetry should cover. Where nothing is written they count for the last
    role.
    """
    written = series.roles[:, index]
    last = last_roles(written[:, None])[0]
    roles = np.where(written != NO_ROLE, written, np.where(expected, last, NO_ROLE))
    parts = []
    for number in np.unique(roles[roles != NO_ROLE]).tolist():
        then = roles == number
        times = series.times_ns[then, index].sum(axis=0).tolist()
        running = bool(series.provisional[then, index].any())
        time = PhaseTime(times[COVERED], times[PREFILL], times[DECODE], times[KV_WAIT], running).times(gpus)
        due_ns = int((expected & then).sum()) * series.window_ns * gpus
        parts.append(RoleGpuTime(role_text(number), gpus, time, due_ns, _runs(series, then)))
    return sorted(parts, key=lambda part: part.role)


def _runs(series: Series, then: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(then.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    first_ns = int(series.starts_ns[0])
    return [(first_ns + low * series.window_ns, first_ns + high * series.window_ns) for low, high in edges.tolist()]


MAX_WINDOWS: Final = 600
"""The bound on windows summed for one answer: one minute of the finest. Longer and older spans use coarser windows."""


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """The GPU time of one worker over a span."""

    facts: WorkerFacts
    time: PhaseTime
    """The time of each phase, in nanoseconds times GPUs."""
    due_ns: int
    """GPU-nanoseconds that telemetry should cover: from the worker's first window until it left or was given up."""
    role: str
    """Last role in the span; the present role where nothing of the span is written."""
    parts: list[RoleGpuTime]
    """The time by the role that the worker had then; a single part for nearly all workers."""

    @property
    def gpus(self) -> int:
        return self.facts.gpus


@dataclass(frozen=True, slots=True)
class Total:
    """The summed GPU time of several workers."""

    gpus: int
    """GPUs of the workers whose telemetry should cover any of the time."""
    time: PhaseTime
    due_ns: int


def total(spent: Sequence[WorkerTime] | Sequence[RoleGpuTime]) -> Total:
    times = [each.time for each in spent]
    return Total(
        sum(each.gpus for each in spent if each.due_ns),
        PhaseTime(
            sum(time.covered_ns for time in times),
            sum(time.prefill_ns for time in times),
            sum(time.decode_ns for time in times),
            sum(time.kv_wait_ns for time in times),
            any(time.provisional for time in times),
        ),
        sum(each.due_ns for each in spent),
    )


@dataclass(frozen=True, slots=True)
class WindowSpan:
    """A span of whole windows with the workers present in any of them or by now, by id."""

    low_ns: int
    high_ns: int
    workers: list[WorkerTime]


def spent_in(fleet: FleetTelemetry, rollups: RollUps, members: Members, end_ns: int, span_ns: int) -> WindowSpan:
    """Return the last whole windows that end by `end_ns` and make up `span_ns` or little more."""
    length = rollups.tier_for(end_ns - span_ns, span_ns // MAX_WINDOWS).window_ns
    high_ns = end_ns - end_ns % length
    low_ns = high_ns - -(-span_ns // length) * length
    listed = {facts.worker_id: facts for facts in fleet.directory.listed(high_ns)}
    known = {facts.worker_id: facts for facts in fleet.directory.known()} | listed
    reporting = {name for name, facts in known.items() if name in listed or facts.covered_to_unix_ns > low_ns}
    # Workers that left before this process began, or long ago, exist in the windows only.
    gone = set(rollups.present(length, low_ns, high_ns)).difference(known)
    series = rollups.read(length, low_ns, high_ns, sorted(gone.union(reporting.intersection(rollups.worker_ids()))))
    last = last_roles(series.roles)
    workers = [
        known.get(name) or _gone(members.get(name) or Member(name, UNKNOWN, UNKNOWN, 1), role_text(number))
        for name, number in zip(series.worker_ids, last.tolist(), strict=True)
    ]
    # Windows of a silent worker that another instance reads are not written here, but still lower coverage.
    covered_to_ns = np.array([facts.covered_to_unix_ns for facts in workers], np.int64)
    missed = np.array([facts.worker_id in listed and not facts.left for facts in workers], np.bool_)
    expected = (series.roles != NO_ROLE) | (missed & (series.starts_ns[:, None] >= covered_to_ns))
    times = series.times_ns.sum(axis=0).tolist()
    provisional = np.any(series.provisional, axis=0)
    due_ns = (expected.sum(axis=0) * length).tolist()
    roles = [role_text(number) or role_name(facts.assignment) for facts, number in zip(workers, last, strict=True)]
    has_moved = moved(series.roles, last)
    spent = []
    for index, (facts, each) in enumerate(zip(workers, times, strict=True)):
        if not due_ns[index] and (facts.worker_id not in listed or facts.left):
            continue
        time = PhaseTime(each[COVERED], each[PREFILL], each[DECODE], each[KV_WAIT], bool(provisional[index]))
        whole = RoleGpuTime(
            roles[index], facts.gpus, time.times(facts.gpus), due_ns[index] * facts.gpus, [(low_ns, high_ns)]
        )
        parts = parts_of(series, index, expected[:, index], facts.gpus) if has_moved[index] else [whole]
        spent.append(WorkerTime(facts, whole.time, whole.due_ns, whole.role, parts))
    return WindowSpan(low_ns, high_ns, spent)


def _gone(member: Member, role_then: str) -> WorkerFacts:
    """Build the listing of a departed worker from its member entry and its last role in the windows."""
    role, budget_tokens = role_from_name(role_then, 1)
    return WorkerFacts(
        worker_id=member.worker_id,
        incarnation=0,
        node=member.node,
        gpus=member.gpus,
        engine="",
        assignment=Assignment(model=member.model, role=role, budget_tokens=budget_tokens),
        load=Load(),
        covered_to_unix_ns=0,
        dropped_batches=0,
        left=True,
        group=member.group,
    )
