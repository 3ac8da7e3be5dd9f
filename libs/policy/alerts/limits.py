"""Thresholds of all alerts. Pure."""

from dataclasses import dataclass

from libs.policy.grade import Threshold


@dataclass(frozen=True, slots=True)
class Limits:
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
