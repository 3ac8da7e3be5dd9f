"""Traces rebuilt from the request events of gateways."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_CLIENT_GONE, OUTCOME_OK, Outcome, RequestEvent
from libs.lab.traces.lines import MAX_REQUESTS
from libs.lab.traces.request import Trace, TraceRequest

_SERVED: Final = frozenset((OUTCOME_OK, OUTCOME_CLIENT_GONE))


def recorded_trace(events: Iterable[RequestEvent], *, name: str) -> Trace:
    """Build a trace from events, which may come in any order and more than once; arrivals count from the first.

    Every served choice becomes one request. Rejected and failed choices are left out, as are those whose client
    left before the first token, since their output lengths are unknown. Events carry no hash ids and no
    conversations.
    """
    served: dict[bytes, RequestEvent] = {}
    left_out: dict[bytes, str] = {}
    for event in events:
        # Delivery is at least once and choices may share their request's id, so the whole value names an event.
        identity = event.SerializeToString(deterministic=True)
        if event.outcome not in _SERVED or not event.prompt_tokens or not event.output_tokens:
            left_out[identity] = Outcome.Name(event.outcome).removeprefix("OUTCOME_").lower().replace("_", " ")
        else:
            served[identity] = event
        if len(served) + len(left_out) > MAX_REQUESTS:
            raise InvalidRequest(f"more than {MAX_REQUESTS} events of requests: take a shorter time")
    ordered = sorted(served.values(), key=_by_arrival)
    start_ns = ordered[0].arrival_unix_ns if ordered else 0
    requests = tuple(_request(number, event, start_ns) for number, event in enumerate(ordered))
    return Trace(name, requests, notes=_notes(ordered, Counter(left_out.values())))


def _request(number: int, event: RequestEvent, start_ns: int) -> TraceRequest:
    return TraceRequest(
        number=number,
        arrival_ns=event.arrival_unix_ns - start_ns,
        input_tokens=event.prompt_tokens,
        output_tokens=event.output_tokens,
        max_output_tokens=event.max_output_tokens,
        model=event.model,
        tenant=event.tenant,
        service_class=event.service_class,
    )


def _notes(served: list[RequestEvent], left_out: Counter[str]) -> tuple[str, ...]:
    notes = ["Recorded from finished requests: prefixes that prompts share and conversations are not in it."]
    if left_out:
        each = ", ".join(f"{count} {outcome}" for outcome, count in sorted(left_out.items()))
        notes.append(f"Left out, as the lengths of their outputs are not known: {each}. The load offered was higher.")
    if gone := sum(event.outcome == OUTCOME_CLIENT_GONE for event in served):
        notes.append(f"Clients of {gone} requests left early: their outputs count as far as they came.")
    return tuple(notes)


def _by_arrival(event: RequestEvent) -> tuple[int, str]:
    return event.arrival_unix_ns, event.request_id
