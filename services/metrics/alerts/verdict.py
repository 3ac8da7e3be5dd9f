"""Whether a finished request kept its service levels. Pure."""

from collections.abc import Iterator
from typing import Final

from libs.contracts.errors import NoWorkers, QueueFull
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_FAILED, OUTCOME_REJECTED, RequestEvent

SHED: Final = frozenset((QueueFull.code, NoWorkers.code))
"""Refusals that are not the client's doing."""


def verdicts(event: RequestEvent) -> Iterator[tuple[str, bool]]:
    """(service level, whether it was missed) of those that the request says anything about.

    Targets are the request's own; one that failed or was refused for lack of room missed its first token.
    """
    refused = event.outcome == OUTCOME_REJECTED
    if event.outcome == OUTCOME_FAILED or (refused and event.error_code in SHED):
        yield "ttft", True
    elif event.ttft_ns and event.ttft_deadline_unix_ns:
        yield "ttft", event.arrival_unix_ns + event.ttft_ns > event.ttft_deadline_unix_ns
    if event.output_tokens > 1 and event.tpot_target_us:
        yield "tpot", event.decode_ns > event.tpot_target_us * 1000 * (event.output_tokens - 1)
