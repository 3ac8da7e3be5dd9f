"""`fulcrum status`, `advice`, `alerts`, `events`: what they print of a service's answers."""

import json
import os
import threading
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
from libs.cli.status.events import merged
from libs.cli.status.show import commands, lines, pressure_bar, span, split_words
from libs.cli.status.tables import life_text
from libs.contracts.errors import StartupError
from libs.launch.ready import Ready, write_ready
from tests.status_rig import NOW_MS, answer


def printed(**changes: Any) -> list[str]:
    return [line.plain for line in lines(parse_status(answer(**changes)))]


def test_the_first_line_is_the_verdict_and_the_rest_says_why() -> None:
    first, *rest = printed()
    assert first == "Prefill-bound: pressure 1.8 against 0.2."
    text = "\n".join(rest)
    for part in (
        "Also: gpu-7 takes 2.4 times as long.", "prefill    3 workers  1.80", "busy 99%", "41 requests wait, 90,000",
        "6 sequences, room for 160 within TPOT (192 slots)", "TPOT 12.1 of 50 ms", "5 prefill + 3 decode would leave",
        "31.2 requests/s, cache hits 31%", "429 2.0/s", "Planner advisory, moves nothing by itself",
        "Last move: gpu-2 decode → prefill, 10 s ago, by p", "Do: fulcrum role gpu-4 gpu-6 prefill",
        "1 alert fires", "Data are 0.1 s old.",
    ):  # fmt: skip
        assert part in text


def test_data_that_are_behind_are_never_passed_off_as_live() -> None:
    told = printed(live=False, not_live_because="nothing came for 95 s", age_ms=95_000)
    assert told[1] == "Not live: nothing came for 95 s."
    assert told[-1] == "Data are 1 min behind."


def test_what_is_not_known_is_a_question_mark_and_no_zero() -> None:
    unknown = {**answer()["models"][0], "known": False, "unknown_because": "no step time of gpu-1 is known"}
    assert "  no step time of gpu-1 is known" in printed(models=[unknown])


def test_workers_that_do_not_simply_run_are_listed_with_their_state() -> None:
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
def test_a_workers_state_is_what_the_status_says_of_it(state: str, life: str, shown: str) -> None:
    worker = {"state": state, "life": life, "life_since_unix_ms": NOW_MS - 4_200}
    assert life_text(worker, NOW_MS).plain == shown


def test_nothing_to_do_advises_nothing() -> None:
    balanced = {"code": "balanced", "sentence": "Balanced.", "since_unix_ms": NOW_MS, "action": None, "causes": []}
    assert commands(parse_status(answer(verdict=balanced)).verdict) == []
    assert not any(line.startswith("Do:") for line in printed(verdict=balanced))


def test_an_answer_of_another_shape_is_told_in_one_line() -> None:
    with pytest.raises(StartupError, match="another shape"):
        parse_status({"verdict": 7})


@given(st.one_of(st.none(), st.floats(0, 1e6)), st.integers(4, 60))
def test_a_bar_is_as_wide_as_asked_whatever_the_pressure(pressure: float | None, cells: int) -> None:
    assert len(pressure_bar(pressure, cells).plain) == cells


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_span_never_says_more_than_it_is(one_ms: float, other_ms: float) -> None:
    sizes = {"s": 1e3, "min": 60e3, "h": 3600e3, "d": 86_400e3}

    def told(ms: float) -> float:
        number, unit = span(ms).split()
        return float(number) * sizes[unit]

    assert told(one_ms) <= one_ms * (1 + 1e-9) + 1e-6
    low, high = sorted((one_ms, other_ms))
    assert told(low) <= told(high)


def test_a_split_without_prefill_workers_is_of_workers_that_do_both() -> None:
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


def test_events_and_alerts_are_one_list_by_time() -> None:
    told = merged([event(2, 30), event(1, 10)], [alert(2, 5, 40), alert(1, 20)])
    assert [(each.unix_ms, each.kind) for each in told] == [
        (10, "role_moved"), (20, "alert"), (30, "role_moved"), (40, "alert_over"),
    ]  # fmt: skip
    assert told[0].actor == "planner"
    assert told[-1].text == "over"


@contextmanager
def a_service(answers: dict[str, Any], tmp_path: Path) -> Iterator[list[str]]:
    """Options that name a suite whose services all answer this."""

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
def test_each_command_prints_what_the_service_answers(tmp_path: Path) -> None:
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
def test_advice_on_old_data_is_not_applied(tmp_path: Path) -> None:
    old = answer(live=False, not_live_because="nothing came for 95 s")
    with a_service({"/v1/status": old}, tmp_path) as ready:
        done = CliRunner().invoke(app, ["advice", "--apply", "--yes", *ready])
    assert isinstance(done.exception, StartupError)
    assert "nothing came for 95 s" in done.exception.message
