"""Which alerts there are: names, how long each must hold, how long it must be over. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from libs.policy.alerts.limits import Limits


class Name(StrEnum):
    """As Prometheus's rules and the runbook call them."""

    IMBALANCE = "FulcrumImbalance"
    QUEUE_GROWING = "FulcrumQueueGrowing"
    KV_TRANSFER_BOUND = "FulcrumKvTransferBound"
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


def make_rules(limits: Limits) -> dict[Name, Rule]:
    """All of them."""
    settled = Rule(limits.for_ns, limits.clear_ns)
    at_once = Rule(0, limits.clear_ns)  # their figures are lengths of time already, or of minutes and hours
    return {
        Name.IMBALANCE: settled,
        Name.QUEUE_GROWING: settled,
        Name.KV_TRANSFER_BOUND: settled,
        Name.KV_CACHE_FULL: settled,
        Name.TOO_SMALL: settled,
        Name.SLOW_WORKER: settled,
        Name.SLO_BURN: at_once,
        Name.WORKER_STUCK: at_once,
        Name.TELEMETRY_STALE: at_once,
        Name.CAPACITY_SHORT: at_once,
    }
