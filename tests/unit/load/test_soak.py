"""Tests of the soak's verdict on growth, on missing figures and on suites that stop."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from libs.testing.suites.steady_load import SteadyLoad
from libs.testing.suites.suite import RunningSuite
from load import soak as module
from load.soak import COMPARED, TOKENS, Sample, SoakReport, Trend, missing, report, soak, trends

SECONDS = 90.0


def samples(*values: float, figure: str = "resident_mib") -> list[Sample]:
    """Return samples of one process, spread over the time."""
    return [Sample("gateway-1", figure, SECONDS * at / len(values), value) for at, value in enumerate(values)]


def test_growth_of_the_first_third_is_left_out() -> None:
    assert trends(samples(10, 50, 90, 100, 100, 100, 101, 101, 101), SECONDS) == [
        Trend("gateway-1", "resident_mib", 100, 101)
    ]


@pytest.mark.parametrize(
    ("figure", "before", "flat", "grown"),
    [("resident_mib", 100, 105, 106), ("descriptors", 40, 48, 49), ("latency_ms", 20, 70, 71)],
)
def test_only_growth_beyond_the_tolerance_is_not_flat(figure: str, before: float, flat: float, grown: float) -> None:
    assert Trend("gateway-1", figure, before, flat).flat
    assert not Trend("gateway-1", figure, before, grown).flat
    assert Trend("gateway-1", figure, grown, before).flat


def test_a_subject_that_is_unknown_in_a_third_is_not_compared() -> None:
    assert trends(samples(1, 1, 1)[:2], SECONDS) == []


def whole_report() -> SoakReport:
    """Return a report without growth or failures."""
    found = SoakReport(SECONDS)
    found.samples = [
        Sample(subject, figure, SECONDS * share, 10.0) for subject, figure in COMPARED for share in (0.1, 0.5, 0.9)
    ]
    return found


def test_a_soak_without_growth_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(whole_report()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == 0


@pytest.mark.parametrize("lost", COMPARED)
def test_a_figure_that_is_missing_in_the_last_third_fails_the_soak(
    lost: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = whole_report()
    found.samples = [each for each in found.samples if (each.subject, each.figure) != lost or each.at_s < SECONDS / 2]
    assert missing(trends(found.samples, SECONDS)) == [f"{lost[1]} of {lost[0]}"]
    assert report(found) == 1
    assert f"{lost[1]} of {lost[0]}" in capsys.readouterr().out


def test_a_failed_request_fails_the_soak() -> None:
    found = whole_report()
    found.load.failed.append("503")
    assert report(found) == 1


def suite() -> RunningSuite:
    return cast(RunningSuite, SimpleNamespace(ready={"gateways": []}))


async def test_clients_that_get_no_answer_end_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def stuck(urls: list[str], **options: Any) -> AsyncIterator[SteadyLoad]:
        yield SteadyLoad(urls, TOKENS)
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "steady_load", stuck)
    monkeypatch.setattr(module, "END_S", 0.0)
    found = await soak(suite(), 0.0, random.Random(1))
    assert len(found.load.failed) == 1
    assert report(found) == 1


async def test_a_victim_that_does_not_come_back_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def idle(urls: list[str], **options: Any) -> AsyncIterator[SteadyLoad]:
        yield SteadyLoad(urls, TOKENS)

    async def never(suite: RunningSuite, name: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "steady_load", idle)
    monkeypatch.setattr(module, "kill", never)
    monkeypatch.setattr(module, "_look", lambda suite, now_s: [])
    for name in ("BACK_S", "MINUTE_S", "WATCH_S"):
        monkeypatch.setattr(module, name, 0.0)
    with pytest.raises(RuntimeError, match="was not back"):
        await soak(suite(), 60.0, random.Random(1))
