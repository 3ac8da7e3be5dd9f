"""Fulcrum's own trace files, JSONL with one header line, and traces of the requests that a suite served."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import InvalidRequest, quoted
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import OUTCOME_CLIENT_GONE, OUTCOME_OK, Outcome, RequestEvent
from libs.lab.traces.lines import MAX_NS, MAX_REQUESTS, MAX_TOKENS, Fault, Source, broken, json_row, tokens, whole
from libs.lab.traces.request import Trace, TraceRequest

HEADER_KEYS: Final = ("trace", "block_tokens", "notes")
"""Keys of the header line, where `trace` is the trace's name.

The header is optional in a file without hash ids.
"""
REQUEST_KEYS: Final = tuple(each.name for each in fields(TraceRequest))
REQUIRED_KEYS: Final = ("number", "arrival_ns", "input_tokens", "output_tokens")
"""The keys that each request's line must have; the others default as in `TraceRequest`."""

MAX_HASH_ID: Final = (1 << 128) - 1
"""The largest absolute value of a hash id, which has at most 128 bits."""


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a file from which `read_trace` rebuilds an equal trace, compressed if its name ends in .gz."""
    path = Path(path)
    if len(trace.requests) > MAX_REQUESTS:
        raise InvalidRequest(f"{len(trace.requests)} requests: a trace has at most {MAX_REQUESTS}")
    try:
        with path.open("wb") as file:
            if path.suffix != ".gz":
                file.writelines(_encoded(trace))
                return
            # The gzip header has no name and no time, so that equal traces are equal files.
            packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
            with packed, io.BufferedWriter(packed) as buffered:
                buffered.writelines(_encoded(trace))
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written: {error.strerror or error}") from error


def _encoded(trace: Trace) -> Iterator[bytes]:
    values = (trace.name, trace.block_tokens, list(trace.notes))
    yield _line(dict(zip(HEADER_KEYS, values, strict=True)))
    for request in trace.requests:
        row = {name: getattr(request, name) for name in REQUEST_KEYS}
        row["hash_ids"] = list(request.hash_ids)
        yield _line({name: value for name, value in row.items() if name in REQUIRED_KEYS or (value and value != ())})


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def is_recording(keys: frozenset[str]) -> bool:
    """Return whether a first line with these keys belongs to Fulcrum's own format."""
    return keys == set(HEADER_KEYS) or set(REQUIRED_KEYS) <= keys <= set(REQUEST_KEYS)


def read_recording(source: Source) -> Trace:
    """Read the whole file; raise InvalidRequest at the first malformed line."""
    name, block_tokens = source.path.stem, 0
    notes: tuple[str, ...] = ()
    requests: list[TraceRequest] = []
    first = True
    for line, row in source.rows(json_row):
        try:
            if first and row.keys() == set(HEADER_KEYS):
                name, block_tokens, notes = _header(row)
            else:
                requests.append(_request(row, len(requests), requests[-1].arrival_ns if requests else 0, block_tokens))
        except Fault as fault:
            raise broken(source.path, line, str(fault)) from None
        first = False
    return Trace(name, tuple(requests), block_tokens, notes)


def _header(row: dict[str, Any]) -> tuple[str, int, tuple[str, ...]]:
    notes = row["notes"]
    if not isinstance(row["trace"], str):
        raise Fault("trace is not a name")
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise Fault("notes is not a list of sentences")
    return row["trace"], whole(row["block_tokens"], "block_tokens", 0, MAX_TOKENS), tuple(notes)


def _request(row: dict[str, Any], place: int, before_ns: int, block_tokens: int) -> TraceRequest:
    if place == MAX_REQUESTS:
        raise Fault(f"more than {MAX_REQUESTS} requests")
    for name in row.keys() - set(REQUEST_KEYS):
        raise Fault(f"no request has {quoted(name)}: its keys are {', '.join(REQUEST_KEYS)}")
    for name in REQUIRED_KEYS:
        if name not in row:
            raise Fault(f"{name} is missing")
    if row["number"] != place:
        raise Fault(f"number is {quoted(str(row['number']))}: this is request {place}")
    hash_ids = row.get("hash_ids", [])
    if not isinstance(hash_ids, list):
        raise Fault("hash_ids is not a list")
    if hash_ids and not block_tokens:
        raise Fault("hash_ids, and no first line that says how many tokens one stands for in block_tokens")
    return TraceRequest(
        number=place,
        arrival_ns=whole(row["arrival_ns"], "arrival_ns", before_ns, MAX_NS),
        input_tokens=tokens(row["input_tokens"], "input_tokens"),
        output_tokens=tokens(row["output_tokens"], "output_tokens"),
        hash_ids=tuple(whole(each, "one of hash_ids", -MAX_HASH_ID, MAX_HASH_ID) for each in hash_ids),
        max_output_tokens=whole(row.get("max_output_tokens", 0), "max_output_tokens", 0, MAX_TOKENS),
        model=_text(row, "model"),
        tenant=_text(row, "tenant"),
        service_class=_text(row, "service_class"),
        session=whole(row.get("session", 0), "session", 0, MAX_NS),
        turn=whole(row.get("turn", 0), "turn", 0, MAX_REQUESTS),
        think_ns=whole(row.get("think_ns", 0), "think_ns", 0, MAX_NS),
    )


def _text(row: dict[str, Any], name: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise Fault(f"{name} is not a text")
    return value


_SERVED: Final = frozenset((OUTCOME_OK, OUTCOME_CLIENT_GONE))


def recorded_trace(events: Iterable[RequestEvent], *, name: str) -> Trace:
    """Build a trace from events, which may arrive in any order and more than once; arrivals count from the first.

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
    requests = tuple(_served_request(number, event, start_ns) for number, event in enumerate(ordered))
    return Trace(name, requests, notes=_notes(ordered, Counter(left_out.values())))


def _served_request(number: int, event: RequestEvent, start_ns: int) -> TraceRequest:
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
