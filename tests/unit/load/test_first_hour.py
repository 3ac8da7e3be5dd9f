"""Tests of the first-hour bench: its statistics, and how it reads processes, the stream and clients' answers."""

import argparse
import asyncio
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from load.gateway.http_load import PacedLoad, Requests, Shape, next_due_s
from load.measure import ProcessKey, Reading, cpu_points, listener_on, read_named
from load.metrics import bench_first_hour
from load.metrics.first_hour_figures import (
    IDLE,
    LOADED,
    Fit,
    Minute,
    Phase,
    as_json,
    fit_line,
    process_table,
    progress,
    rows,
    summary,
    verdicts,
)
from load.metrics.freshness import Ages

FINITE = st.floats(-1e4, 1e4)


def minute(number: int, points: dict[str, float], **more: object) -> Minute:
    plain = Minute(
        ended_s=60.0 * number, cpu_points=points, rss_mb=dict.fromkeys(points, 100.0), restarted=[], bench_points=3.0,
        elsewhere_points=0.0, coverage=0.999, coverage_soon=0.99, fresh_p50_s=0.15, fresh_p99_s=0.3, stalest_p99_s=0.4,
        alerts=[],
    )  # fmt: skip
    return replace(plain, **more)


def phase(shape: str, name: str, minutes: list[Minute], fresh_p99_s: float = 0.3) -> Phase:
    return Phase(shape, name, minutes, 0.15, fresh_p99_s, 0.4)


def steady(shape: str, name: str, points: float, growth: float = 0.0, **more: object) -> Phase:
    """Return eleven minutes, of which the first took five times as much."""
    grown = [points + growth * number / 60 for number in range(11)]
    return phase(
        shape,
        name,
        [minute(n + 1, {"planner": 5 * each if n == 0 else each}, **more) for n, each in enumerate(grown)],
    )


def test_growth_that_the_control_shares_is_attributed_to_the_machine() -> None:
    shape, minutes = "3+5", [minute(n + 1, {"planner": 20 + 0.1 * n}, control_points=1 + 0.005 * n) for n in range(11)]
    raw, beside = [v for v in verdicts(phase(shape, IDLE, minutes)) if v.aim.startswith("growth")]
    assert raw.met is False
    assert beside.met is True
    assert beside.value == pytest.approx(0.0, abs=1e-6)
    assert [row.process for row in rows(phase(shape, IDLE, minutes))] == ["planner", "sum", "(control)"]


@given(FINITE, FINITE, st.lists(st.integers(0, 10_000), min_size=3, max_size=60, unique=True))
def test_points_on_a_line_give_its_slope_without_error(slope: float, start: float, xs: list[int]) -> None:
    fit = fit_line(xs, [start + slope * x for x in xs])
    assert fit.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert fit.error == pytest.approx(0.0, abs=1e-4)


@given(
    st.lists(st.tuples(st.integers(0, 1000), FINITE), min_size=3, max_size=40, unique_by=lambda point: point[0]),
    FINITE,
)
def test_the_slope_and_its_error_are_those_of_least_squares(points: list[tuple[int, float]], other: float) -> None:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    fit = fit_line(xs, ys)
    assert fit.slope is not None

    def squares(slope: float) -> float:
        start = (sum(ys) - slope * sum(xs)) / len(xs)
        return sum((y - start - slope * x) ** 2 for x, y in points)

    least = squares(fit.slope)
    assert least <= squares(other) * (1 + 1e-9) + 1e-6
    centre = sum(xs) / len(xs)
    expected = math.sqrt(least / (len(xs) - 2) / sum((x - centre) ** 2 for x in xs))
    assert fit.error == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 1000), FINITE), min_size=3, max_size=40, unique_by=lambda p: p[0]), FINITE)
def test_a_constant_added_to_all_points_changes_no_slope(points: list[tuple[int, float]], level: float) -> None:
    fit, raised = fit_line(*zip(*points, strict=True)), fit_line([x for x, _ in points], [y + level for _, y in points])
    assert raised.slope == pytest.approx(fit.slope, rel=1e-6, abs=1e-6)


def test_too_few_points_determine_no_line_or_no_error() -> None:
    assert fit_line([], []) == fit_line([1.0], [2.0]) == fit_line([1.0, 1.0], [2.0, 3.0]) == Fit(None, None)
    assert fit_line([1.0, 2.0], [2.0, 5.0]) == Fit(3.0, None)


def test_the_first_minute_is_excluded_from_mean_and_growth() -> None:
    planner, total = rows(steady("1+1", IDLE, 8.0))
    assert (planner.first_points, planner.last_points, planner.mean_points) == (40.0, 8.0, pytest.approx(8.0))
    assert planner.growth_points_per_hour == pytest.approx(0.0)
    assert (total.process, total.first_rss_mb) == ("sum", 100.0)


def test_the_sum_covers_all_processes_and_an_absent_one_adds_nothing() -> None:
    minutes = [minute(1, {"metrics": 1.0, "kafka": 2.0}), minute(2, {"kafka": 2.0}), minute(3, {"kafka": 3.0, "x": 1})]
    found = {row.process: (row.first_points, row.last_points) for row in rows(phase("1+1", IDLE, minutes))}
    assert found == {"kafka": (2.0, 3.0), "metrics": (1.0, 0.0), "x": (0.0, 1.0), "sum": (3.0, 4.0)}
    assert list(found) == ["kafka", "metrics", "x", "sum"]


def met(of: Phase) -> list[bool | None]:
    return [verdict.met for verdict in verdicts(of)]


def test_a_figure_exactly_at_its_aim_meets_it() -> None:
    assert met(steady("1+1", IDLE, 12.0)) == met(steady("3+5", IDLE, 25.0)) == [True, True]
    assert met(steady("3+5", LOADED, 150.0, coverage=0.99)) == [True, True, True]
    assert met(phase("3+5", LOADED, steady("3+5", LOADED, 150.0).minutes, fresh_p99_s=1.0)) == [True, True, True]


@pytest.mark.parametrize(
    ("missed", "expected"),
    [(steady("1+1", IDLE, 12.1), [False, True]), (steady("3+5", IDLE, 25.1), [False, True]),
     (steady("1+1", IDLE, 5.0, growth=1.01), [True, False]),
     (steady("1+1", LOADED, 90.0, coverage=0.9899), [True, False]),
     (phase("3+5", LOADED, steady("3+5", LOADED, 90.0).minutes, fresh_p99_s=1.01), [True, True, False])],
)  # fmt: skip
def test_each_missed_aim_is_reported_as_missed(missed: Phase, expected: list[bool]) -> None:
    assert met(missed) == expected
    assert sum(verdict.text.startswith("not met: ") for verdict in verdicts(missed)) == 1


def test_other_minutes_do_not_compensate_for_an_uncovered_one() -> None:
    minutes = list(steady("1+1", LOADED, 50.0, coverage=1.0).minutes)
    minutes[0] = replace(minutes[0], coverage=0.5)
    assert met(phase("1+1", LOADED, minutes)) == [True, False]


def test_growth_that_may_exceed_its_bound_by_chance_is_reported_as_near_it() -> None:
    noisy = [minute(n, {"kafka": 5.0 + n % 2}) for n in range(1, 12)]
    assert "within two standard errors" in verdicts(phase("1+1", IDLE, noisy))[1].text
    assert "within two standard errors" not in verdicts(steady("1+1", IDLE, 5.0, growth=2.0))[1].text


def test_shapes_without_an_aim_have_none_and_short_runs_report_growth_as_not_measured() -> None:
    assert [verdict.aim for verdict in verdicts(steady("2+2", IDLE, 90.0))] == [
        "growth, points of a core an hour, at most 1"
    ]
    for minutes in (2, 3):
        short = [minute(number, {"planner": 1.0}) for number in range(1, minutes + 1)]
        idle, growth = verdicts(phase("1+1", IDLE, short))
        assert (idle.met, growth.met) == (True, None)
        assert growth.text.startswith("not measured: ")


def test_tables_summary_progress_and_json_show_failures_restarts_and_alerts() -> None:
    bad = minute(
        2, {"gateway-1": 7.0}, restarted=["gateway-1"], alerts=["FulcrumStuck{}: 12 s"] * 3, answers=5,
        answer_p50_s=0.5, answer_p99_s=0.9, failures={"status 503": 2}, not_sent=4,
    )  # fmt: skip
    loaded = phase("1+1", LOADED, [minute(1, {"gateway-1": 7.0}), bad])
    for text in (summary(loaded), progress("1+1 load", 2, 2, bad)):
        assert "2 status 503" in text
        assert "not sent 4" in text
        assert "3 FulcrumStuck" in text
        assert "gateway-1" in text
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(process_table(loaded))
    assert "gateway-1" in console.export_text()
    (reported,) = json.loads(json.dumps(as_json([loaded]), allow_nan=False))["phases"]
    assert reported["minutes"][1]["failures"] == {"status 503": 2}
    assert [row["process"] for row in reported["processes"]] == ["gateway-1", "sum"]


def test_cpu_time_of_a_restarted_process_counts_from_its_restart() -> None:
    old, new = ProcessKey("planner", 7, 100.0), ProcessKey("planner", 7, 200.0)
    other = ProcessKey("metrics", 8, 100.0)
    before = Reading(0.0, {old: 50.0, other: 1.0}, {})
    after = Reading(60.0, {new: 3.0, other: 7.0}, {})
    assert cpu_points(before, after) == pytest.approx({"planner": 5.0, "metrics": 10.0})


@pytest.mark.system
def test_cpu_time_covers_all_threads_of_a_process_and_an_ended_one_is_omitted() -> None:
    spin = "import threading, hashlib\nt=[threading.Thread(target=hashlib.pbkdf2_hmac, args=('sha1', b'', b'', 400000))"
    code = f"{spin} for _ in range(2)]\n[x.start() for x in t]\n[x.join() for x in t]\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        root = psutil.Process(process.pid)
        assert process.stdout is not None
        process.stdout.readline()
        reading = read_named([("worker", root), ("bench", psutil.Process())])
        (cpu_s,) = [cpu_s for key, cpu_s in reading.cpu_s.items() if key.name == "worker"]
        main_thread = next(thread for thread in root.threads() if thread.id == process.pid)
        assert cpu_s > 2 * (main_thread.user_time + main_thread.system_time)
        assert reading.rss_mb["worker"] > 1
        process.communicate(b"\n")
    assert read_named([("worker", root)]).cpu_s == {}


@pytest.mark.system
async def test_the_process_that_listens_on_a_port_is_found() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = listener_on(port)
        assert found is not None
        assert found.pid == os.getpid()
    assert listener_on(port) is None


def tick(*windows: list[object]) -> str:
    return json.dumps({"windows": windows})


MEMBERS = json.dumps({"workers": [{"id": "prefill-1"}, {"id": "decode-1"}]})


def test_the_age_of_data_is_that_of_its_newest_covered_instant() -> None:
    ages = Ages()
    assert math.isnan(ages.newest_s(0.0))
    ages.take("members", MEMBERS)
    ages.take("tick", tick([1000, None, [100_000_000, 40_000_000]], [1100, [1], [0]]))
    assert ages.workers == 2
    assert ages.newest_s(1300.0) == pytest.approx(0.2)
    assert ages.stalest_s(1300.0) == pytest.approx(0.26)
    ages.take("tick", tick([900, [0], [100_000_000]], [1000, [1], [100_000_000]]))  # revised: what was shown stays
    assert ages.newest_s(1300.0) == ages.stalest_s(1300.0) == pytest.approx(0.2)


def test_the_data_of_a_worker_that_is_no_longer_listed_grow_old() -> None:
    ages = Ages()
    ages.take("members", MEMBERS)
    ages.take("tick", tick([1000, None, [100_000_000, 100_000_000]]))
    ages.take("members", json.dumps({"workers": [{"id": "decode-1"}]}))
    ages.take("tick", tick([2000, None, [100_000_000]]))
    assert (ages.newest_s(2100.0), ages.stalest_s(2100.0)) == pytest.approx((0.0, 1.0))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**4))
def test_a_paced_client_sends_only_at_its_times_and_skips_missed_ones(due: int, now: int, period: int) -> None:
    following, missed = next_due_s(due, now, period)
    assert following == due + (missed + 1) * period
    assert missed >= 0
    assert following > now
    assert missed == 0 or following - period <= now


class Answering(asyncio.Protocol):
    """A server that answers requests in turn with given answers, and closes the connection for a missing one."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self.transport, asyncio.WriteTransport)
        self.transport.write(self.answers.pop(0) if self.answers else b"")
        if not self.answers:
            self.transport.close()


def streamed(tokens: int) -> bytes:
    data = b'data: {"usage":{"completion_tokens":%d}}\n\n' % tokens
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


@pytest.mark.system
async def test_paced_clients_count_good_answers_and_every_kind_of_failure() -> None:
    refused = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
    given = [[streamed(4), streamed(3), b""], [refused, b""], [b"HTTP/1.1 200 OK\r\n"]]
    server = await asyncio.get_running_loop().create_server(
        lambda: Answering(given.pop(0) if given else [streamed(4)] * 100), "127.0.0.1", 0
    )
    async with server:
        shape = Shape(4, stream=True)
        load = PacedLoad(
            server.sockets[0].getsockname()[:2], Requests("sim", shape, question="x" * 300), shape, clients=1, per_s=500
        )
        running = asyncio.create_task(load.run_forever())
        async with asyncio.timeout(30):
            while len(load.latencies_s) < 50:
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])
    assert load.failures == {"wrong answer": 1, "status 503": 1, "IncompleteReadError": 1}


def test_shapes_are_parsed_and_others_refused() -> None:
    assert bench_first_hour.shapes("1+1,3+5") == ["1+1", "3+5"]
    for wrong in ("", "1", "0+1", "1+1,", "1+1;2+2", "1+0"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench_first_hour.shapes(wrong)


def test_an_hour_is_sixty_idle_minutes() -> None:
    assert bench_first_hour.parse(["--hour"]).idle_minutes == 60
    assert bench_first_hour.parse([]).idle_minutes == bench_first_hour.parse([]).load_minutes == 20
