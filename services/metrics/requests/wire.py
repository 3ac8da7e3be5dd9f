"""Finished requests as the log stores and the API returns them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FinishedRequest:
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
    """The client's TTFT limit, counted from arrival; null without one."""
    tpot_target_ns: int | None
    ttft_missed: bool | None
    """Whether the first token came too late or never. Null without a target, or if the request was refused for its own
    fault.
    """
    tpot_missed: bool | None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a latency in seconds over `count` requests; null without any."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The attainment of a target that each request carries itself."""

    requests: int
    """Number of requests that can be judged."""
    target_s: float | None
    """The median of the requests' targets; null if none has one."""
    met: float | None
    """Share of judged requests that met their target; null without any."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
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
    model: str
    summary: RequestSummary


@dataclass(frozen=True, slots=True)
class RequestsReport:
    window_ms: int
    as_of_unix_ns: int
    complete: bool
    """Whether the log reaches back over the whole window."""
    total: RequestSummary
    models: list[ModelRequests]
