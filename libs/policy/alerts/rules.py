"""The rules of alerts: names, thresholds, durations, and the snapshots and conditions that they judge."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from libs.policy.copies import LostCopies, UnreachableBrokers
from libs.policy.kv_links import KvLink
from libs.policy.verdict.causes import Cause
from libs.policy.verdict.state import Grade, Threshold


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """The thresholds and durations of alerts, from the service's settings."""

    window_ns: int
    """The window over which shares of GPU time are taken."""
    for_ns: int
    clear_ns: int
    busy: Threshold
    """The share of a starved pool's time spent in steps."""
    idle: Threshold
    """The share of the other pool's time in which nothing runs."""
    queue_tokens: int
    """The prompt tokens per GPU that count as a queue for prefill; a queue grows if it gains as many per minute."""
    queue_sequences: int
    """Sequences per GPU that count as a queue for decode; a queue grows if it gains as many per minute."""
    kv_wait: Threshold
    kv_used: Threshold
    stuck_s: Threshold
    """The seconds without a completed step, while there is work, after which a worker counts as stuck."""
    stale_s: Threshold
    slo_objective: float
    """The share of requests that must meet the target."""
    slo_requests: int
    """The minimum number of requests in a window for it to be graded."""


class Name(StrEnum):
    """The names of alerts, as Prometheus's rules and the runbook have them."""

    IMBALANCE = "FulcrumImbalance"
    QUEUE_GROWING = "FulcrumQueueGrowing"
    KV_TRANSFER_BOUND = "FulcrumKvTransferBound"
    KV_LINK_SLOW = "FulcrumKvLinkSlow"
    KV_CACHE_FULL = "FulcrumKvCacheFull"
    TOO_SMALL = "FulcrumTooSmall"
    SLOW_WORKER = "FulcrumSlowWorker"
    SHORT_OF_CPU = "FulcrumShortOfCpu"
    SLO_BURN = "FulcrumSloBurn"
    WORKER_STUCK = "FulcrumWorkerStuck"
    TELEMETRY_STALE = "FulcrumTelemetryStale"
    CAPACITY_SHORT = "FulcrumCapacityShort"
    REQUESTS_REFUSED = "FulcrumRequestsRefused"
    BROKER_LOST = "FulcrumBrokerLost"
    BROKER_UNREACHABLE = "FulcrumBrokerUnreachable"


# These depend on step telemetry and are held back while it is old, as are conditions on single silent workers. Old
# telemetry has its own alert.
ON_TELEMETRY: Final = (
    Name.IMBALANCE,
    Name.QUEUE_GROWING,
    Name.KV_TRANSFER_BOUND,
    Name.KV_LINK_SLOW,
    Name.KV_CACHE_FULL,
    Name.TOO_SMALL,
    Name.SLOW_WORKER,
    Name.SHORT_OF_CPU,
    Name.WORKER_STUCK,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """The durations that turn a condition into an alert and end the alert."""

    for_ns: int
    """The time for which the condition must hold without a break."""
    clear_ns: int
    """The time for which the condition must be clear without a break; longer if the alert fired often recently."""


def make_rules(limits: AlertLimits) -> dict[Name, Rule]:
    settled = Rule(limits.for_ns, limits.clear_ns)
    at_once = Rule(0, limits.clear_ns)  # the figures of these rules are already averages
    return {
        Name.IMBALANCE: settled,
        Name.QUEUE_GROWING: settled,
        Name.KV_TRANSFER_BOUND: settled,
        Name.KV_LINK_SLOW: settled,
        Name.KV_CACHE_FULL: settled,
        Name.TOO_SMALL: settled,
        Name.SLOW_WORKER: settled,
        Name.SHORT_OF_CPU: settled,
        Name.SLO_BURN: at_once,
        Name.WORKER_STUCK: at_once,
        Name.TELEMETRY_STALE: at_once,
        Name.CAPACITY_SHORT: at_once,
        Name.REQUESTS_REFUSED: settled,
        Name.BROKER_LOST: settled,
        Name.BROKER_UNREACHABLE: settled,
    }


Severity = Literal["warning", "critical"]
Labels = tuple[tuple[str, str], ...]
"""The subject of an alert, such as (("model", "m"), ("phase", "prefill"))."""


@dataclass(frozen=True, slots=True)
class Condition:
    """The grade of one subject, such as a pool or a worker, with a sentence that gives the figures behind it."""

    name: Name
    labels: Labels
    grade: Grade | None
    """The grade of the subject. None means that nothing is known now, and changes no alert."""
    reason: str
    severity: Severity = "warning"
    command: str = ""
    """The command that ends the condition; empty if none is known."""


def held_back(condition: Condition) -> Condition:
    """Return the condition without a grade, so that it changes no alert."""
    return replace(condition, grade=None)


@dataclass(frozen=True, slots=True)
class PhasePool:
    """The workers of one model that serve one phase: those of role prefill, or those of roles decode and mixed."""

    model: str
    phase: str
    workers: int
    gpus: int
    covered_ns: int
    """GPU-ns of the window that telemetry covers."""
    busy_ns: int
    kv_wait_ns: int
    waiting: int | None
    """Work that waits at workers and gateways; None while telemetry does not report it.

    The unit is prompt tokens still to compute for prefill, and sequences not yet running for decode.
    """

    places: int
    """The number of sequences that the pool's workers can run at once; 0 if they do not report it."""
    taken: int

    @property
    def full(self) -> bool:
        """Return whether every place is taken, so that further sequences wait at the gateways."""
        return 0 < self.places <= self.taken

    @property
    def unit(self) -> str:
        """Return the unit of `waiting`, as texts name it."""
        return "prompt tokens" if self.phase == "prefill" else "sequences"


class WorkerReport(NamedTuple):
    """The state of a worker at its last report."""

    id: str
    node: str
    model: str
    silent_ns: int
    """The time since its telemetry ended, beyond the usual delay."""
    left: bool
    """True if the worker announced the end of its telemetry."""
    at_hand: int
    """The number of sequences that the worker holds, running or not."""
    since_step_ns: int
    """The time from the end of the worker's last finished step to the end of its telemetry."""
    reader: str
    """The instance that reads its telemetry; empty for this one."""
    kv_used: float | None
    """The share of the worker's KV blocks that sequences hold; None if it does not report it."""


@dataclass(frozen=True, slots=True)
class RequestCount:
    """The number of requests in a window, and of those that missed their target."""

    total: int
    bad: int

    @property
    def share(self) -> float:
        """The share of bad requests; 0 without requests."""
        return self.bad / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True)
class Burn:
    """A model's service level, with counts over windows by their length in seconds."""

    model: str
    slo: str
    windows: dict[int, RequestCount]
    age_s: float
    """The time since the first counted request; earlier time is unknown."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the cluster at one moment."""

    at_ns: int
    pools: list[PhasePool]
    workers: list[WorkerReport]
    burns: list[Burn]
    silent_ns: int | None
    """The time since the last telemetry of any worker; None before the first."""
    causes: Sequence[Cause] = ()
    judged: frozenset[str] = frozenset()
    """Models that the verdict covers; pools of other models are evaluated by their busy time."""
    links: Sequence[KvLink] = ()
    """Links between workers, with the speed of KV transfers."""
    lost_copies: LostCopies | None = None
    """The topics' copies that brokers lack; None while that is unknown."""
    unreachable: UnreachableBrokers | None = None
    """The brokers that this service cannot reach; None while no broker answers."""

    @property
    def behind_ns(self) -> int:
        """The smallest silence of the most silent half of the workers that have not left; 0 without workers.

        Telemetry that arrives after such a silence covers earlier time.
        """
        silent_ns = sorted(worker.silent_ns for worker in self.workers if not worker.left)
        return silent_ns[(len(silent_ns) - 1) // 2] if silent_ns else 0


CLEAR_SHARE = 0.5
"""The share of sampled paths that are short below which the alert clears."""


@dataclass(frozen=True, slots=True)
class PoolAhead:
    """The capacity plan of one model's pool."""

    model: str
    phase: str
    short_gpus: int
    """The GPUs missing in the first stretch in which four of five sampled paths are short; 0 if there is no such
    stretch.
    """
    at_unix_s: float
    sure: float
    """The share of sampled demand paths in which that stretch is short of GPUs."""
    most_short: float
    """The largest such share of all stretches."""
    start_s: float
    """The time that a worker takes to start; 0 if unknown."""


def capacity_conditions(pools: Sequence[PoolAhead], when: Sequence[str]) -> Iterator[Condition]:
    """Judge every pool; `when` describes each pool's moment in words."""
    for pool, words in zip(pools, when, strict=True):
        labels = (("model", pool.model), ("phase", pool.phase))
        if pool.short_gpus > 0:
            gpus = f"{pool.short_gpus} GPU{'s' if pool.short_gpus > 1 else ''}"
            start = f"; workers need {_span(pool.start_s)} to start" if pool.start_s else ""
            reason = f"{pool.phase} short by {gpus} at {words}, {pool.sure:.0%} sure{start}"
            yield Condition(Name.CAPACITY_SHORT, labels, Grade.FIRE, reason)
            continue
        grade = Grade.CLEAR if pool.most_short < CLEAR_SHARE else Grade.HOLD
        reason = f"{pool.phase} suffices: it is short on at most {pool.most_short:.0%} of sampled paths"
        yield Condition(Name.CAPACITY_SHORT, labels, grade, reason)


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
