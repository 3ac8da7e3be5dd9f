"""Reading of trace files, whose format is recognised by columns or keys rather than by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from pathlib import Path
from typing import Final

from libs.contracts.errors import InvalidRequest
from libs.lab.traces.columns import WORKING_HEADER, read_columns, roles_of
from libs.lab.traces.formats import (
    AEGAEON_COLUMNS,
    AZURE_COLUMNS,
    GENAI_COLUMNS,
    MOONCAKE_BLOCK_TOKENS,
    MOONCAKE_KEYS,
    SERVEGEN_COLUMNS,
    read_aegaeon,
    read_azure,
    read_genai,
    read_mooncake,
    read_servegen,
)
from libs.lab.traces.lines import MAX_REQUESTS, Fault, Source, broken, csv_cells, json_row, numbered_lines
from libs.lab.traces.logs import (
    AIPERF_KEYS,
    DYNAMO_KEYS,
    GUIDELLM_KEYS,
    VLLM_KEYS,
    Gathered,
    is_aiperf,
    is_dynamo,
    read_aiperf,
    read_document,
    read_dynamo,
)
from libs.lab.traces.recording import HEADER_KEYS, REQUIRED_KEYS, is_recording, read_recording
from libs.lab.traces.request import Trace, TraceRequest
from libs.lab.traces.scaling import cut, scale_rate

_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class _LogFormat:
    name: str
    columns: tuple[str, ...]
    read: Callable[[Source], Iterator[TraceRequest]]
    """The format's parser. Arrivals are in order and counted from the file's own epoch."""
    block_tokens: int = 0


_CSV_LOGS: Final = (
    _LogFormat("Azure LLM inference trace", AZURE_COLUMNS, read_azure),
    _LogFormat("Aegaeon", AEGAEON_COLUMNS, read_aegaeon),
    _LogFormat("Alibaba GenAI", GENAI_COLUMNS, read_genai),
)
_MOONCAKE: Final = _LogFormat("Mooncake (JSONL)", MOONCAKE_KEYS, read_mooncake, MOONCAKE_BLOCK_TOKENS)

KNOWN_FORMATS: Final = {
    **{each.name: each.columns for each in (*_CSV_LOGS, _MOONCAKE)},
    "ServeGen bins": SERVEGEN_COLUMNS,
    "AIPerf, profile_export.jsonl": AIPERF_KEYS,
    "Dynamo, request trace v1 (JSONL)": DYNAMO_KEYS,
    "GuideLLM (JSON)": GUIDELLM_KEYS,
    "vllm bench serve --save-detailed (JSON)": VLLM_KEYS,
    "any other CSV with times and lengths, e.g.": WORKING_HEADER,
    "Fulcrum's own (JSONL), first line": HEADER_KEYS,
    "Fulcrum's own (JSONL), each request": (*REQUIRED_KEYS, "…"),
}
"""The columns (CSV) or keys (JSONL) of each supported format."""


def read_trace(
    path: str | Path, *, seed: int, start_s: float = 0.0, seconds: float | None = None, rate_factor: float = 1.0
) -> Trace:
    """Read a trace file, or the `seconds` of it that begin `start_s` after its first arrival or bin.

    The seed determines everything that is not in the file: the arrival within a clock tick, or all draws from rates.
    Bins are drawn at `rate_factor` times their rate; a log of requests is superposed instead (see `scale_rate`). Raise
    InvalidRequest for an unknown format, a malformed line, an empty window, or more than `MAX_REQUESTS` requests.
    """
    path = Path(path)
    if not (start_s >= 0 and (seconds is None or seconds > 0) and 0 < rate_factor < inf):
        raise InvalidRequest("start_s has to be 0 or more, seconds and rate_factor more than 0")
    end_s = inf if seconds is None else start_s + seconds
    document = read_document(path)
    if document is not None:
        return _gathered(Source(path, (), iter(()), seed), document, start_s, end_s, rate_factor)
    lines = numbered_lines(path)
    number, first = next(lines, (0, ""))
    if not number:
        raise InvalidRequest(f"{path}: nothing in it; {_known()}")
    try:
        is_json = first.lstrip().startswith("{")
        row = json_row(first) if is_json else {}
        columns = tuple(row) if is_json else tuple(csv_cells(first))
    except Fault as fault:
        raise broken(path, number, f"{fault}; {_known()}") from None
    if is_json:
        lines = chain([(number, first)], lines)
    source = Source(path, columns, lines, seed)
    keys = frozenset(columns)
    if is_json and is_recording(keys):
        whole = read_recording(source)
        trace = whole if not start_s and seconds is None else cut(whole, start_s, end_s - start_s)
        return trace if rate_factor == 1 else scale_rate(trace, rate_factor, "superpose", seed)
    if not is_json and len(keys) == len(columns) and keys == set(SERVEGEN_COLUMNS):
        drawn = read_servegen(source, start_s, end_s, rate_factor)
        return _trace(source, _window(source, drawn, 0, start_s, end_s), 0)
    for each in (_MOONCAKE,) if is_json else _CSV_LOGS:
        if keys == set(each.columns) and len(keys) == len(columns):
            trace = _log(source, each, start_s, end_s)
            return trace if rate_factor == 1 else scale_rate(trace, rate_factor, "superpose", seed)
    for known, read in ((is_dynamo, read_dynamo), (is_aiperf, read_aiperf)):
        if known(row):
            return _gathered(source, read(source), start_s, end_s, rate_factor)
    roles = None if is_json or len(keys) != len(columns) else roles_of(columns, path)
    if roles is not None:
        return _gathered(source, read_columns(source, roles), start_s, end_s, rate_factor)
    found = ", ".join(columns[:20])
    raise InvalidRequest(f"{path}: no known trace format has the columns {found[:200]}; {_known()}")


def _log(source: Source, form: _LogFormat, start_s: float, end_s: float) -> Trace:
    rows = form.read(source)
    first = next(rows, None)
    if first is None:
        raise InvalidRequest(f"{source.path}: no request in it")
    requests = _window(source, chain([first], rows), first.arrival_ns, start_s, end_s)
    return _trace(source, requests, form.block_tokens)


def _gathered(source: Source, found: Gathered, start_s: float, end_s: float, rate_factor: float) -> Trace:
    rows = found.in_order()
    if not rows:
        raise InvalidRequest(f"{source.path}: no request with times and lengths in it")
    source.notes.extend(found.notes)
    requests = _window(source, iter(rows), rows[0].arrival_ns, start_s, end_s)
    trace = _trace(source, requests, found.block_tokens)
    return trace if rate_factor == 1 else scale_rate(trace, rate_factor, "superpose", source.seed)


def _window(
    source: Source, rows: Iterator[TraceRequest], zero_ns: int, start_s: float, end_s: float
) -> list[TraceRequest]:
    """Return the requests in the window, renumbered and timed from its start. Reading stops at its end."""
    start_ns = zero_ns + round(start_s * _SECOND_NS)
    requests: list[TraceRequest] = []
    for row in rows:
        if end_s < inf and row.arrival_ns >= zero_ns + round(end_s * _SECOND_NS):
            break
        if row.arrival_ns < start_ns:
            continue
        if len(requests) == MAX_REQUESTS:
            raise InvalidRequest(
                f"{source.path}: more than {MAX_REQUESTS} requests: read a part of it, by --start and --seconds"
            )
        requests.append(replace(row, number=len(requests), arrival_ns=row.arrival_ns - start_ns))
    if not requests:
        raise InvalidRequest(f"{source.path}: no request in the {end_s - start_s:g} s from {start_s:g} s on")
    return requests


def _trace(source: Source, requests: list[TraceRequest], block_tokens: int) -> Trace:
    name = source.path.name.removesuffix(".gz").rpartition(".")[0] or source.path.name
    return Trace(name, tuple(requests), block_tokens, tuple(source.notes))


def _known() -> str:
    # Only names, since the header that works would drown in every format's columns.
    names = dict.fromkeys(name.split(",")[0].split(" (")[0] for name in KNOWN_FORMATS if not name.startswith("any"))
    return (
        f"for a CSV of your own this header works: {','.join(WORKING_HEADER)}."
        f" Also known, with columns listed by `fulcrum lab traces`: {', '.join(names)}"
    )
