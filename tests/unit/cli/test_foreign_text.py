"""Tests that foreign text is plain text to every command: no escape code, line end or markup in it takes effect."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import typer
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from libs.cli.console import make_console
from libs.cli.main import app
from libs.cli.suite.running import readable
from libs.contracts.foreign_text import masked, plain, plain_values
from libs.keys.book import draw_key
from libs.runtime.service import configure_logging
from libs.testing import golden
from services.metrics.http.login import FOLDER
from tests.status_rig import answer
from tests.unit.cli.test_request_command import RECORDED
from tests.unit.cli.test_status import NOW_MS, a_service, alert, event

EVIL = "\x1b[31mred\x1b[0m\r\nFORGED \u202e\x9b2J[bold]x[/bold] :smile:"

MASK = "sk-fulcrum-***"
PROGRAM = typer.main.get_command(app)
ENUMERATED = {
    "action", "role", "from_role", "to_role", "state", "lead", "time", "code", "verdict", "severity", "name", "status",
    "mode", "reason_code", "since", "way", "quiet_hours", "method", "object", "what", "outcome", "id", "figure",
    "from_time", "to_time", "last_use", "command",
}  # fmt: skip
"""Keys of words that programs compare, and of ids that commands send back."""


def dirty(value: Any, key: str = "") -> Any:
    """Return the same answer as if an attacker had written all of its free text."""
    if isinstance(value, dict):
        return {name: dirty(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [dirty(each, key) for each in value]
    return value + EVIL if isinstance(value, str) and key not in ENUMERATED else value


def of_shape(shape: Any) -> Any:
    if isinstance(shape, dict):
        return {name.removesuffix("?"): of_shape(each) for name, each in shape.items()}
    if isinstance(shape, list):
        return [of_shape(each) for each in shape]
    return {"string": "x", "number": 1, "bool": True}.get(shape) if isinstance(shape, str) else None


def shaped(service: str, path: str) -> Any:
    return of_shape(json.loads((golden.FOLDER / f"{service}.json").read_text())[path])


DECISION = shaped("planner", "/v1/decisions")[0] | {
    "action": "set_role", "time": "2026-01-01T00:00:00.000Z", "workers": ["gpu-1"], "model": "sim", "reason": "why",
    "changes": [{"worker": "gpu-1", "role": "prefill", "epoch": 2, "budget_tokens": 0}],
}  # fmt: skip
ADVICE = {"kind": "chunk", "figure": "TTFT", "low": 1, "high": 2, "command": "c", "outcome": "open", "came": 0}
MODEL = {
    "name": f"m{EVIL}", "source": "s", "parent": "p", "size_bytes": 1, "state": "disk", "workers": ["gpu-1"],
    "priority": 0, "floor": 0, "pinned": True, "reservations": [], "load_s": 1.0, "wake_s": 1.0, "load_measured": True,
    "last_use": None, "next_use_s": None, "in_flight": 0, "waiting": 0, "error": "it is broken",
}  # fmt: skip
SILENCE = {
    "id": "a", "alert_name": "FulcrumImbalance", "labels": {"worker": "gpu-1"}, "alert_id": "", "actor": "ann",
    "reason": "why", "made_unix_ms": NOW_MS, "until_unix_ms": NOW_MS + 1000, "alerts": [],
}  # fmt: skip
BATCH = shaped("gateway", "/v1/batches")["data"][0] | {
    "id": "batch_1",
    "status": "failed",
    "errors": {"data": [{"code": "c", "message": "why", "line": 1}]},
}
MEDIANS = {"requests": [1.0], "prefill": [1.0], "decode": [1.0]}
BANDS = {"p5": [1.0], "p25": [1.0], "p50": [1.0], "p75": [1.0], "p95": [1.0]}
AUDIT = {
    "id": "1", "unix_ms": NOW_MS, "service": "gateway", "actor": "key", "tenant": "a", "role": "user",
    "action": f"DELETE /v1/files/{EVIL}", "detail": "d", "status": 403, "repeats": 0,
}  # fmt: skip
ANSWERS = {
    "/v1/workers": shaped("planner", "/v1/workers"),
    "/v1/occupancy": shaped("metrics", "/v1/occupancy"),
    "/v1/status": answer(),
    "/v1/alerts": {"firing": [alert(1, NOW_MS)], "recent": [alert(2, NOW_MS)], "held_back": [], "silences": [SILENCE]},
    "/v1/alerts/silences": SILENCE,
    "/v1/alerts/silences/a": SILENCE,
    "/v1/alerts/acks": SILENCE,
    "/v1/requests/summary": {"total": {}}, "/v1/requests/3f2a9c": RECORDED, "/v1/requests": [RECORDED],
    "/v1/events": [event(1, NOW_MS)],
    "/v1/decisions": [DECISION, DECISION | {"sequence": 2, "action": "recommend", "advice": ADVICE}],
    "/v1/decisions/1": DECISION,
    "/v1/planner": {
        "planner_id": "p", "mode": "auto", "lead": "ours", "not_live": "of nothing", "decisions": {},
        "models": [{"model": "sim", "now": None, "unknown": "why", "code": "", "pinned": []}],
    },
    "/v1/limits": shaped("planner", "/v1/limits") | {"kept": False},
    "/v1/mode": {"mode": "auto", "kept": True},
    "/v1/models": {
        "models": [MODEL], "gpus": 1, "active_now": 1, "needed_gpus": 1, "kept_gpus": 1, "at_once": None,
        "window_s": 1, "asked_within": {}, "adapters_asked_within": {}, "reserve_gpus": None, "windows": 0,
        "next_evicted": [{"model": "m", "worker": "gpu-1", "why": "w"}],
    },
    "/v1/models/m": MODEL, "/v1/models/m/reservations": MODEL,
    "/v1/forecast": {
        "model": "sim", "starts_unix_s": [NOW_MS / 1e3], "notes": ["little history"],
        "series": {"requests": BANDS, "prefill": BANDS, "decode": BANDS},
        "trend": [{
            "what": "balance", "before": 1.0, "after": 2.0, "since_unix_s": NOW_MS / 1e3,
            "causes": [{"what": "requests", "tenant": "a", "before": 1.0, "after": 2.0}],
        }],
        "parts": {"by": "tenant", "total": MEDIANS, "each": {EVIL: MEDIANS}},
    },
    "/v1/regret": {"lost_gpu_hours": 1.0, "gpu_hours": 2.0, "method": "closed_form", "by_cause": {"late": 1.0}},
    "/v1/links": [{
        "source": "a", "target": "b", "model": "m", "way": "grpc", "transfers": 1, "bytes": 1, "gb_per_s": 1.0,
        "of_fastest": 1.0,
    }],
    "/v1/audit": {"events": [AUDIT], "older": True, "complete_since_unix_ms": 1, "next": None},
    "/v1/batches": {"data": [BATCH], "has_more": False}, "/v1/batches/batch_1": BATCH,
    "/v1/batches/batch_1/cancel": BATCH,
}  # fmt: skip
COMMANDS = (
    "status", "status --links", "advice", "alerts list", "alerts silence Imbalance --for 1h",
    "alerts ack FulcrumImbalance",
    "alerts unsilence a", "request 3f2a9c", "request --slowest",
    "events", "workers", "occupancy", "top --once", "audit", "planner status",
    "planner decisions", "planner explain 1", "planner limits", "planner mode", "planner advice", "planner regret",
    "models list", "models forecast", "models add m", "models pin m", "models reserve m --gpus 1",
    "forecast --model sim", "forecast --by tenant",
    "batch list", "batch status batch_1", "batch cancel batch_1",
)  # fmt: skip
OTHERS = {
    # tested below, or by what they share with the above
    "logs", "chat", "role", "tune decode", "tune prefill", "batch submit", "batch results", "models remove",
    # of this machine, or of the person who calls
    "capacity plan", "doctor", "down", "forecast backtest", "forecast import", "keys create", "keys delete-tenant",
    "keys limits", "keys list", "keys revoke", "keys rotate-salt", "lab calibrate", "lab compare", "lab record",
    "forecast explain", "lab run", "lab search", "lab traces", "observe",
    "models backtest", "models generate", "profile", "tls init", "tls rotate",
    "tls show", "up",
}  # fmt: skip


def assert_plain(text: str, what: str = "") -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text), what
    assert not any(line.startswith("FORGED") for line in text.splitlines()), what
    if "FORGED" in text:
        assert "[bold]" in text and ":smile:" in text, what


@pytest.mark.system
def test_no_command_interprets_foreign_text(tmp_path: Path) -> None:
    """Escape codes coloured the terminal, and a line end made a record that looked real."""
    reported = []
    with a_service(dirty(ANSWERS), tmp_path) as ready:
        for command in COMMANDS:
            done = CliRunner().invoke(PROGRAM, [*command.split(), *ready])
            assert done.exit_code == 0, (command, done.output, done.exception)
            assert_plain(done.output, command)
            reported.append((command, "FORGED" in done.output))
    silent = {command for command, shows in reported if not shows}
    assert silent <= {
        "advice",
        "planner mode",
        "planner regret",
        "planner limits",
        "batch list",
        "top --once",
        "occupancy",
    }, silent


@pytest.mark.system
def test_json_output_is_exact(tmp_path: Path) -> None:
    with a_service(dirty(ANSWERS), tmp_path) as ready:
        done = CliRunner().invoke(PROGRAM, ["workers", "--json", *ready])
        assert json.loads(done.stdout) == dirty(ANSWERS["/v1/workers"])
        done = CliRunner().invoke(PROGRAM, ["audit", "--json", *ready])
        assert json.loads(done.stdout)["action"] == AUDIT["action"]
        assert json.loads(done.stderr) == {"older": True, "complete_since_unix_ms": 1}


def test_every_command_has_a_case() -> None:
    def leaves(command: Any, name: str = "") -> Iterator[str]:
        found = getattr(command, "commands", None)
        if found is None:
            yield name
        for word, each in (found or {}).items():
            yield from leaves(each, f"{name} {word}".strip())

    found = set(leaves(PROGRAM))
    assert found == {name for name in found for each in COMMANDS if f"{each} ".startswith(f"{name} ")} | OTHERS


def test_the_page_sets_text_and_never_html() -> None:
    scripts = list((FOLDER / "js").rglob("*.js"))
    assert len(scripts) > 20
    for script in scripts:
        obeyed = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|srcdoc|eval\(",
            script.read_text(),
        )
        assert not obeyed, script


def test_a_log_line_shows_a_clients_text_as_plain_text() -> None:
    line = json.dumps({"event": f"refused {EVIL}", "level": "info", "path": EVIL, "timestamp": EVIL})
    assert_plain(readable(line).plain)
    assert_plain(readable(f"no json {EVIL}").plain)


@pytest.mark.system
def test_an_error_of_a_service_is_printed_as_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from libs.cli.main import main

    with a_service({}, tmp_path) as ready:
        monkeypatch.setattr("sys.argv", ["fulcrum", "occupancy", "--window", f"2s{EVIL}", *ready])
        with pytest.raises(SystemExit):
            main()
    assert "\x1b" not in capfd.readouterr().err


def test_a_console_cell_interprets_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("[bold]x[/bold] :smile: \x1b]0;title \x9b2J")
    out = capsys.readouterr().out
    assert out == "[bold]x[/bold] :smile: \\x1b]0;title \\x9b2J\n"


@given(st.text(max_size=40))
def test_plain_text_is_one_line_that_loses_nothing(text: str) -> None:
    shown = plain(text)
    assert len(shown.splitlines()) <= 1
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert plain(shown) == shown
    if text.isprintable():
        assert shown == text
    assert plain_values({text: [text, 1, None]}) == {shown: [shown, 1, None]}


@given(st.text("ab -_/.", max_size=12), st.text("ab -_/.", max_size=12))
def test_a_key_is_masked_wherever_it_appears(before: str, after: str) -> None:
    secret, _ = draw_key("a", now_s=0)
    kept = masked(f"{before}{secret} {after}")
    assert secret not in kept and MASK in kept
    assert masked(secret[: len(secret) // 2]) == MASK, "one that was cut too"


@pytest.mark.parametrize("text", [
    "Bearer abcdefghijklmnopqrstuvwxyz", "sk-proj-" + "a" * 40, "authorization: bearer%20" + "b" * 20, "hf_" + "c" * 30,
])  # fmt: skip
def test_text_that_looks_like_a_foreign_key_is_masked(text: str) -> None:
    assert masked(text) != text and "***" in masked(text)


@pytest.mark.parametrize("text", ["task-failed-because-of-a-long-name", "disk-usage-of-0123456789", "the bearer token"])
def test_text_that_is_no_key_is_unchanged(text: str) -> None:
    assert masked(text) == text


def test_logs_contain_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    secret, _ = draw_key("a", now_s=0)
    before = structlog.get_config()
    try:
        configure_logging("test")
        log = structlog.get_logger()
        log.info(f"refused {secret}", path=f"/v1/files/{secret}", headers={"authorization": [f"Bearer {secret}"]})
        try:
            int(secret)
        except ValueError:
            log.exception("it failed")
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
    err = capsys.readouterr().err
    assert "it failed" in err and MASK in err and secret not in err
