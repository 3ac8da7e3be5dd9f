"""The judgement of whether a finished request met its service levels."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """A finished request with its own targets, of which 0 means that none was set."""

    failed: bool
    """Whether a fault of the service, rather than of the client, ended it."""
    shed: bool
    """Whether it was refused for want of room or of a worker, rather than for its content."""
    arrival_unix_ns: int
    ttft_ns: int
    """Time to the first token; 0 if no token was sent."""
    ttft_deadline_unix_ns: int
    decode_ns: int
    """Time from the first token to the last one."""
    output_tokens: int
    tpot_target_ns: int


class MissedLevels(NamedTuple):
    """Whether each service level was missed; None if the request does not tell."""

    ttft: bool | None
    tpot: bool | None


def missed_levels(request: JudgedRequest) -> MissedLevels:
    """Judge a request; one that failed or was shed missed its TTFT even without a target."""
    ttft = tpot = None
    if request.failed or request.shed:
        ttft = True
    elif request.ttft_ns and request.ttft_deadline_unix_ns:
        ttft = request.arrival_unix_ns + request.ttft_ns > request.ttft_deadline_unix_ns
    if request.output_tokens > 1 and request.tpot_target_ns:
        tpot = request.decode_ns > request.tpot_target_ns * (request.output_tokens - 1)
    return MissedLevels(ttft, tpot)
