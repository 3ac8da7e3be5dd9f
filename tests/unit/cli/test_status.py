"""Tests of `fulcrum status`, `advice`, `alerts` and `events`: their output for a service's answers."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from libs.cli.main import app
from libs.cli.status.answer import SplitAnswer, parse_status
from libs.cli.status.events import merged, unix_ms_of
from libs.cli.status.show import CALM, NEAR, commands, lines, pressure_bar, span, split_words
from libs.cli.status.tables import life_text
from libs.contracts.errors import InvalidRequest, StartupError
from libs.launch.ready import Ready, write_ready
from tests.status_rig import NOW_MS, answer


def printed(**changes: Any) -> list[str]:
    return [line.plain for line in lines(parse_status(answer(**changes)))]


def test_the_first_line_is_the_verdict_and_the_rest_explains_it() -> None:
    first, *rest = printed()
    assert first == "Prefill-bound: pressure 1.8 against 0.2."
    text = "\n".join(rest)
    for part in (
        "Also: gpu-7 takes 2.4 times as long.", "prefill    3 workers  1.80", "busy 99% of the time",
        "41 requests wait, 90,000",
        "6 sequences, room for 160 within TPOT (192 slots)", "TPOT 12.1 of 50 ms", "5 prefill + 3 decode would leave",
        "31.2 requests/s, cache hits 31%", "429 2.0/s", "Planner advisory, moves nothing by itself",
        "Last move: gpu-2 decode → prefill, 10 s ago, by p", "Do: fulcrum role gpu-4 gpu-6 prefill",
        "1 alert fires", "Data are 0.1 s old.",
    ):  # fmt: skip
        assert part in text


def test_encoding_is_shown_as_a_part_of_busy_time_if_there_is_any() -> None:
    models = answer()["models"]
    models[0]["prefill"] |= {"busy": 0.75, "encode": 0.25}
    text = "\n".join(printed(models=models))
    assert "busy 75% of the time, encode 25%" in text
    assert text.count("encode") == 1
    assert "encode" not in "\n".join(printed())


def test_refused_and_waiting_requests_are_shown_even_if_no_request_has_ended() -> None:
    refused = [{"status": 403, "code": "permission_denied", "per_s": 9.0}, {"status": 0, "code": "other", "per_s": 1.0}]
    traffic = {"window_ms": 10_000, "requests_per_s": 0.0, "rejected_per_s": 10.0, "refused": refused}
    waiting = {"ttft_p50_ms": 28_000.0, "ttft_p95_ms": 29_000.0, "awaited": 92}
    text = "\n".join(printed(traffic=traffic | waiting))
    assert "No request has ended in the last 10 s." in text
    assert "otherwise refused 10.0/s (403 permission_denied 9.0/s, 0 other 1.0/s)" in text
    assert "TTFT 28000 ms p50, 29000 ms p95 (92 without a first token count by their wait so far)" in text


def test_a_cause_of_another_release_is_printed_like_a_known_one() -> None:
    new = {"code": "brand_new", "sentence": "Something new.", "since_unix_ms": NOW_MS - 3000, "action": None}
    first, second, *_ = printed(verdict={**new, "causes": [new]})
    assert (first, second) == ("Something new.", "brand new for 3.0 s")


def test_old_data_are_never_shown_as_live() -> None:
    reported = printed(live=False, not_live_because="nothing came for 95 s", age_ms=95_000)
    assert reported[1] == "Not live: nothing came for 95 s."
    assert reported[-1] == "Data are 1 min behind."


def test_an_unknown_figure_is_a_question_mark_and_not_a_zero() -> None:
    unknown = {**answer()["models"][0], "known": False, "unknown_because": "no step time of gpu-1 is known"}
    assert "  no step time of gpu-1 is known" in printed(models=[unknown])


def test_workers_that_are_not_simply_running_are_listed_with_their_state() -> None:
    lives = [("gpu-0", "running"), ("gpu-1", "silent"), ("gpu-2", "back"), ("gpu-3", "gone")]
    workers = [{"id": name, "life": life, "life_since_unix_ms": NOW_MS - 4_200} for name, life in lives]
    assert "Workers: gpu-1 silent for 4.2 s, gpu-2 back for 4.2 s" in printed(workers=workers)
    assert not any(line.startswith("Workers:") for line in printed(workers=workers[:1]))
    assert not any(line.startswith("Workers:") for line in printed()), "an older service lists none"


@pytest.mark.parametrize(
    ("state", "life", "shown"),
    [
        ("ready", "running", "running"), ("draining", "running", "draining"), ("ready", "starting", "starting"),
        ("ready", "silent", "silent 4.2 s"), ("ready", "back", "back 4.2 s"),
        ("ready", "restarting", "restarting 4.2 s"),
    ],
)  # fmt: skip
def test_a_workers_state_is_taken_from_the_status(state: str, life: str, shown: str) -> None:
    worker = {"state": state, "life": life, "life_since_unix_ms": NOW_MS - 4_200}
    assert life_text(worker, NOW_MS).plain == shown


def test_a_balanced_cluster_has_no_advice() -> None:
    balanced = {"code": "balanced", "sentence": "Balanced.", "since_unix_ms": NOW_MS, "action": None, "causes": []}
    assert commands(parse_status(answer(verdict=balanced)).verdict) == []
    assert not any(line.startswith("Do:") for line in printed(verdict=balanced))


def test_an_answer_of_another_shape_is_one_line() -> None:
    with pytest.raises(StartupError, match="unknown form"):
        parse_status({"verdict": 7})


@given(st.one_of(st.none(), st.floats(0, 1e6)), st.integers(4, 60))
def test_a_bar_has_the_requested_width_at_any_pressure(pressure: float | None, cells: int) -> None:
    assert len(pressure_bar(pressure, cells).plain) == cells


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_duration_is_never_rounded_up(one_ms: float, other_ms: float) -> None:
    sizes = {"s": 1e3, "min": 60e3, "h": 3600e3, "d": 86_400e3}

    def reported(ms: float) -> float:
        number, unit = span(ms).split()
        return float(number) * sizes[unit]

    assert reported(one_ms) <= one_ms * (1 + 1e-9) + 1e-6
    low, high = sorted((one_ms, other_ms))
    assert reported(low) <= reported(high)


def test_a_split_without_prefill_workers_counts_mixed_workers() -> None:
    assert split_words(SplitAnswer(3, 5)) == "3 prefill + 5 decode"
    assert split_words(SplitAnswer(0, 8)) == "8 workers that do both"


def event(number: int, at_ms: int, **more: Any) -> dict[str, Any]:
    base = {"worker": "gpu-1", "role": "prefill", "actor": "", "reason": "prompts press", "planner": "planner"}
    return {"number": number, "unix_ms": at_ms, "action": "role_moved", **base, **more}


def alert(number: int, started_ms: int, ended_ms: int | None = None) -> dict[str, Any]:
    return {
        "number": number, "id": "a", "name": "FulcrumImbalance", "state": "resolved" if ended_ms else "firing",
        "severity": "warning", "labels": {"model": "sim"}, "reason": "why", "ended_because": "over" if ended_ms else "",
        "started_unix_ms": started_ms, "ended_unix_ms": ended_ms, "runbook_url": "http://x/runbook/FulcrumImbalance",
    }  # fmt: skip


def test_events_and_alerts_are_merged_by_time() -> None:
    reported = merged([event(2, 30), event(1, 10)], [alert(2, 5, 40), alert(1, 20)])
    assert [(each.unix_ms, each.kind) for each in reported] == [
        (10, "role_moved"), (20, "alert"), (30, "role_moved"), (40, "alert_over"),
    ]  # fmt: skip
    assert reported[0].actor == "planner"
    assert reported[-1].text == "over"


@pytest.mark.parametrize(
    ("text", "unix_ms"),
    [
        ("10m", 999_400_000), ("2h", 992_800_000), ("1970-01-12T13:46:40Z", 1_000_000_000),
        ("1970-01-12T14:46:39+01:00", 999_999_000), (" 30s ", 999_970_000),
    ],
)  # fmt: skip
def test_since_is_a_duration_before_now_or_a_time(text: str, unix_ms: int) -> None:
    assert unix_ms_of(text, 1_000_000, option="--since") == unix_ms


@pytest.mark.parametrize("text", ["", "10", "soon", "10 minutes", "-5m", "2026-13-01", "9999-01-01T00:00Z"])
def test_a_time_that_is_not_in_the_past_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--since"):
        unix_ms_of(text, 1_000_000, option="--since")


@pytest.mark.system
def test_events_since_a_time_omit_earlier_ones(tmp_path: Path) -> None:
    now_ms = time.time_ns() // 1_000_000
    happened = [event(number, now_ms - minutes * 60_000) for number, minutes in ((3, 1), (2, 5), (1, 60))]
    over = alert(1, now_ms - 7_200_000, now_ms - 120_000)
    answers = {"/v1/events": happened, "/v1/alerts": {"firing": [], "recent": [over], "held_back": []}}
    with a_service(answers, tmp_path) as ready:

        def kinds(*words: str) -> list[str]:
            done = CliRunner().invoke(app, ["events", "--json", *words, *ready])
            assert done.exit_code == 0, done.output
            return [json.loads(line)["kind"] for line in done.stdout.splitlines()]

        assert kinds() == ["role_moved", "role_moved", "alert_over", "role_moved"]
        assert kinds("--since", "10m") == ["role_moved", "alert_over", "role_moved"]
        assert kinds("--since", "10m", "-n", "1") == ["role_moved"]
        assert kinds("--since", "10s") == []
        quiet = CliRunner().invoke(app, ["events", "--since", "10s", *ready])
        assert quiet.stdout.startswith("Nothing has happened since ")


@contextmanager
def a_service(answers: dict[str, Any], tmp_path: Path) -> Iterator[list[str]]:
    """Yield options that name a suite whose services all give this answer."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            found = answers.get(self.path.split("?")[0])
            body = json.dumps({"error": {"message": "there is no such thing"}} if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 (http.server names them)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    rest = dict.fromkeys(("token", "kafka", "redis", "cluster", "model", "engine"), "x")
    file = tmp_path / "ready.json"
    write_ready(file, Ready(gateway=url, gateways=(url,), planner=url, metrics=url, pid=os.getpid(), **rest))
    try:
        yield ["--ready", str(file)]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.system
def test_each_command_prints_the_answer_of_the_service(tmp_path: Path) -> None:
    answers = {
        "/v1/status": answer(),
        "/v1/alerts": {
            "firing": [alert(1, NOW_MS) | {"command": "fulcrum role gpu-4 prefill"}],
            "recent": [alert(1, NOW_MS)],
            "held_back": [],
        },
        "/v1/events": [event(1, NOW_MS - 1000)],
    }
    with a_service(answers, tmp_path) as ready:

        def run(*words: str) -> str:
            done = CliRunner().invoke(app, [*words, *ready])
            assert done.exit_code == 0, done.output
            return done.stdout

        assert run("status").startswith("Prefill-bound: pressure 1.8 against 0.2.")
        assert json.loads(run("status", "--json")) == answers["/v1/status"]
        assert run("advice") == "fulcrum role gpu-4 gpu-6 prefill\n"
        assert json.loads(run("advice", "--json"))["commands"] == ["fulcrum role gpu-4 gpu-6 prefill"]
        assert "FulcrumImbalance sim" in run("alerts") == run("alerts", "list")
        assert "run: fulcrum role gpu-4 prefill" in run("alerts")
        happened = [json.loads(line) for line in run("events", "--json").splitlines()]
        assert [each["kind"] for each in happened] == ["role_moved", "alert"]


@pytest.mark.system
def test_a_past_time_is_shown_with_the_verdict_of_that_time(tmp_path: Path) -> None:
    now_ms = int(time.time() * 1000)
    stood = [
        {"unix_ms": now_ms - 900_000, "code": "balanced", "sentence": "Balanced.", "command": ""},
        {"unix_ms": now_ms - 610_000, "code": "prefill_bound", "sentence": "Prefill-bound: pressure 1.4.",
         "command": "fulcrum role d1 prefill"},
        {"unix_ms": now_ms - 560_000, "code": "idle", "sentence": "Idle.", "command": ""},
    ]  # fmt: skip
    past = {
        "window_ms": 1_000,
        "models": {"m": {"prefill": [1.2, 1.6, None], "decode": [0.2] * 3, "waiting_tokens": [9_000.0] * 3}},
        "traffic": {"requests_per_s": [4.0, 6.0, 5.0], "batch_waiting": [0.5, 0.5, 0.5], "new_figure": [1.0]},
        "verdicts": stood,
    }
    with a_service({"/v1/status/history": past}, tmp_path) as ready:
        shown = CliRunner().invoke(app, ["status", "--at", "10m", *ready])
        assert shown.exit_code == 0, shown.output
        parts = (
            "Prefill-bound: pressure 1.4.", "prefill bound for 1", "m: prefill pressure 1.40, decode pressure 0.20",
            "9,000 prompt tokens wait", "5.0 requests/s", "It advised: fulcrum role d1 prefill",
        )  # fmt: skip
        for part in parts:
            assert part in shown.output
        assert "Idle." not in shown.output
        assert json.loads(CliRunner().invoke(app, ["status", "--at", "10m", "--json", *ready]).stdout) == past


@pytest.mark.system
def test_an_unknown_or_invalid_past_time_is_reported(tmp_path: Path) -> None:
    nothing = {"window_ms": 1_000, "models": {}, "traffic": {"requests_per_s": [None]}, "verdicts": []}
    with a_service({"/v1/status/history": nothing}, tmp_path) as ready:
        assert "Nothing is known of " in CliRunner().invoke(app, ["status", "--at", "5m", *ready]).output
        for wrong, why in (("soon", "--at is 'soon'"), ("3d", "two days are kept"), ("2990-01-01", "in the future")):
            refused = CliRunner().invoke(app, ["status", "--at", wrong, *ready])
            assert refused.exit_code and why in str(refused.exception or refused.output), wrong
        both = CliRunner().invoke(app, ["status", "--at", "5m", "--watch", *ready])
        assert both.exit_code and "neither --watch nor --links" in str(both.exception or both.output)


@pytest.mark.system
def test_advice_on_old_data_is_not_applied(tmp_path: Path) -> None:
    old = answer(live=False, not_live_because="nothing came for 95 s")
    with a_service({"/v1/status": old}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", "--apply", "--yes", *ready])
    assert isinstance(done.exception, StartupError)
    assert "nothing came for 95 s" in done.exception.message


@pytest.mark.system
def test_the_command_of_a_later_cause_is_applied_if_the_first_has_none(tmp_path: Path) -> None:
    bound = answer()["verdict"]["causes"][0]
    short = {"code": "short_of_cpu", "sentence": "Short of CPU.", "since_unix_ms": NOW_MS, "action": None}
    with a_service({"/v1/status": answer(verdict={**short, "causes": [short, bound]})}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", "--apply", *ready], input="n\n")
    assert done.exit_code == 1
    assert f"{bound['sentence']}\nRun `{bound['action']['command']}`?" in done.output


PROMISE = {
    "id": "m/1", "model": "m", "code": "prefill_bound", "command": "fulcrum role gpu-4 prefill",
    "followed_unix_ms": NOW_MS, "pressure_least": 0.7, "pressure_most": 0.9, "came": 1.3, "kept": False,
}  # fmt: skip


@pytest.mark.system
def test_the_score_of_advice_shows_promised_and_achieved_effects_of_each_command(tmp_path: Path) -> None:
    counted = {"kept": 1, "of": 2, "by_cause": [], "promises": [PROMISE, {**PROMISE, "came": 0.8, "kept": True}]}
    with a_service({"/v1/advice": counted}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", "--score", *ready])
    assert done.exit_code == 0, done.output
    assert "1 of 2 followed commands left the pressure that they promised." in done.stdout
    missed = next(line for line in done.stdout.splitlines() if line.startswith("missed"))
    assert missed.split() == ["missed", "prefill_bound", "0.70", "to", "0.90", "1.30", *PROMISE["command"].split()]


@pytest.mark.system
def test_the_score_of_advice_shows_backlog_and_ttft_separately_from_pressure(tmp_path: Path) -> None:
    outcome = {key: PROMISE[key] for key in ("id", "model", "code", "command", "followed_unix_ms")}
    outcomes = [
        {**outcome, "figure": "pressure", "least": 0.7, "most": 0.9, "came": 1.3, "kept": False},
        {**outcome, "figure": "backlog", "least": 6.0, "most": 9.0, "came": 7.5, "kept": True},
        {**outcome, "figure": "ttft", "least": 200.0, "most": 800.0, "came": 950.0, "kept": False},
    ]
    figures = [{"figure": "pressure", "kept": 0, "of": 1}, {"figure": "backlog", "kept": 1, "of": 1}]
    score = {
        "kept": 0, "of": 1, "by_cause": [], "promises": [PROMISE], "by_figure": figures, "outcomes": outcomes,
    }  # fmt: skip
    with a_service({"/v1/advice": score}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", "--score", *ready])
    assert done.exit_code == 0, done.output
    assert "Advice kept: pressure 0 of 1, backlog 1 of 1." in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    command = PROMISE["command"].split()
    assert ["kept", "prefill_bound", "backlog", "gone", "6.0", "to", "9.0", "s", "7.5", "s", *command] in rows
    assert ["missed", "prefill_bound", "TTFT", "p95", "200", "to", "800", "ms", "950", "ms", *command] in rows
    assert sum("prefill_bound" in row for row in rows) == 3


@pytest.mark.system
def test_advice_prints_the_expected_effect_beside_its_command(tmp_path: Path) -> None:
    said = answer()
    promised = {
        "backlog_least_s": 6.0, "backlog_most_s": 9.4, "ttft_p95_least_ms": 200.0, "ttft_p95_most_ms": 800.0,
        "tpot_p95_least_ms": None, "tpot_p95_most_ms": None,
    }  # fmt: skip
    said["verdict"]["action"] |= promised
    with a_service({"/v1/status": said}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", *ready])
        as_json = CliRunner().invoke(app, ["advice", "--json", *ready])
    assert "Promised" not in done.stdout
    assert "Promised: waiting prompts gone in 6.0 to 9.4 s, TTFT p95 then 200 to 800 ms." in done.stderr
    assert promised.items() <= json.loads(as_json.stdout)["promised"].items()


@pytest.mark.system
def test_the_score_of_advice_is_empty_if_none_was_followed(tmp_path: Path) -> None:
    with a_service({"/v1/advice": {"kept": 0, "of": 0, "by_cause": [], "promises": []}}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", "--score", *ready])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "No advised command has been followed" in done.stderr


def test_pressure_above_one_is_not_green_even_without_a_named_cause() -> None:
    calm = {"code": "balanced", "sentence": "Balanced.", "since_unix_ms": NOW_MS - 3000, "action": None, "causes": []}
    pressed = next(lines(parse_status(answer(verdict=calm))))
    assert pressed.style == f"bold {NEAR}"
    models = [
        each | {phase: each[phase] | {"pressure": 0.4} for phase in ("prefill", "decode")}
        for each in answer()["models"]
    ]
    assert next(lines(parse_status(answer(verdict=calm, models=models)))).style == f"bold {CALM}"
