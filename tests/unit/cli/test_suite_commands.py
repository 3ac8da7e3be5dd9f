"""Tests of `fulcrum logs` and `down` without a suite."""

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cli.find import UP, is_suite
from libs.cli.options import complete_log, complete_role
from libs.cli.suite.running import readable, show_logs, stop_suite, tail
from libs.cli.top.show import show_top
from libs.contracts.errors import StartupError
from libs.launch.ready import Ready, logs_folder, write_ready


def ready_file(folder: Path, port: int = 8000) -> Path:
    urls = dict.fromkeys(("gateway", "planner", "metrics"), f"http://127.0.0.1:{port}")
    rest = dict.fromkeys(("token", "kafka", "redis", "cluster", "model", "engine"), "x")
    file = folder / "suites" / f"{port}.json"
    write_ready(file, Ready(gateways=(urls["gateway"],), pid=os.getpid(), **urls, **rest))
    return file


BREAKS = "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029"
LINE = st.text(st.characters(codec="utf-8", exclude_characters=BREAKS))


@given(st.lists(LINE, max_size=60), st.integers(1, 40))
def test_the_tail_of_a_log_is_its_last_lines(
    tmp_path_factory: pytest.TempPathFactory, said: list[str], limit: int
) -> None:
    log = tmp_path_factory.mktemp("logs") / "a.log"
    log.write_text("".join(f"{line}\n" for line in said), encoding="utf-8")
    assert list(tail(log, limit, follow=False)) == said[-limit:]


@pytest.mark.system
def test_lines_are_printed_as_they_are_written_even_after_the_log_was_truncated(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\nfirst\n")
    lines = tail(log, 1, follow=True)
    assert next(lines) == "first"

    def write(text: str) -> None:
        with log.open("a") as file:
            file.write(text)

    def next_after(text: str) -> str:
        writing = threading.Thread(target=write, args=(text,))
        writing.start()
        try:
            return next(lines)
        finally:
            writing.join()

    assert next_after("second\n") == "second"
    os.truncate(log, 0)
    assert next_after("new\n") == "new"


def test_a_structured_line_is_formatted_and_any_other_is_unchanged() -> None:
    line = {"event": "role set", "level": "info", "timestamp": "2026-11-23T19:30:57.123456Z", "role": "prefill"}
    assert readable(json.dumps(line)).plain == "19:30:57.123 info    role set role=prefill"
    assert readable("Traceback (most recent call last):").plain == "Traceback (most recent call last):"


def test_a_missing_log_lists_the_existing_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    file = ready_file(tmp_path)
    with pytest.raises(StartupError, match="a suite logs on the machine on which it runs"):
        show_logs(file, None, follow=False, limit=5, as_json=False)
    folder = logs_folder(8000)
    folder.mkdir(parents=True)
    (folder / "prefill-1.log").write_text("hello\n")
    with pytest.raises(StartupError, match="there are logs of: prefill-1"):
        show_logs(file, "../secret", follow=False, limit=5, as_json=False)
    assert complete_log("pre") == ["prefill-1"]


def test_a_process_that_is_not_a_suite_is_never_stopped(tmp_path: Path) -> None:
    assert not is_suite(os.getpid(), (UP,))
    with pytest.raises(StartupError, match="is not `fulcrum up`"):
        stop_suite(ready_file(tmp_path), now=False, as_json=True)


def test_shell_completion_offers_roles_without_a_running_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    monkeypatch.setattr("libs.cli.find.DEFAULT_GATEWAY_PORT", 1)
    assert complete_role("de") == ["decode"]


def test_top_without_a_terminal_names_the_commands_that_print_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartupError, match="`fulcrum top --once` or `fulcrum top --json`"):
        show_top(ready_file(tmp_path), metrics=None, once=False, light=False, as_json=False)
    assert capsys.readouterr().out == ""
