"""Tests of foreign history as `fulcrum forecast import` reads it."""

import httpx
import numpy as np
import pytest

from libs.cli.forecast import bring
from libs.cli.forecast.bring import ask_prometheus, parse_moment, parse_queries, placed, series_history
from libs.contracts.errors import InvalidRequest, StartupError
from libs.policy.forecast.history import DemandHistory


def history(start_s: float) -> DemandHistory:
    return DemandHistory(600.0, start_s, *(np.ones(144),) * 3)


def test_a_file_with_times_is_unchanged_and_one_without_ends_at_the_given_time() -> None:
    assert placed(history(1.7e9), end_s=2e9, speed=1) == 1.7e9
    assert placed(history(0.0), end_s=2e9, speed=1) == 2e9 - 86_400
    assert placed(history(0.0), end_s=2e9, speed=60) == 2e9 - 1440


def test_queries_are_given_as_one_name_or_three() -> None:
    assert parse_queries("a; b ;c") == ("a", "b", "c")
    assert "vllm" in parse_queries("vllm")[0]
    with pytest.raises(InvalidRequest, match="three PromQL"):
        parse_queries("a;b")


def test_a_time_without_a_zone_is_utc() -> None:
    assert parse_moment("2026-11-20T00:00") == parse_moment("2026-11-20T01:00+01:00")
    with pytest.raises(InvalidRequest, match="not a time such as"):
        parse_moment("yesterday")


def test_samples_missing_from_one_query_are_unknown_and_an_empty_result_is_an_error() -> None:
    found = series_history([{600.0: 1.0, 1200.0: 2.0}, {600.0: 10.0}, {600.0: 5.0, 1200.0: 6.0}])
    assert found.requests.tolist() == [1.0, 2.0]
    assert np.isnan(found.prefill[1])
    with pytest.raises(InvalidRequest, match="no sample"):
        series_history([{}, {}, {}])


def answering(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> None:
    client = httpx.Client

    def make(**options: object) -> httpx.Client:
        transport = httpx.MockTransport(lambda request: answer)
        return client(transport=transport, base_url=str(options["base_url"]))

    monkeypatch.setattr(bring.httpx, "Client", make)


def test_the_series_of_one_query_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [[600.0 * place, "1.5"] for place in range(1, 30)]
    body = {"status": "success", "data": {"result": [{"values": values}, {"values": values}]}}
    answering(monkeypatch, httpx.Response(200, json=body))
    found = ask_prometheus("http://prometheus", ("a", "b", "c"), 86_400)
    assert found.requests.tolist() == [3.0] * 29


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(400, json={"status": "error", "error": "bad"}), httpx.Response(200, text="<html>")],
)
def test_a_prometheus_error_is_quoted(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> None:
    answering(monkeypatch, answer)
    with pytest.raises(StartupError, match="refused 'a'"):
        ask_prometheus("http://prometheus", ("a", "b", "c"), 86_400)
