"""Tests of `fulcrum observe`: its output for servers and recordings."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from libs.cli.main import make_app
from libs.contracts.errors import InvalidRequest, StartupError
from libs.runtime.net.ports import held_port

RUN = CliRunner()


def exposition(second: float) -> list[str]:
    """Return the metrics of eight decoding sequences with steps of 10 ms, from the start on."""
    steps = round(second * 100)
    values = {
        "iteration_tokens_total_count": steps,
        "generation_tokens_total": 8 * steps,
        "time_to_first_token_seconds_count": 8,
        "inter_token_latency_seconds_count": 8 * steps,
        "inter_token_latency_seconds_sum": 0.08 * steps,
        "prompt_tokens_total": 800,
        "num_requests_running": 8,
        "num_requests_waiting": 0,
    }
    return [f'vllm:{name}{{engine="0",model_name="m"}} {value}' for name, value in values.items()]


def observed(*arguments: str) -> list[dict[str, object]]:
    result = RUN.invoke(make_app(["observe"]), ["observe", *arguments, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_recording_prints_one_line_per_second(tmp_path: Path) -> None:
    file = tmp_path / "a.scrapes.jsonl"
    scrapes = [{"t": 1000 + half / 2, "m": exposition(half / 2)} for half in range(41)]
    scrapes[20] = {"t": 1010.0, "error": "ServerDisconnectedError"}
    file.write_text("\n".join(map(json.dumps, scrapes)))
    lines = observed("--replay", str(file))
    assert [line["t_s"] for line in lines] == [1001.0 + second for second in range(20)]
    assert set(lines[0]) == {"t_s", "busy", "prefill", "low", "high"}
    assert lines[-1] == {"t_s": 1020.0, "busy": pytest.approx(1.0, abs=0.01), "prefill": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.parametrize("text", ["no json", '{"m": []}', '{"t": "x"}', "[]", '{"t": 1, "m": 3}'])
def test_an_invalid_recording_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.scrapes.jsonl"
    file.write_text(json.dumps({"t": 1, "m": exposition(1)}) + "\n" + text)
    result = RUN.invoke(make_app(["observe"]), ["observe", "--replay", str(file)])
    assert isinstance(result.exception, InvalidRequest)
    assert "line 2" in result.exception.message


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "--vllm"), (["--vllm", "http://a", "--replay", "b"], "--replay"), (["--vllm", "10.0.0.5:8000"], "http://")],
)
def test_an_address_that_cannot_be_observed_is_refused(arguments: list[str], says: str) -> None:
    result = RUN.invoke(make_app(["observe"]), ["observe", *arguments])
    assert result.exit_code
    assert says in result.output + str(result.exception)


@contextmanager
def server() -> Iterator[str]:
    """A vLLM whose counters advance by 0.5 s per request; it answers /metrics alone."""
    requested = count()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/metrics"
            body = "\n".join(exposition(next(requested) / 2)).encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.system
def test_servers_are_scraped_and_an_unreachable_one_does_not_delay_the_others() -> None:
    with server() as url, held_port() as closed:
        lines = observed("--vllm", url, "--vllm", f"http://127.0.0.1:{closed}", "--lines", "5")
    here = [line for line in lines if line["server"] == url]
    away = [line for line in lines if line["server"] != url]
    assert len(here) == len(away) == 5
    assert here[-1]["prefill"] == 0.0
    assert all(line["trouble"] == "away (ConnectError)" and line["busy"] is None for line in away)


@pytest.mark.system
@pytest.mark.parametrize("path", ["", "/nothing-here"])
def test_a_run_in_which_no_server_was_ever_read_ends_in_an_error(path: str) -> None:
    with held_port() as closed, server() as url:
        target = f"{url}{path}" if path else f"http://127.0.0.1:{closed}"
        result = RUN.invoke(make_app(["observe"]), ["observe", "--vllm", target, "--lines", "1"])
    assert target in result.stdout, "the line says what is wrong with this server"
    assert isinstance(result.exception, InvalidRequest)
    assert "name vLLM's own address" in result.exception.message


@pytest.mark.system
def test_a_page_beside_a_suite_names_the_option_for_its_port() -> None:
    with server() as url:
        port = url.rpartition(":")[2]
        result = RUN.invoke(make_app(["observe"]), ["observe", "--page", "--vllm", url, "--port", port])
    assert isinstance(result.exception, StartupError)
    assert result.exception.message.endswith("stop what holds it or set --port")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kubernetes", " "], "needs a label selector"),
        (["--kubernetes", "app=vllm", "--vllm", "http://a"], "--kubernetes"),
        (["--vllm", "http://a", "--namespace", "b"], "go with --kubernetes"),
        (["--kubernetes", "app=vllm", "--act"], "--act goes with --page"),
        (["--vllm", "http://a", "--page", "--act"], "--kubernetes or --router"),
        (["--kubernetes", "app=vllm", "--page", "--act", "--router", "http://r"], "either"),
        (["--vllm", "http://a", "--page", "--router", "http://r"], "--router goes with"),
    ],
)
def test_options_about_pods_and_roles_are_refused_if_they_have_no_meaning(arguments: list[str], says: str) -> None:
    result = RUN.invoke(make_app(["observe"]), ["observe", *arguments])
    assert result.exit_code
    assert says in result.output + str(result.exception)


def test_pods_without_the_extra_are_refused_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libs.observe.pod_watch", None)
    result = RUN.invoke(make_app(["observe"]), ["observe", "--kubernetes", "app=vllm"])
    assert isinstance(result.exception, InvalidRequest)
    assert "pip install 'fulcrum-serving[kubernetes]'" in result.exception.message
