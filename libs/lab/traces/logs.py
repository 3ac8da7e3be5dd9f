"""Public request logs as CSV with one request a line: Azure's LLM traces, Aegaeon's and Alibaba's GenAI."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from libs.contracts.errors import quoted
from libs.lab.traces.lines import MAX_TOKENS, Fault, Source, broken, real, tokens, whole
from libs.lab.traces.request import TraceRequest

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and AzureLLMInferenceDataset2024.md."""
AEGAEON_COLUMNS: Final = ("Request Time", "Model Name", "Input Length", "Output Length")
"""Columns of the synthetic request logs of MachineLearningSystem/25SOSP-Aegaeon."""
GENAI_COLUMNS: Final = ("t_s", "model", "exec_s", "adapters")
"""Columns derived from alibaba/clusterdata, cluster-trace-v2026-GenAI."""

GENAI_TOKENS_PER_S: Final = 20
"""Output tokens that represent one second of an image request, equivalent to decode steps of 50 ms."""
GENAI_NOTE: Final = (
    f"The log has no tokens: a request that ran n seconds became a prompt of 1 token and {GENAI_TOKENS_PER_S} n output "
    "tokens, at least 1. It shows which model is wanted when and for about how long, and says nothing of prompts: "
    "for models that come and go, not for a replay on one model. Requests without a model that ran no "
    "time are left out."
)

SECOND_NS: Final = 1_000_000_000
_DATE_TIME: Final = re.compile(
    r"(\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2})(?:\.(\d{1,9}))?(Z|[+-]\d{2}:\d{2})?", re.ASCII
)
_TIME_OF_DAY: Final = re.compile(r"(\d{1,3}):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?", re.ASCII)


def read_azure(source: Source) -> Iterator[TraceRequest]:
    """Read a log of 2023 (seven fractional digits, no time zone) or of 2024 (six digits and a time zone)."""

    def request(text: str) -> TraceRequest:
        cells = source.cells(text)
        return TraceRequest(
            number=0,
            arrival_ns=_date_time_ns(cells["TIMESTAMP"]),
            input_tokens=tokens(cells["ContextTokens"], "ContextTokens"),
            output_tokens=tokens(cells["GeneratedTokens"], "GeneratedTokens"),
        )

    return _in_order(source, request)


def read_aegaeon(source: Source) -> Iterator[TraceRequest]:
    """Read a log of many models, each of which is requested rarely."""

    def request(text: str) -> TraceRequest:
        cells = source.cells(text)
        return TraceRequest(
            number=0,
            arrival_ns=_time_of_day_ns(cells["Request Time"]),
            input_tokens=tokens(cells["Input Length"], "Input Length"),
            output_tokens=tokens(cells["Output Length"], "Output Length"),
            model=_named(cells["Model Name"], "Model Name"),
        )

    return _in_order(source, request)


def read_genai(source: Source) -> Iterator[TraceRequest]:
    """Read image requests, whose seconds of execution are turned into tokens (see `GENAI_NOTE`)."""
    source.notes.append(GENAI_NOTE)

    def request(text: str) -> TraceRequest | None:
        cells = source.cells(text)
        whole(cells["adapters"], "adapters", 0, MAX_TOKENS)
        run_s = real(cells["exec_s"], "exec_s", 0, MAX_TOKENS / GENAI_TOKENS_PER_S)
        if not cells["model"] and not run_s:
            return None
        return TraceRequest(
            number=0,
            arrival_ns=round(real(cells["t_s"], "t_s", 0, 1e9) * SECOND_NS),
            input_tokens=1,
            output_tokens=max(round(run_s * GENAI_TOKENS_PER_S), 1),
            model=_named(cells["model"], "model"),
        )

    return _in_order(source, request)


def _in_order(source: Source, request: Callable[[str], TraceRequest | None]) -> Iterator[TraceRequest]:
    before_ns: int | None = None
    for line, row in source.rows(request):
        if row is None:
            continue
        if before_ns is not None and row.arrival_ns < before_ns:
            raise broken(source.path, line, "its time is before that of the line above: sort the file by time")
        before_ns = row.arrival_ns
        yield row


def _named(text: str, name: str) -> str:
    if not text:
        raise Fault(f"{name} is empty")
    return text


def _date_time_ns(text: str) -> int:
    """Return Unix ns, reading a time without a zone as UTC. `datetime` alone would drop the seventh digit."""
    found = _DATE_TIME.fullmatch(text)
    try:
        at = datetime.fromisoformat(found[1] + (found[3] or "")) if found else None
    except ValueError:
        at = None
    if at is None or found is None:
        raise Fault(f"TIMESTAMP is {quoted(text)}, not a date and time")
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return int(at.timestamp()) * SECOND_NS + _fraction_ns(found[2])


def _time_of_day_ns(text: str) -> int:
    found = _TIME_OF_DAY.fullmatch(text)
    if found is None:
        raise Fault(f"Request Time is {quoted(text)}, not hours:minutes:seconds")
    return (int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])) * SECOND_NS + _fraction_ns(found[4])


def _fraction_ns(digits: str | None) -> int:
    return int((digits or "").ljust(9, "0"))
