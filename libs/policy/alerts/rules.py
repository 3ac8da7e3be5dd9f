"""Which alerts there are: names, thresholds, how long each must hold, and what a rule finds about a subject. Pure."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Literal

from libs.policy.grade import Grade, Threshold


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Built from the service's settings."""

    window_ns: int
    """What shares of GPU time are of."""
    for_ns: int
    clear_ns: int
    busy: Threshold
    """Share of a starved pool's time in steps."""
    idle: Threshold
    """Share of the other pool's time in which nothing runs."""
    queue_tokens: int
    """Prompt tokens a GPU that wait for prefill: a queue is one from here on, and grows if by as many a minute."""
    queue_sequences: int
    """Sequences a GPU that wait for decode, likewise."""
    kv_wait: Threshold
    kv_used: Threshold
    stuck_s: Threshold
    """Since the last step ended, with work at hand."""
    stale_s: Threshold
    """Since a worker's telemetry ended."""
    slo_objective: float
    """Share of requests that are to be good."""
    slo_requests: int
    """With fewer in a window nothing is graded."""


class Name(StrEnum):
    """As Prometheus's rules and the runbook call them."""

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
"""What is judged by step telemetry: held back while that is old, as is what accuses single workers of silence. One
alert says so in their place."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a condition becomes an alert, and when that is over."""

    for_ns: int
    """How long the condition must hold without a break."""
    clear_ns: int
    """How long it must be clear without a break; longer for one that has fired often of late."""


def make_rules(limits: AlertLimits) -> dict[Name, Rule]:
    """All of them."""
    settled = Rule(limits.for_ns, limits.clear_ns)
    at_once = Rule(0, limits.clear_ns)  # their figures are lengths of time already, or of minutes and hours
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
"""What an alert is about, e.g. (("model", "m"), ("phase", "prefill"))."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One subject's grade, with the figures behind it in words."""

    name: Name
    labels: Labels
    grade: Grade | None
    """None: nothing is known now, so nothing changes."""
    reason: str
    severity: Severity = "warning"
    command: str = ""
    """What ends it, as it is typed; empty where nothing is known that would."""


def held_back(condition: Condition) -> Condition:
    """The same, of which nothing is known now."""
    return replace(condition, grade=None)
