"""The rules of alerts: names, thresholds, how long each must hold, and the conditions that they judge."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from libs.policy.grade import Grade, Threshold


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
    """Prompt tokens a GPU that make a queue for prefill; it grows if it gains as many a minute."""
    queue_sequences: int
    """Sequences a GPU that make a queue for decode; it grows if it gains as many a minute."""
    kv_wait: Threshold
    kv_used: Threshold
    stuck_s: Threshold
    """Time since the last step ended while there is work."""
    stale_s: Threshold
    """Time since a worker's telemetry ended."""
    slo_objective: float
    """The share of requests that must meet the target."""
    slo_requests: int
    """The least number of requests in a window for it to be graded."""


class Name(StrEnum):
    """The names of alerts in Prometheus's rules and the runbook."""

    IMBALANCE = "FulcrumImbalance"
    QUEUE_GROWING = "FulcrumQueueGrowing"
    KV_TRANSFER_BOUND = "FulcrumKvTransferBound"
    KV_LINK_SLOW = "FulcrumKvLinkSlow"
    KV_CACHE_FULL = "FulcrumKvCacheFull"
    TOO_SMALL = "FulcrumTooSmall"
    SLOW_WORKER = "FulcrumSlowWorker"
    SLO_BURN = "FulcrumSloBurn"
    WORKER_STUCK = "FulcrumWorkerStuck"
    TELEMETRY_STALE = "FulcrumTelemetryStale"
    CAPACITY_SHORT = "FulcrumCapacityShort"


# These are judged by step telemetry and held back while it is old, as are conditions on single silent workers.
# Another alert reports the old telemetry instead.
ON_TELEMETRY: Final = (
    Name.IMBALANCE,
    Name.QUEUE_GROWING,
    Name.KV_TRANSFER_BOUND,
    Name.KV_LINK_SLOW,
    Name.KV_CACHE_FULL,
    Name.TOO_SMALL,
    Name.SLOW_WORKER,
    Name.WORKER_STUCK,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """The durations after which a condition becomes an alert and after which the alert ends."""

    for_ns: int
    """How long the condition must hold without a break."""
    clear_ns: int
    """How long it must be clear without a break; longer for one that has fired often recently."""


def make_rules(limits: AlertLimits) -> dict[Name, Rule]:
    settled = Rule(limits.for_ns, limits.clear_ns)
    at_once = Rule(0, limits.clear_ns)  # their figures already cover a length of time
    return {
        Name.IMBALANCE: settled,
        Name.QUEUE_GROWING: settled,
        Name.KV_TRANSFER_BOUND: settled,
        Name.KV_LINK_SLOW: settled,
        Name.KV_CACHE_FULL: settled,
        Name.TOO_SMALL: settled,
        Name.SLOW_WORKER: settled,
        Name.SLO_BURN: at_once,
        Name.WORKER_STUCK: at_once,
        Name.TELEMETRY_STALE: at_once,
        Name.CAPACITY_SHORT: at_once,
    }


Severity = Literal["warning", "critical"]
Labels = tuple[tuple[str, str], ...]
"""The subject of an alert, such as (("model", "m"), ("phase", "prefill"))."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One subject's grade, with a sentence that holds the figures behind it."""

    name: Name
    labels: Labels
    grade: Grade | None
    """The grade of the subject; None changes nothing, as nothing is known now."""
    reason: str
    severity: Severity = "warning"
    command: str = ""
    """The command that ends the condition; empty if none is known."""


def held_back(condition: Condition) -> Condition:
    """Return the condition without a grade, so that it changes nothing."""
    return replace(condition, grade=None)
