"""Tests of `fulcrum keys` without a suite, on the file that a suite would read."""

import json
import os
import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from libs.cli.find import key_headers, put_json, remember
from libs.cli.keys.book import span_s
from libs.cli.main import app
from libs.contracts.errors import FulcrumError, InvalidRequest, KeyNotFound, StartupError
from libs.keys.book import PREFIX
from libs.launch.ready import Ready, write_ready


@pytest.fixture(autouse=True)
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FULCRUM_CACHE", str(tmp_path))
    for name in ("FULCRUM_KEYS", "FULCRUM_READY", "FULCRUM_API_KEY", "FULCRUM_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "keys" / "local.json"


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["keys", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def value(*arguments: str) -> Any:
    out = run(*arguments, "--json")
    assert out.count("\n") == 1
    return json.loads(out)


def test_a_key_is_shown_once_and_listed_without_its_secret(keys_file: Path) -> None:
    assert "There is no key" in run("list")
    made = value("create", "--tenant", "a", "--models", "m, n", "--expires", "1d", "--role", "operator")
    assert made["key"].startswith(PREFIX) and made["models"] == ["m", "n"]
    assert made["expires_unix_s"] - made["created_unix_s"] == 86_400
    assert made["key"] not in keys_file.read_text()
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    (listed,) = value("list")
    assert listed == {name: each for name, each in made.items() if name != "key"}
    assert made["id"] in run("list") and "operator" in run("list")


def test_a_revoked_key_stays_listed_as_revoked() -> None:
    made = value("create", "--tenant", "a")
    assert value("revoke", made["id"])["status"] == "revoked"
    assert [each["status"] for each in value("list")] == ["revoked"]
    with pytest.raises(KeyNotFound, match="fulcrum keys list"):
        run("revoke", "key_none")


def test_a_new_key_is_printed_alone_on_a_line_and_the_first_one_explains_its_effect() -> None:
    first = CliRunner().invoke(app, ["keys", "create", "--tenant", "a"])
    second = CliRunner().invoke(app, ["keys", "create", "--tenant", "a"])
    assert first.stdout.startswith(PREFIX) and first.stdout.count("\n") == 1
    assert "from now on every request needs a key" in first.stderr
    assert "from now on" not in second.stderr


def test_limits_are_set_shown_and_removed() -> None:
    assert value("limits") == {}
    assert value("limits", "a", "--requests", "5")["a"]["requests_per_minute"] == 5
    both = value("limits", "a", "--concurrent", "2")
    assert both == value("limits") and list(both) == ["a"]
    said = {name: limit for name, limit in both["a"].items() if limit is not None}
    assert said == {"requests_per_minute": 5, "concurrent": 2}
    with pytest.raises(InvalidRequest, match="--off"):
        run("limits", "a", "--off", "--tokens", "5")
    value("limits", "a", "--off")
    assert value("limits") == {}


@pytest.mark.parametrize(
    "arguments",
    [("--tenant", "a b"), ("--tenant", "a", "--expires", "soon"), ("--tenant", "a", "--role", "root")],
)
def test_an_invalid_option_creates_no_key(arguments: tuple[str, ...], keys_file: Path) -> None:
    with pytest.raises(FulcrumError):
        run("create", *arguments)
    assert not keys_file.exists()


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), (" 12h ", 43_200), ("30d", 2_592_000)])
def test_times_are_numbers_with_a_unit(text: str, seconds: int) -> None:
    assert span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0d", "1", "d", "1.5h", "-1h", "1w", "999999999d", "١d"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="such as 30d"):
        span_s(text)


def test_the_suites_token_is_sent_only_to_its_own_services_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = "http://127.0.0.1:1", "http://10.0.0.1:1"
    rest = dict.fromkeys(("kafka", "redis", "cluster", "model", "engine"), "x")
    for url in (near, far):
        remember(Ready(url, (url,), url, url, os.getpid(), token="t", **rest))
    assert key_headers(near) == {"authorization": "Bearer t"}
    assert key_headers(far) == key_headers("http://127.0.0.1:2") == {}
    monkeypatch.setenv("FULCRUM_API_KEY", "sk-own")
    assert key_headers(near) == key_headers(far) == {"authorization": "Bearer sk-own"}


def test_a_running_suite_names_the_store_of_its_keys(tmp_path: Path) -> None:
    url, file = "http://127.0.0.1:1", tmp_path / "ready.json"
    rest = dict.fromkeys(("token", "kafka", "redis", "cluster", "model", "engine"), "x")
    write_ready(file, Ready(url, (url,), url, url, os.getpid(), **rest, keys=str(tmp_path / "its.json")))
    value("create", "--tenant", "a", "--ready", str(file))
    assert (tmp_path / "its.json").exists()


def test_a_tenant_is_deleted_only_after_a_confirmation(keys_file: Path) -> None:
    made, other = value("create", "--tenant", "a"), value("create", "--tenant", "b")
    run("limits", "a", "--requests", "5")
    result = CliRunner().invoke(app, ["keys", "delete-tenant", "a"], input="n\n")
    assert result.exit_code == 1 and value("list")[0]["status"] == "active"
    with pytest.raises(InvalidRequest, match="add --yes"):
        run("delete-tenant", "a", "--json")
    assert value("delete-tenant", "a", "--yes")["revoked"] == [made["id"]]
    assert {each["id"]: each["status"] for each in value("list")} == {made["id"]: "revoked", other["id"]: "active"}
    assert value("limits") == {}
    change = json.loads(keys_file.read_text())["changes"][-1]
    assert (change["action"], change["tenant"]) == ("delete-tenant", "a")


def test_the_salt_secret_is_stored_with_the_keys_and_rotated_on_request(keys_file: Path) -> None:
    value("create", "--tenant", "a")
    before = json.loads(keys_file.read_text())["cache_secret"]
    assert len(bytes.fromhex(before)) == 32
    value("create", "--tenant", "b")
    assert json.loads(keys_file.read_text())["cache_secret"] == before
    assert value("rotate-salt") == {"rotated": True}
    assert json.loads(keys_file.read_text())["cache_secret"] != before


class _Refuses(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.send_error(403)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.system
def test_a_command_without_a_key_mentions_that_the_suite_may_still_be_starting() -> None:
    with HTTPServer(("127.0.0.1", 0), _Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StartupError, match="wait until `fulcrum up` says that its suite serves"):
            put_json(f"http://127.0.0.1:{server.server_port}", "/v1/mode", {}, token="")
        with pytest.raises(StartupError, match=r"403$"):
            put_json(f"http://127.0.0.1:{server.server_port}", "/v1/mode", {}, token="x")
        server.shutdown()
