"""The command `fulcrum forecast import`: demand history from a file or from Prometheus, passed to a running suite."""

import json
import time
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any, Final

import httpx

from libs.cli.find import error_text, find_one_suite, key_headers, no_suite
from libs.cli.forecast.live import UNIX_S
from libs.contracts.errors import InvalidRequest, StartupError
from libs.forecast.demand_file import read_demand
from libs.policy.forecast.history import SERIES, DemandHistory, history_from_rates

TIMEOUT_S: Final = 60.0
STEP_S: Final = 600.0
# Points of one query_range; Prometheus returns at most 11,000.
MOST_POINTS: Final = 10_000
QUERIES: Final = {
    "vllm": (
        "sum(rate(vllm:request_success_total[10m]))",
        "sum(rate(vllm:prompt_tokens_total[10m]))",
        "sum(rate(vllm:generation_tokens_total[10m]))",
    ),
    "fulcrum": (
        "sum(rate(fulcrum_requests_total[10m]))",
        "sum(rate(fulcrum_request_prompt_tokens_total[10m]))",
        "sum(rate(fulcrum_request_output_tokens_total[10m]))",
    ),
}
"""Queries for requests, prompt tokens and output tokens a second. Both kinds count requests as they end, so refused
ones are missing.
"""


def bring_history(
    ready_file: Path | None,
    file: Path | None,
    prometheus: str,
    *,
    model: str,
    days: float,
    end: str,
    queries: str,
    as_json: bool,
) -> None:
    """Read a history, import it into the suite and print what was accepted. Raise InvalidRequest and StartupError."""
    if (file is None) == (not prometheus):
        raise InvalidRequest("name either a FILE or --prometheus URL")
    suite = find_one_suite(ready_file)
    if file is not None:
        history = read_demand(file)
    else:
        history = ask_prometheus(prometheus, parse_queries(queries), days * 86_400)
    day_s = _day_s(suite.metrics)
    start_s = placed(history, end_s=parse_moment(end) if end else time.time(), speed=86_400 / day_s)
    body = {
        "model": model or suite.model,
        "start_unix_s": start_s,
        "step_s": history.step_s * day_s / 86_400,
        "requests_per_s": _plain(history.requests),
        "prefill_tokens_per_s": _plain(history.prefill),
        "decode_tokens_per_s": _plain(history.decode),
    }
    taken = _post(suite.metrics, suite.token, body)
    if as_json:
        print(json.dumps({"model": body["model"], "start_unix_s": start_s, **taken, "notes": list(history.notes)}))
        return
    rest = "the others were known already or are not over"
    print(f"{len(history)} bins of {history.step_s:g} s: {taken['taken']} of {taken['bins']} fine bins taken, {rest}")
    for note in history.notes:
        print(note)


def placed(history: DemandHistory, *, end_s: float, speed: float) -> float:
    """Return the Unix time at which a history began: its own if it has Unix times; otherwise one by which it ends at
    `end_s`.
    """
    if history.start_s >= UNIX_S and speed == 1:
        return history.start_s
    return end_s - len(history) * history.step_s / speed


def parse_queries(text: str) -> tuple[str, str, str]:
    """Return three queries, from the name of a kind or from three explicit ones. Raise InvalidRequest."""
    if text in QUERIES:
        return QUERIES[text]
    parts = [part.strip() for part in text.split(";")]
    if len(parts) != len(SERIES) or not all(parts):
        raise InvalidRequest(
            f"--queries {text[:60]!r} is not {', '.join(QUERIES)}, nor three PromQL queries with ; between"
        )
    return parts[0], parts[1], parts[2]


def parse_moment(text: str) -> float:
    """Return the Unix seconds of an ISO 8601 time, which is UTC without a zone. Raise InvalidRequest."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"--end {text[:40]!r} is not a time such as 2026-11-20T00:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def ask_prometheus(url: str, queries: tuple[str, str, str], span_s: float) -> DemandHistory:
    """Query history in bins of ten minutes, with as many points per call as Prometheus allows. Raise StartupError."""
    end_s = time.time() // STEP_S * STEP_S
    start_s = end_s - span_s // STEP_S * STEP_S
    found: list[dict[float, float]] = [{}, {}, {}]
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for values, query in zip(found, queries, strict=True):
            at_s = start_s
            while at_s < end_s:
                until_s = min(at_s + MOST_POINTS * STEP_S, end_s)
                values.update(_range(client, query, at_s, until_s))
                at_s = until_s + STEP_S
    return series_history(found)


def series_history(found: list[dict[float, float]]) -> DemandHistory:
    """Return the history of rates, each of which applies to the bin that ended when it was sampled."""
    times = sorted(set().union(*found))
    if not times:
        raise InvalidRequest("Prometheus has no sample of these queries: name others with --queries")
    columns = [[values.get(at, float("nan")) for at in times] for values in found]
    requests, prefill, decode = columns
    rates = {"requests": requests, "known_requests": requests, "prefill": prefill, "decode": decode}
    return history_from_rates([at - STEP_S for at in times], rates, STEP_S)


def _range(client: httpx.Client, query: str, start_s: float, end_s: float) -> dict[float, float]:
    params: dict[str, str | float] = {"query": query, "start": start_s, "end": end_s, "step": STEP_S}
    try:
        answer = client.get("/api/v1/query_range", params=params)
    except httpx.HTTPError as error:
        raise StartupError(f"no Prometheus answers at {client.base_url}: {error}") from None
    try:
        body = answer.json()
        results = body["data"]["result"] if answer.is_success and body["status"] == "success" else None
    except (ValueError, KeyError, TypeError):
        results = None
    if results is None:
        raise StartupError(f"Prometheus refused {query!r}: {answer.text[:200]}")
    values: dict[float, float] = {}
    for series in results:
        for at_s, text in series["values"]:
            values[float(at_s)] = values.get(float(at_s), 0.0) + float(text)
    return values


def _day_s(metrics: str) -> float:
    try:
        answer = httpx.get(
            f"{metrics}/v1/demand",
            params={"span": "1h"},
            headers=key_headers(metrics),
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        return float(answer.json()["bin_s"]) * 1440 if answer.is_success else 86_400.0
    except httpx.TransportError:
        raise no_suite(metrics) from None


def _post(metrics: str, token: str, body: dict[str, Any]) -> dict[str, int]:
    headers = {"authorization": f"Bearer {token}"}
    try:
        answer = httpx.post(f"{metrics}/v1/demand", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except httpx.TransportError:
        raise no_suite(metrics) from None
    if not answer.is_success:
        raise StartupError(f"{metrics}/v1/demand refused: {error_text(answer)}")
    taken: dict[str, int] = answer.json()
    return taken


def _plain(values: Any) -> list[float | None]:
    return [float(f"{value:.9g}") if isfinite(value) else None for value in values.tolist()]
