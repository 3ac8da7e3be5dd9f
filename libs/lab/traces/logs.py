"""Logs of other serving systems and results of load generators, one request per line or all in one JSON document.

Such files are written as requests end, so requests are sorted by arrival here.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.lines import GZIP, MAX_NS, MAX_REQUESTS, Fault, Source, broken, json_row, real, tokens, whole
from libs.lab.traces.request import TraceRequest

_MS_NS: Final = 1_000_000
_SECOND_NS: Final = 1_000_000_000
_HEAD_BYTES: Final = 1 << 16
MAX_DOCUMENT_BYTES: Final = 1 << 30
"""The largest JSON document that is read, uncompressed."""
CLIENT_NOTE: Final = (
    "The file is a load generator's: arrivals are when it asked. At a fixed concurrency they follow the speed of the "
    "server that it measured, not of users."
)
_MAX_HASH: Final = (1 << 64) - 1


@dataclass(slots=True)
class Gathered:
    """The requests read from a file, in any order, and the number left out."""

    requests: list[TraceRequest] = field(default_factory=list)
    left_out: int = 0
    block_tokens: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, request: TraceRequest | None) -> None:
        if request is None:
            self.left_out += 1
        elif len(self.requests) == MAX_REQUESTS:
            raise Fault(f"more than {MAX_REQUESTS} requests")
        else:
            self.requests.append(request)

    def in_order(self) -> Sequence[TraceRequest]:
        """Return the requests by arrival, and note how many were left out."""
        if self.left_out:
            self.notes.append(f"{self.left_out:,} requests that failed or have no lengths are left out.")
        return sorted(self.requests, key=lambda each: each.arrival_ns)


def _request(arrival_ns: int, input_tokens: object, output_tokens: object, names: tuple[str, str]) -> TraceRequest:
    return TraceRequest(
        number=0,
        arrival_ns=arrival_ns,
        input_tokens=tokens(input_tokens, names[0]),
        output_tokens=tokens(output_tokens, names[1]),
    )


def _part(row: dict[str, Any], name: str) -> dict[str, Any]:
    found = row.get(name)
    if not isinstance(found, dict):
        raise Fault(f"{name} is not a JSON object")
    return found


# ---------------------------------------------------------------- one request a line

AIPERF_KEYS: Final = ("metadata", "metrics")
"""Keys of profile_export.jsonl, as written by aiperf 0.13.0 (aiperf/post_processors/record_export_jsonl_writer.py,
MetricRecordInfo in aiperf/common/models/record_models.py).
"""
_AIPERF_LENGTHS: Final = ("input_sequence_length", "output_sequence_length")


def is_aiperf(row: dict[str, Any]) -> bool:
    metadata = row.get("metadata")
    return row.keys() >= set(AIPERF_KEYS) and isinstance(metadata, dict) and "request_start_ns" in metadata


def read_aiperf(source: Source) -> Gathered:
    """Read the records of AIPerf. The warm-up and failed requests are left out."""

    def request(text: str) -> TraceRequest | None:
        row = json_row(text)
        metadata, metrics = _part(row, "metadata"), _part(row, "metrics")
        lengths = [metrics.get(name) for name in _AIPERF_LENGTHS]
        if metadata.get("benchmark_phase") == "warmup" or row.get("error") or metadata.get("was_cancelled"):
            return None
        counts = [each.get("value") if isinstance(each, dict) else None for each in lengths]
        if not all(counts):
            return None
        arrival_ns = whole(metadata.get("request_start_ns"), "request_start_ns", 0, MAX_NS)
        return _request(arrival_ns, counts[0], counts[1], _AIPERF_LENGTHS)

    found = _each_line(source, request)
    found.notes.append(CLIENT_NOTE)
    return found


DYNAMO_SCHEMA: Final = "dynamo.request.trace.v1"
DYNAMO_KEYS: Final = ("schema", "event_type", "event_time_unix_ms", "request")
"""Keys of a request trace, as read by ai-dynamo 1.6.1 (dynamo/planner/offline/trace_data.py). Lines may be wrapped as
{"timestamp": …, "event": {…}}.
"""


def is_dynamo(row: dict[str, Any]) -> bool:
    return _event(row).get("schema") == DYNAMO_SCHEMA


def _event(row: dict[str, Any]) -> dict[str, Any]:
    event = row.get("event", row)
    return event if isinstance(event, dict) else {}


def read_dynamo(source: Source) -> Gathered:
    """Read the finished requests of a Dynamo frontend, with the hashes of their prompts' blocks."""
    found = Gathered()
    for line, row in source.rows(json_row):
        event = _event(row)
        if event.get("event_type") not in (None, "request_end"):
            continue
        try:
            found.add(_dynamo_request(event, found))
        except Fault as fault:
            raise broken(source.path, line, str(fault)) from None
    return found


def _dynamo_request(event: dict[str, Any], found: Gathered) -> TraceRequest | None:
    if event.get("schema") != DYNAMO_SCHEMA:
        raise Fault(f"its schema is not {DYNAMO_SCHEMA}")
    request = _part(event, "request")
    replay = _part(request, "replay")
    if not request.get("output_tokens") or not replay.get("input_length"):
        return None
    at = request.get("request_received_ms")
    arrival_ms = real(event.get("event_time_unix_ms") if at is None else at, "request_received_ms", 0, MAX_NS / _MS_NS)
    input_tokens = tokens(replay["input_length"], "input_length")
    hashes = replay.get("input_sequence_hashes") or ()
    if hashes:
        block_tokens = tokens(replay.get("trace_block_size"), "trace_block_size")
        if found.block_tokens not in (0, block_tokens):
            raise Fault(f"trace_block_size is {block_tokens}, and {found.block_tokens} in the lines above")
        found.block_tokens = block_tokens
        if not isinstance(hashes, list) or len(hashes) > -(-input_tokens // block_tokens):
            raise Fault(f"input_sequence_hashes is not a list of the blocks of {input_tokens} tokens")
    return TraceRequest(
        number=0,
        arrival_ns=round(arrival_ms * _MS_NS),
        input_tokens=input_tokens,
        output_tokens=tokens(request["output_tokens"], "output_tokens"),
        hash_ids=tuple(whole(each, "one of input_sequence_hashes", 0, _MAX_HASH) for each in hashes),
    )


def _each_line(source: Source, request: Callable[[str], TraceRequest | None]) -> Gathered:
    found = Gathered()
    for line, row in source.rows(request):
        try:
            found.add(row)
        except Fault as fault:
            raise broken(source.path, line, str(fault)) from None
    return found


# ---------------------------------------------------------------- one document

GUIDELLM_KEYS: Final = ("metadata", "config", "benchmarks")
"""Keys of GuideLLM's JSON output, as written by guidellm 0.8.1 (guidellm/benchmark/schemas/report.py, and
GenerativeRequestStats in guidellm/schemas/base/request_stats.py).
"""
VLLM_KEYS: Final = ("input_lens", "output_lens", "start_times", "…")
"""Keys of `vllm bench serve --save-result --save-detailed`, as written by vllm 0.32.0 (vllm/benchmarks/serve.py)."""
_DOCUMENTS: Final = ((b'"guidellm_version"',), (b'"endpoint_type"', b'"tokenizer_id"'))


def read_document(path: Path) -> Gathered | None:
    """Read a file that is one JSON document of a load generator; return None for any other file."""
    try:
        with path.open("rb") as file:
            zipped = file.read(len(GZIP)) == GZIP
        with gzip.open(path) if zipped else path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            known = head.lstrip()[:1] == b"{" and any(all(key in head for key in keys) for keys in _DOCUMENTS)
            data = head + file.read(MAX_DOCUMENT_BYTES + 1 - len(head)) if known else b""
    except (OSError, EOFError, zlib.error):
        return None  # the reader of lines reports the fault
    if not data:
        return None
    if len(data) > MAX_DOCUMENT_BYTES:
        raise InvalidRequest(f"{path}: over {MAX_DOCUMENT_BYTES} bytes of JSON")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{path}: not one JSON document: a file of several runs (--append-result) has to be cut into its lines"
        ) from None
    try:
        return _guidellm(document) if "benchmarks" in document else _vllm_bench(document)
    except Fault as fault:
        raise InvalidRequest(f"{path}: {fault}") from None


def _guidellm(document: dict[str, Any]) -> Gathered:
    found = Gathered(notes=[CLIENT_NOTE])
    benchmarks = document["benchmarks"]
    if not isinstance(benchmarks, list) or not all(isinstance(each, dict) for each in benchmarks):
        raise Fault("benchmarks is not a list of JSON objects")
    for benchmark in benchmarks:
        by_status = _part(benchmark, "requests")
        for row in _rows(by_status, "successful"):
            found.add(_guidellm_request(row))
        found.left_out += sum(len(by_status.get(status) or ()) for status in ("errored", "incomplete"))
    if len(benchmarks) > 1:
        found.notes.append(f"{len(benchmarks)} benchmarks follow one another at the times at which they ran.")
    return found


def _rows(by_status: dict[str, Any], status: str) -> Iterator[dict[str, Any]]:
    rows = by_status.get(status) or ()
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Fault(f"requests.{status} is not a list of JSON objects")
    yield from rows


def _guidellm_request(row: dict[str, Any]) -> TraceRequest | None:
    if not row.get("prompt_tokens") or not row.get("output_tokens"):
        return None
    start_s = real(row.get("request_start_time"), "request_start_time", 0, MAX_NS / _SECOND_NS)
    names = "prompt_tokens", "output_tokens"
    return _request(round(start_s * _SECOND_NS), row[names[0]], row[names[1]], names)


def _vllm_bench(document: dict[str, Any]) -> Gathered:
    columns = [document.get(name) for name in ("start_times", "input_lens", "output_lens")]
    if not all(isinstance(each, list) for each in columns):
        raise Fault("no lengths and times of requests: run `vllm bench serve` with --save-result and --save-detailed")
    starts_s, inputs, outputs = (list(each) for each in columns if each is not None)
    if not len(starts_s) == len(inputs) == len(outputs):
        raise Fault("start_times, input_lens and output_lens differ in length")
    errors = document.get("errors")
    failed = errors if isinstance(errors, list) and len(errors) == len(starts_s) else [""] * len(starts_s)
    found = Gathered(notes=[CLIENT_NOTE])
    for start_s, input_tokens, output_tokens, error in zip(starts_s, inputs, outputs, failed, strict=True):
        # A failed request keeps its place, with 0 output tokens.
        if error or not input_tokens or not output_tokens:
            found.add(None)
            continue
        at_ns = round(real(start_s, "start_times", 0, MAX_NS / _SECOND_NS) * _SECOND_NS)
        found.add(_request(at_ns, input_tokens, output_tokens, ("input_lens", "output_lens")))
    return found
