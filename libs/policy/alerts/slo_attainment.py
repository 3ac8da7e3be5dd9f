"""Whether a finished request kept its service levels. Pure."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class JudgedRequest:
    """What a request is judged by. Targets are its own; one that is 0 was not set."""

    failed: bool
    """A fault of ours ended it."""
    shed: bool
    """It was refused, and not for what its client asked: there was no room, or no worker."""
    arrival_unix_ns: int
    ttft_ns: int
    """0: no token was sent."""
    ttft_deadline_unix_ns: int
    decode_ns: int
    """First token until the last."""
    output_tokens: int
    tpot_target_ns: int


class MissedLevels(NamedTuple):
    """Whether each service level was missed; None where the request says nothing about it."""

    ttft: bool | None
    tpot: bool | None


def missed_levels(request: JudgedRequest) -> MissedLevels:
    """One that failed or was shed missed its first token, target or not."""
    ttft = tpot = None
    if request.failed or request.shed:
        ttft = True
    elif request.ttft_ns and request.ttft_deadline_unix_ns:
        ttft = request.arrival_unix_ns + request.ttft_ns > request.ttft_deadline_unix_ns
    if request.output_tokens > 1 and request.tpot_target_ns:
        tpot = request.decode_ns > request.tpot_target_ns * (request.output_tokens - 1)
    return MissedLevels(ttft, tpot)
