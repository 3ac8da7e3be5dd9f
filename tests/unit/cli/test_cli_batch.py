"""Tests of `fulcrum batch` against a scripted gateway: existing files survive and failures are reported."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from libs.cli.batch import jobs as batch_files
from libs.cli.batch import jobs as batch_jobs
from libs.cli.main import app
from libs.launch.ready import Ready, write_ready

pytestmark = pytest.mark.system

ANSWERS = b'{"custom_id": "a"}\n' * 2_000
ERRORS = b'{"custom_id": "b"}\n'
REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'


class Gateway(ThreadingHTTPServer):
    """A gateway that accepts one job, which has ended at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.sent = b""
        """The body of the last POST."""
        self.refuses = ""
        """The reason why it refuses a job."""
        self.breaks: list[int] = []
        """The bytes after which the next downloads break off."""
        self.starting = 0
        """The number of requests that it still answers with 503, as it has not read its jobs."""
        self.failing = 0
        """The number of requests after its job that it still answers with 500."""
        self.job: dict[str, Any] = {
            "id": "batch_1", "status": "completed", "output_file_id": "good", "error_file_id": "bad", "errors": None,
            "request_counts": {"total": 2001, "completed": 2000, "failed": 1},
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_POST(self) -> None:
        self.server.sent = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append(f"POST {self.path}")
        if self.path == "/v1/files":
            self._answer(200, b'{"id": "file-1"}')
        elif self.server.refuses:
            self._answer(400, json.dumps({"error": {"message": self.server.refuses}}).encode())
        else:
            self._answer(200, json.dumps({**self.server.job, "status": "validating"}).encode())

    def do_GET(self) -> None:
        if self.server.starting:
            self.server.starting -= 1
            self._answer(503, b'{"error": {"message": "still reads"}}')
            return
        if self.server.failing and self.path == "/v1/batches/batch_1":
            self.server.failing -= 1
            self._answer(500, b'{"error": {"message": "broken"}}')
            return
        found = {"/v1/files/good/content": ANSWERS, "/v1/files/bad/content": ERRORS}.get(self.path)
        self._answer(200, found if found is not None else json.dumps(self.server.job).encode(), breaks=bool(found))

    def do_DELETE(self) -> None:
        self.server.requests.append(f"DELETE {self.path}")
        self._answer(200, b"{}")

    def _answer(self, status: int, body: bytes, *, breaks: bool = False) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.breaks.pop(0)] if breaks and self.server.breaks else body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    with Gateway() as found:
        url = f"http://127.0.0.1:{found.server_port}"
        rest = dict.fromkeys(("planner", "metrics", "token", "kafka", "redis", "cluster", "model", "engine"), "x")
        write_ready(tmp_path / "ready.json", Ready(gateway=url, gateways=(url,), pid=os.getpid(), **rest))
        monkeypatch.setenv("FULCRUM_READY", str(tmp_path / "ready.json"))
        monkeypatch.chdir(tmp_path)
        Path("in.jsonl").write_text(REQUEST)
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def names() -> list[str]:
    """Return the names of the existing files."""
    return sorted(path.name for path in Path().iterdir())


def batch(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["batch", *arguments], input=stdin)


def test_answers_and_errors_are_written_to_separate_files(gateway: Gateway) -> None:
    done = batch("submit", "in.jsonl", "--output", "good", "--errors", "bad", "--json")
    assert (done.exit_code, Path("good").read_bytes(), Path("bad").read_bytes()) == (0, ANSWERS, ERRORS)
    assert names() == ["bad", "good", "in.jsonl", "ready.json"]
    assert done.stderr.startswith("batch_1: validating"), "progress is printed from the start"
    figures = json.loads(done.stdout)
    assert (figures["output_file_id"], figures["error_file_id"]) == ("good", "bad")


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "in.jsonl", "--output", "same", "--errors", "./same"),
        ("submit", "in.jsonl", "--output", "in.jsonl"),
        ("submit", "in.jsonl", "--errors", "link"),
        ("submit", "in.jsonl", "--window", "soon"),
        ("submit", "in.jsonl", "--endpoint", "/v1/images"),
        ("submit", "elsewhere.jsonl"),
    ],
)
def test_an_impossible_command_is_refused_before_anything_is_sent(gateway: Gateway, arguments: tuple[str, ...]) -> None:
    Path("link").symlink_to("in.jsonl")
    Path("elsewhere.jsonl").write_text('{"url": "/v1/images"}')
    done = batch(*arguments)
    assert (done.exit_code, gateway.requests) == (1, [])
    assert "--output" in str(done.exception) or "must be" in str(done.exception) or "--errors" in str(done.exception)
    assert Path("in.jsonl").read_text() == REQUEST


def test_results_need_two_different_files(gateway: Gateway) -> None:
    Path("same").write_text("here before")
    assert batch("results", "batch_1", "--output", "same", "--errors", "same").exit_code == 1
    assert Path("same").read_text() == "here before"
    assert batch("results", "batch_1", "--output", os.devnull, "--errors", os.devnull).exit_code == 0


def test_an_output_file_is_complete_or_unchanged(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "RETRY_S", 0.0)
    monkeypatch.setattr(batch_files, "MAX_OUTAGE_S", 0.0)
    Path("good").write_text("here before")
    gateway.breaks = [100]
    assert batch("results", "batch_1", "--output", "good").exit_code == 1
    assert Path("good").read_text() == "here before"
    assert names() == ["good", "in.jsonl", "ready.json"]
    monkeypatch.setattr(batch_files, "MAX_OUTAGE_S", 60.0)
    gateway.breaks = [100, 50, 200]
    assert batch("results", "batch_1", "--output", "good").exit_code == 0
    assert Path("good").read_bytes() == ANSWERS


def test_the_retry_limit_restarts_with_each_new_byte(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def monotonic() -> float:
        nonlocal now_s
        now_s += 25.0
        return now_s

    monkeypatch.setattr(batch_files, "monotonic", monotonic)
    monkeypatch.setattr(batch_files, "RETRY_S", 0.0)
    gateway.breaks = [100, 200, 300, 400, 500]
    assert batch("results", "batch_1", "--output", "good").exit_code == 0
    gateway.breaks = [100] * 9
    assert batch("results", "batch_1", "--output", "good").exit_code == 1
    assert Path("good").read_bytes() == ANSWERS


def test_the_input_of_a_refused_job_is_deleted(gateway: Gateway) -> None:
    gateway.refuses = "no such topic"
    done = batch("submit", "in.jsonl", "--output-topic", "none")
    assert (done.exit_code, "no such topic" in str(done.exception)) == (1, True)
    assert gateway.requests == ["POST /v1/files", "POST /v1/batches", "DELETE /v1/files/file-1"]


@pytest.mark.parametrize("arguments", [("submit", "in.jsonl"), ("status", "batch_1")])
def test_a_gateway_that_is_still_reading_its_jobs_is_retried(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(batch_jobs, "POLL_S", 0.01)
    gateway.starting = 3
    done = batch(*arguments)
    assert (done.exit_code, gateway.starting) == (0, 0), done.output


def test_a_gateway_that_never_finishes_reading_its_jobs_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_jobs, "MAX_OUTAGE_S", 0.05)
    monkeypatch.setattr(batch_jobs, "POLL_S", 0.01)
    gateway.starting = 1_000
    done = batch("submit", "in.jsonl")
    assert done.exit_code == 1
    assert "still reads" in str(done.output) + str(done.exception)
    assert gateway.requests == []  # no file was left there, no job begun


def test_waiting_for_a_job_survives_gateway_errors_and_a_single_query_reports_them(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_jobs, "POLL_S", 0.01)
    gateway.failing = 3
    done = batch("submit", "in.jsonl", "--wait", "--output", "out.jsonl")
    assert (done.exit_code, gateway.failing) == (0, 0), done.output
    gateway.failing = 3
    done = batch("status", "batch_1")
    assert (done.exit_code, gateway.failing, "broken" in str(done.output) + str(done.exception)) == (1, 2, True)


def test_a_failed_job_has_its_reason_in_the_json(gateway: Gateway) -> None:
    reason = {"code": "empty_file", "message": "no line", "param": "input_file_id", "line": None}
    gateway.job |= {
        "status": "failed", "errors": {"object": "list", "data": [reason]}, "output_file_id": None,
        "error_file_id": None, "request_counts": {"total": 0, "completed": 0, "failed": 0},
    }  # fmt: skip
    done = batch("submit", "in.jsonl", "--wait", "--json")
    assert (done.exit_code, json.loads(done.stdout)["errors"]) == (1, [reason])


def test_a_job_whose_every_line_failed_exits_nonzero(gateway: Gateway) -> None:
    gateway.job |= {"output_file_id": None, "request_counts": {"total": 3, "completed": 0, "failed": 3}}
    assert batch("submit", "in.jsonl", "--wait").exit_code == 1


def test_requests_can_come_from_stdin(gateway: Gateway) -> None:
    assert batch("submit", "-", stdin=REQUEST).exit_code == 0
    assert json.loads(gateway.sent)["endpoint"] == "/v1/completions", "as the first line says"
    assert batch("submit", "none.jsonl").exit_code == 2
    assert len(gateway.requests) == 2


def test_numbers_are_not_mistaken_for_answers(gateway: Gateway) -> None:
    done = batch("results", "batch_1", "--json")
    assert (done.exit_code, "--output" in done.stderr) == (2, True)
    assert batch("results", "batch_1").stdout_bytes == ANSWERS
