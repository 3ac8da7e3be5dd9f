"""Finished requests as the log holds and the API returns them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is kept of a request."""

    id: str
    prefill_worker: str
    decode_worker: str
    end_unix_ns: int
    model: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ns: int
    ttft_ns: int | None
    tpot_ns: int | None
    ttft_target_ns: int | None
    """What its client asked for, from its arrival; null where nothing was."""
    tpot_target_ns: int | None
    ttft_missed: bool | None
    """Whether its first token came too late or never; null where it was refused for its own fault, or had no target."""
    tpot_missed: bool | None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of a latency in seconds, over `count` requests; null without any."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """How requests met a target that each carries for itself."""

    requests: int
    """Of which that can be said."""
    target_s: float | None
    """The median of their targets; null where none has one."""
    met: float | None
    """Share of them; null without any."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Requests that ended in the window."""

    requests: int
    outcomes: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    queue_s: Percentiles
    ttft_slo: ServiceLevel
    tpot_slo: ServiceLevel


@dataclass(frozen=True, slots=True)
class ModelRequests:
    """The summary of one model."""

    model: str
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class RequestsReport:
    """All models together, and each."""

    window_ms: int
    as_of_unix_ns: int
    complete: bool
    """Whether the log reaches back over the whole window."""
    total: RequestSummary
    models: list[ModelRequests]
