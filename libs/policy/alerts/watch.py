"""The evaluation of all alert rules on successive snapshots; time is passed in."""

from collections import OrderedDict, deque
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

from libs.policy.alerts.burn import burn_conditions
from libs.policy.alerts.rules import (
    ON_TELEMETRY,
    AlertLimits,
    Condition,
    Labels,
    Name,
    PhasePool,
    Severity,
    Snapshot,
    WorkerReport,
    held_back,
    make_rules,
)
from libs.policy.alerts.store import Alert, AlertStateMachine, AlertStore
from libs.policy.kv_links import SLOW_LINK, SOUND_LINK, JudgedLink, KvLink, judge
from libs.policy.newest import put_newest
from libs.policy.verdict.causes import IMBALANCES, SHORTAGES, Cause, CauseCode, amount
from libs.policy.verdict.state import Grade

# A worker is not blamed while no worker reports or telemetry is late, shortly afterwards, or while its reader is
# silent.


# Share of the time after which a worker counts as silent. If no worker reported for this long, the cause is
# elsewhere.
ALL_SILENT_SHARE: Final = 0.5
# Workers find a returned broker within this time, at different times. Instances that share telemetry take over the
# partitions of a lost one within it.
RETURN_NS: Final = 3 * 10**9


class CommonSilence:
    """Silences of most workers at once, which no single worker is blamed for.

    `note` must be called with every snapshot.
    """

    def __init__(self, limits: AlertLimits) -> None:
        self._long_ns = ALL_SILENT_SHARE * limits.stale_s.fire * 1e9
        self.all_silent = False
        """True if nothing recent is known about most workers, so that no condition can be judged."""
        self._resumed_ns: int | None = None
        """The time at which the last common silence ended."""
        self._silent_readers: frozenset[str] = frozenset()

    def note(self, snapshot: Snapshot) -> None:
        staying = [worker for worker in snapshot.workers if not worker.left]
        silent = bool(staying) and max(snapshot.silent_ns or 0, snapshot.behind_ns) >= self._long_ns
        if self.all_silent and not silent:
            self._resumed_ns = snapshot.at_ns
        self.all_silent = silent
        reporting = {worker.reader for worker in staying if worker.silent_ns < self._long_ns}
        self._silent_readers = frozenset(worker.reader for worker in staying) - reporting if reporting else frozenset()

    def own_silent_ns(self, worker: WorkerReport, now_ns: int) -> int:
        """Return the worker's own silence in ns, less the silences of its reader and those of all workers."""
        silent_ns = worker.silent_ns
        if self._resumed_ns is not None:
            silent_ns = min(silent_ns, max(now_ns - self._resumed_ns - RETURN_NS, 0))
        return max(silent_ns - RETURN_NS, 0) if worker.reader in self._silent_readers else silent_ns


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
        """Return the nanoseconds for which a worker has had work without a break; 0 if it has none."""
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
        reason = f"no telemetry from any of {len(staying)} workers for {silent_s:.1f} s"
    else:
        silent = sum(worker.silent_ns / 1e9 >= limits.stale_s.fire for worker in staying)
        reason = f"telemetry is {behind_s:.1f} s behind: {silent} of {len(staying)} workers are silent or read too late"
    if grade is Grade.FIRE:
        reason += "; alerts that depend on it are held back"
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
        return Condition(Name.TELEMETRY_STALE, _worker_labels(worker), Grade.CLEAR, "the worker has signed off")
    grade: Grade | None = limits.stale_s.grade(silent_s)
    if grade is Grade.FIRE and (own_silent_ns is None or own_silent_ns / 1e9 < limits.stale_s.fire):
        grade = None  # other workers were silent too, so this one is neither blamed nor cleared
    return Condition(Name.TELEMETRY_STALE, _worker_labels(worker), grade, f"no telemetry for {silent_s:.1f} s")


def _stuck(worker: WorkerReport, busy_ns: int, limits: AlertLimits) -> Condition:
    """Grade a worker that reports sequences while no step ends."""
    since_s = min(worker.since_step_ns, busy_ns) / 1e9
    grade = None if _is_silent(worker, limits) else limits.stuck_s.grade(since_s)
    reason = f"no step has ended for {since_s:.1f} s while it holds {worker.at_hand} sequences"
    return Condition(Name.WORKER_STUCK, _worker_labels(worker), grade, reason, "critical")


def _kv_full(worker: WorkerReport, used: float, limits: AlertLimits) -> Condition:
    grade = None if _is_silent(worker, limits) else Grade.CLEAR if worker.left else limits.kv_used.grade(used)
    return Condition(
        Name.KV_CACHE_FULL, _worker_labels(worker), grade, f"{used:.0%} of its KV blocks are held by sequences"
    )


def _is_silent(worker: WorkerReport, limits: AlertLimits) -> bool:
    # The last report of a silent worker may be outdated.
    return worker.silent_ns / 1e9 >= limits.stale_s.clear and not worker.left


def _worker_labels(worker: WorkerReport) -> Labels:
    return (("model", worker.model), ("node", worker.node), ("worker", worker.id))


SPAN_NS: Final = 30 * 10**9
MAX_SAMPLES: Final = 256
MIN_SPAN_NS: Final = SPAN_NS // 2
"""The shortest history from which growth is computed."""
MAX_POOLS: Final = 1024


@dataclass(frozen=True, slots=True)
class _Sample:
    at_ns: int
    depth: int


class QueueLog:
    """Queue depths by pool; the pool unseen for longest is dropped first."""

    def __init__(self) -> None:
        self._samples: OrderedDict[tuple[str, str], deque[_Sample]] = OrderedDict()

    def add(self, pool: tuple[str, str], at_ns: int, depth: int) -> None:
        """Add a depth; the times of a pool must not decrease."""
        samples = self._samples.pop(pool, None) or deque(maxlen=MAX_SAMPLES)
        put_newest(self._samples, pool, samples, MAX_POOLS)
        samples.append(_Sample(at_ns, depth))
        while samples[0].at_ns < at_ns - SPAN_NS:
            samples.popleft()

    def mean(self, pool: tuple[str, str], span_ns: int) -> float:
        """Return the mean depth over the last `span_ns`; 0 for an unknown pool."""
        samples = self._samples.get(pool)
        depths = [each.depth for each in samples if each.at_ns > samples[-1].at_ns - span_ns] if samples else []
        return sum(depths) / len(depths) if depths else 0.0

    def growth_per_minute(self, pool: tuple[str, str]) -> float | None:
        """Return the slope of the least-squares line through the last half minute; None if the history is too short."""
        samples = self._samples.get(pool)
        if not samples or samples[-1].at_ns - samples[0].at_ns < MIN_SPAN_NS:
            return None
        times = [(sample.at_ns - samples[0].at_ns) / 60e9 for sample in samples]
        middle = sum(times) / len(times)
        spread = sum((time - middle) ** 2 for time in times)
        lean = sum((time - middle) * sample.depth for time, sample in zip(times, samples, strict=True))
        return lean / spread if spread else 0.0


# They cover imbalance, growing queues, time lost to KV transfers, and links far slower than others.


OTHER = {"prefill": "decode", "decode": "prefill"}
MAX_NAMED: Final = 4
SOUND: Final = "no KV link is much slower than others"


def pool_conditions(
    pools: list[PhasePool], queues: QueueLog, limits: AlertLimits, judged: Container[str] = ()
) -> Iterator[Condition]:
    """Judge every pool by its queue depths up to now.

    The verdict names the causes for models in `judged`, so they get no imbalance or KV transfer condition here.
    """
    known = {(pool.model, pool.phase): pool for pool in pools}
    for pool in pools:
        other = known.get((pool.model, OTHER[pool.phase]))
        waiting = queues.mean((pool.model, pool.phase), limits.window_ns)
        if other is not None and pool.model not in judged:
            yield _imbalance(pool, other, waiting, limits)
        yield _queue(pool, waiting, queues.growth_per_minute((pool.model, pool.phase)), limits)
        if pool.phase == "decode" and pool.model not in judged:
            yield _kv_wait(pool, limits)


def _imbalance(starved: PhasePool, other: PhasePool, waiting: float, limits: AlertLimits) -> Condition:
    """Grade an imbalance, in which one phase is overloaded while the other is idle."""
    labels = _labels(starved)
    if not (starved.covered_ns and other.covered_ns):
        return Condition(Name.IMBALANCE, labels, None, "telemetry does not cover it")
    busy = starved.busy_ns / starved.covered_ns
    idle = 1 - (other.busy_ns + other.kv_wait_ns) / other.covered_ns
    known = starved.waiting is not None
    # A queue that is empty for a moment must not end the alert.
    queued = Grade.FIRE if (known and waiting >= 1) or starved.full else Grade.HOLD
    grade = min(limits.busy.grade(busy), limits.idle.grade(idle), queued)
    at_hand = f"all {starved.places} places taken" if starved.full else f"{amount(waiting)} {starved.unit} queued"
    reason = f"{starved.phase} {busy:.0%} busy with {at_hand}, {other.phase} {other.busy_ns / other.covered_ns:.0%}"
    if grade is Grade.FIRE:
        reason += f": {advice(starved, other)}"
    return Condition(Name.IMBALANCE, labels, grade, reason)


def advice(starved: PhasePool, other: PhasePool) -> str:
    """Return the estimated effect of moving workers. Telemetry must cover both pools."""
    if other.workers == 1:
        return f"its only {other.phase} worker cannot move; as mixed it would take prompts too"
    work, lent = (pool.busy_ns / pool.covered_ns * pool.workers for pool in (starved, other))
    # Moving `even` workers would make both pools equally busy at the same work.
    even = (work * other.workers - lent * starved.workers) / (work + lent)
    count = min(max(int(even), 1), other.workers - 1)
    return (
        f"moving {count} of {other.workers} {other.phase} workers gives {starved.phase} "
        f"{count / starved.workers:.0%} more and leaves {other.phase} {min(lent / (other.workers - count), 1):.0%} busy"
    )


def _queue(pool: PhasePool, waiting: float, growth_per_minute: float | None, limits: AlertLimits) -> Condition:
    """Grade a queue, which fires if it is long and grows by the length of a long queue within a minute."""
    if pool.waiting is None:
        return Condition(Name.QUEUE_GROWING, _labels(pool), None, "telemetry does not cover it")
    long = max(pool.gpus, 1) * (limits.queue_tokens if pool.phase == "prefill" else limits.queue_sequences)
    reason = f"{amount(waiting)} {pool.unit} wait for {pool.phase} on {pool.gpus} GPUs"
    if growth_per_minute is None:  # for example after a silence, during which a long queue may have grown
        grade = Grade.CLEAR if waiting < long / 2 else Grade.HOLD
        return Condition(Name.QUEUE_GROWING, _labels(pool), grade, reason)
    if waiting < long / 2 or growth_per_minute < long / 10:
        grade = Grade.CLEAR
    else:
        grade = Grade.FIRE if waiting >= long and growth_per_minute >= long else Grade.HOLD
    reason += f", {'+' if growth_per_minute >= 0 else '-'}{amount(abs(growth_per_minute))} a minute"
    return Condition(Name.QUEUE_GROWING, _labels(pool), grade, reason)


def _kv_wait(pool: PhasePool, limits: AlertLimits) -> Condition:
    labels: Labels = (("model", pool.model),)
    if not pool.covered_ns:
        return Condition(Name.KV_TRANSFER_BOUND, labels, None, "telemetry does not cover it")
    share = pool.kv_wait_ns / pool.covered_ns
    reason = f"decode workers wait for KV blocks {share:.0%} of the time, {pool.busy_ns / pool.covered_ns:.0%} busy"
    return Condition(Name.KV_TRANSFER_BOUND, labels, limits.kv_wait.grade(share), reason)


def _labels(pool: PhasePool) -> Labels:
    return (("model", pool.model), ("phase", pool.phase))


def link_conditions(links: Sequence[KvLink]) -> Iterator[Condition]:
    """Yield one condition for each model with comparable links.

    A bad network card or route shows in many pairs at once, so there is no alert per pair.
    """
    judged = judge(links)
    for model in sorted({each.link.model for each in judged}):
        own = [each for each in judged if each.link.model == model]
        slow = [each for each in own if each.share < SLOW_LINK]
        if not slow:
            grade = Grade.HOLD if own[0].share < SOUND_LINK else Grade.CLEAR
            yield Condition(Name.KV_LINK_SLOW, (("model", model),), grade, SOUND)
            continue
        yield Condition(Name.KV_LINK_SLOW, (("model", model),), Grade.FIRE, _slow_links(slow), command="fulcrum doctor")


def _slow_links(slow: Sequence[JudgedLink]) -> str:
    named = ", ".join(
        f"{each.link.source} to {each.link.target} at {each.link.gb_per_s or 0.0:.2g} GB/s" for each in slow[:MAX_NAMED]
    )
    more = f" and over {len(slow) - MAX_NAMED} more" if len(slow) > MAX_NAMED else ""
    link = slow[0].link
    way = "by shared memory" if link.shared_memory else "within a node" if link.one_node else "by the network"
    return f"slow KV link: {named}{more}; others {way} reach {slow[0].fastest_gb_per_s:.3g} GB/s"


PHASES: Final = {
    CauseCode.PREFILL_BOUND: "prefill",
    CauseCode.DECODE_BOUND_TPOT: "decode",
    CauseCode.DECODE_BOUND_KV: "decode",
}
OVER: Final = "there is room for all work"


def cause_conditions(snapshot: Snapshot, followed: Collection[str]) -> Iterator[Condition]:
    """Yield conditions for every judged model; `followed` holds workers whose alerts may be firing."""
    for model in snapshot.judged:
        causes = [each for each in snapshot.causes if each.model == model]
        yield from _imbalances(model, causes)
        yield _one(Name.TOO_SMALL, model, [each for each in causes if each.code is CauseCode.TOO_SMALL], OVER)
        links = [each for each in causes if each.code is CauseCode.SLOW_LINK]
        yield _one(Name.KV_TRANSFER_BOUND, model, links, "ready KV arrives in time")
        short = [each for each in causes if each.code is CauseCode.SHORT_OF_CPU]
        yield _one(Name.SHORT_OF_CPU, model, short, "no wait for a CPU delays requests")
        yield from _slow_workers(model, causes, followed)


def refused_condition(snapshot: Snapshot) -> Condition:
    """Judge the share of refused requests. Gateways count refusals, so worker telemetry is not needed."""
    causes = [each for each in snapshot.causes if each.code is CauseCode.REFUSED]
    return _condition(Name.REQUESTS_REFUSED, CLUSTER, causes, "most requests are accepted")


def brokers_condition(snapshot: Snapshot) -> Condition:
    """Judge whether every record has all of its copies. With fewer, the loss of another broker stops writing."""
    lost = snapshot.lost_copies
    if lost is None:  # no broker answers, which is an alert about telemetry
        return Condition(Name.BROKER_LOST, CLUSTER, None, "no broker answers")
    if not lost:
        return Condition(Name.BROKER_LOST, CLUSTER, Grade.CLEAR, "every copy is in sync")
    return Condition(Name.BROKER_LOST, CLUSTER, Grade.FIRE, lost.sentence, "critical" if lost.stopped else "warning")


def reach_condition(snapshot: Snapshot) -> Condition:
    """Judge whether this service reaches every broker. Kafka does not move partitions away from a broker that its peers
    can reach.
    """
    unreachable = snapshot.unreachable
    if unreachable is None:
        return Condition(Name.BROKER_UNREACHABLE, CLUSTER, None, "no broker answers")
    if not unreachable:
        return Condition(Name.BROKER_UNREACHABLE, CLUSTER, Grade.CLEAR, "every broker answers")
    severity: Severity = "critical" if unreachable.led else "warning"
    return Condition(Name.BROKER_UNREACHABLE, CLUSTER, Grade.FIRE, unreachable.sentence, severity)


def is_explained(condition: Condition, causes: Sequence[Cause]) -> bool:
    """Return whether a growing queue or full KV cache is only a symptom of a named cause, which has its own alert."""
    model = dict(condition.labels).get("model")
    codes = {each.code for each in causes if each.model == model} - {CauseCode.LATE}
    if condition.name is Name.QUEUE_GROWING:
        return bool(codes)
    return condition.name is Name.KV_CACHE_FULL and bool(codes & SHORTAGES)


def _imbalances(model: str, causes: Sequence[Cause]) -> Iterator[Condition]:
    for phase in ("prefill", "decode"):
        found = [each for each in causes if each.code in IMBALANCES and PHASES[each.code] == phase]
        labels: Labels = (("model", model), ("phase", phase))
        yield _condition(Name.IMBALANCE, labels, found, OVER)


def _one(name: Name, model: str, causes: Sequence[Cause], over: str) -> Condition:
    return _condition(name, (("model", model),), causes, over)


def _condition(name: Name, labels: Labels, causes: Sequence[Cause], over: str) -> Condition:
    if not causes:
        return Condition(name, labels, Grade.CLEAR, over)
    action = causes[0].action
    command = action.command if action is not None else ""
    # A cause that eases is still named for a moment. Its figures should neither wake anybody nor end an alert.
    grade = Grade.FIRE if causes[0].grade is Grade.FIRE else Grade.HOLD
    return Condition(name, labels, grade, causes[0].sentence, command=command)


def _slow_workers(model: str, causes: Sequence[Cause], followed: Collection[str]) -> Iterator[Condition]:
    slow = next((each for each in causes if each.code is CauseCode.SLOW_WORKER), None)
    named = slow.workers if slow is not None else ()
    for worker in dict.fromkeys([*named, *sorted(followed)]):
        grade = Grade.FIRE if worker in named else Grade.CLEAR
        reason = slow.sentence if slow is not None and worker in named else "its steps take no longer than its peers'"
        yield Condition(Name.SLOW_WORKER, (("model", model), ("worker", worker)), grade, reason)


# Two ticks, for up to `WORKERS_A_STEP` workers.
EVERY_NS: Final = 200_000_000
# This many more workers delay the next evaluation by `EVERY_NS`. With 3,000 workers, an evaluation takes 20 ms and runs
# every 1.2 s.
WORKERS_A_STEP: Final = 500


def every_ns(workers: int) -> int:
    """Return the interval between two evaluations of this many workers."""
    return EVERY_NS * max(-(-workers // WORKERS_A_STEP), 1)


class AlertWatch:
    """The rules and state that turn snapshots into alerts that fire or end."""

    def __init__(self, limits: AlertLimits) -> None:
        self.limits = limits
        self.machine = AlertStateMachine(make_rules(limits))
        self.book = AlertStore()
        self.ahead: Sequence[Condition] = ()
        """Conditions from the latest forecasts, repeated at every evaluation."""
        self._queues = QueueLog()
        self._busy_since = BusySince()
        self._silence = CommonSilence(limits)

    def look(self, snapshot: Snapshot) -> list[Alert]:
        """Evaluate a snapshot and return the alerts that changed."""
        self._silence.note(snapshot)
        for pool in snapshot.pools:
            if pool.waiting is not None and not self._silence.all_silent:
                self._queues.add((pool.model, pool.phase), snapshot.at_ns, pool.waiting)
        self._busy_since.note(snapshot)
        self.book.held_back = ON_TELEMETRY if self._silence.all_silent else ()
        conditions = list(self._conditions(snapshot))
        changed = self.book.enter(self.machine.step(snapshot.at_ns, conditions))
        self.book.follow(conditions)
        return changed

    def _conditions(self, snapshot: Snapshot) -> Iterator[Condition]:
        followed = self.machine.followed("worker")
        judged = cause_conditions(snapshot, followed)
        links = link_conditions(snapshot.links)
        pools = chain(pool_conditions(snapshot.pools, self._queues, self.limits, snapshot.judged), judged, links)
        workers = worker_conditions(snapshot, self._busy_since, self._silence, self.limits, followed)
        for each in chain(map(held_back, pools) if self._silence.all_silent else pools, workers):
            fires = each.grade is Grade.FIRE
            yield replace(each, grade=Grade.HOLD) if fires and is_explained(each, snapshot.causes) else each
        yield refused_condition(snapshot)
        yield brokers_condition(snapshot)
        yield reach_condition(snapshot)
        yield from burn_conditions(snapshot.burns, self.limits)
        yield from self.ahead
