"""Alert conditions of single workers (stuck, silent, out of KV blocks) and of telemetry as a whole."""

from collections.abc import Container, Iterator
from typing import Final

from libs.policy.alerts.rules import AlertLimits, Condition, Labels, Name
from libs.policy.alerts.snapshot import Snapshot, WorkerReport
from libs.policy.alerts.worker_silence import CommonSilence
from libs.policy.grade import Grade

CLUSTER: Final[Labels] = (("scope", "cluster"),)


class BusySince:
    # A worker that has just received work is not stuck yet.

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}

    def note(self, snapshot: Snapshot) -> None:
        """Record a snapshot; workers missing from it are forgotten."""
        busy = (worker.id for worker in snapshot.workers if worker.at_hand)
        self._since_ns = {worker_id: self._since_ns.get(worker_id, snapshot.at_ns) for worker_id in busy}

    def for_ns(self, worker_id: str, now_ns: int) -> int:
        """Return how long a worker has had work without a break; 0 if it has none."""
        return now_ns - self._since_ns.get(worker_id, now_ns)


def worker_conditions(
    snapshot: Snapshot,
    busy_since: BusySince,
    silence: CommonSilence,
    limits: AlertLimits,
    followed: Container[str] | None = None,
) -> Iterator[Condition]:
    """Judge every worker, but skip those outside `followed` for which nothing fires; None judges all.

    While most workers are silent, no silence is attributed to a single worker.
    """
    yield _all_stale(snapshot, limits)
    for worker in snapshot.workers:
        busy_ns = busy_since.for_ns(worker.id, snapshot.at_ns)
        if followed is not None and worker.id not in followed and not _fires(worker, busy_ns, limits):
            continue
        yield _stale(worker, None if silence.all_silent else silence.own_silent_ns(worker, snapshot.at_ns), limits)
        yield _stuck(worker, busy_ns, limits)
        if worker.kv_used is not None:
            yield _kv_full(worker, worker.kv_used, limits)


def _all_stale(snapshot: Snapshot, limits: AlertLimits) -> Condition:
    # All workers share one condition: nothing arrives, or what arrives is old, or most workers left at once.
    silent_s, behind_s = (snapshot.silent_ns or 0) / 1e9, snapshot.behind_ns / 1e9
    staying = [worker for worker in snapshot.workers if not worker.left]
    grade = limits.stale_s.grade(max(silent_s, behind_s)) if staying else Grade.CLEAR
    if silent_s >= limits.stale_s.clear:
        reason = f"no telemetry has come from any of {len(staying)} workers for {silent_s:.1f} s"
    else:
        silent = sum(worker.silent_ns / 1e9 >= limits.stale_s.fire for worker in staying)
        reason = f"telemetry is {behind_s:.1f} s behind: {silent} of {len(staying)} workers are silent or read too late"
    if grade is Grade.FIRE:
        reason += "; alerts that stand on it are held back"
    # Silent workers are forgotten in time, which must not end the silence.
    known = snapshot.workers or not silent_s
    return Condition(Name.TELEMETRY_STALE, CLUSTER, grade if known else None, reason, "critical")


def _fires(worker: WorkerReport, busy_ns: int, limits: AlertLimits) -> bool:
    # Nearly all workers are well, so a quick check comes first.
    return (
        worker.silent_ns / 1e9 >= limits.stale_s.fire
        or min(worker.since_step_ns, busy_ns) / 1e9 >= limits.stuck_s.fire
        or (worker.kv_used or 0) >= limits.kv_used.fire
    )


def _stale(worker: WorkerReport, own_silent_ns: int | None, limits: AlertLimits) -> Condition:
    """Grade a worker's own silence; `own_silent_ns` is None where that is unknown."""
    silent_s = worker.silent_ns / 1e9
    if worker.left:
        return Condition(Name.TELEMETRY_STALE, _labels(worker), Grade.CLEAR, "the worker has left in good order")
    grade: Grade | None = limits.stale_s.grade(silent_s)
    if grade is Grade.FIRE and (own_silent_ns is None or own_silent_ns / 1e9 < limits.stale_s.fire):
        grade = None  # others were silent too, so the worker is neither blamed nor cleared
    return Condition(Name.TELEMETRY_STALE, _labels(worker), grade, f"no telemetry for {silent_s:.1f} s")


def _stuck(worker: WorkerReport, busy_ns: int, limits: AlertLimits) -> Condition:
    """Grade a worker that reports sequences while no step ends."""
    since_s = min(worker.since_step_ns, busy_ns) / 1e9
    grade = None if _is_silent(worker, limits) else limits.stuck_s.grade(since_s)
    reason = f"no step has ended for {since_s:.1f} s with {worker.at_hand} sequences at hand"
    return Condition(Name.WORKER_STUCK, _labels(worker), grade, reason, "critical")


def _kv_full(worker: WorkerReport, used: float, limits: AlertLimits) -> Condition:
    grade = None if _is_silent(worker, limits) else Grade.CLEAR if worker.left else limits.kv_used.grade(used)
    return Condition(Name.KV_CACHE_FULL, _labels(worker), grade, f"{used:.0%} of its KV blocks are held by sequences")


def _is_silent(worker: WorkerReport, limits: AlertLimits) -> bool:
    # The last report of a silent worker may not hold any more.
    return worker.silent_ns / 1e9 >= limits.stale_s.clear and not worker.left


def _labels(worker: WorkerReport) -> Labels:
    return (("model", worker.model), ("node", worker.node), ("worker", worker.id))
