"""Tests of `fulcrum observe --page --dynamo` beside fake publishers and Dynamo's own mockers."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from libs.testing.engines.real_model import real_model_folder
from libs.testing.suites.observe import OBSERVE
from load.metrics.bench_observe_dynamo import MODEL, Shape, put_under
from load.peers.dynamo_suite import python, running_dynamo
from tests.dynamo_rig import card, channel, join, message, record
from tests.e2e.test_observe_page import get, observing, states, until

pytestmark = pytest.mark.suite

HEARTBEAT_S = 0.2
FULCRUM = [sys.executable, "-m", "libs.cli.main"]


class Publisher:
    """A worker that repeats a step of 100 ms five times a second, until it is stopped."""

    def __init__(self, folder: Path, worker: int, role: str) -> None:
        self._worker, self._ended = worker, threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._files = join(folder, card(role, worker=worker), channel(f"tcp://127.0.0.1:{port}", worker))
        self._thread = threading.Thread(target=self._publish)

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the worker without a farewell; its files stay."""
        self._ended.set()
        self._thread.join()
        self._socket.close(linger=0)

    def _publish(self) -> None:
        counter, due_s = 0, time.monotonic()
        while not self._ended.wait(max(due_s - time.monotonic(), 0)):
            counter, due_s = counter + 1, due_s + HEARTBEAT_S
            body = record(counter, HEARTBEAT_S / 2, self._worker, num_prefill_requests=1, sum_prefill_tokens=500)
            self._socket.send_multipart(message(body, time.time_ns() // 1_000_000, publisher=self._worker))
            for file in self._files:
                os.utime(file)


@contextmanager
def asking(port: int) -> Iterator[None]:
    """Send requests to a fleet, one after another, while the context is open."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            with suppress(httpx.HTTPError):
                asyncio.run(put_under(Shape("steady", 2, 1_000, 50), port, 1.0))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_page_shows_measured_steps_and_absent_workers(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    with (
        Publisher(kv, 0xA0, "prefill"),
        Publisher(kv, 0xB0, "decode") as decode,
        observing(tmp_path, "--dynamo", str(kv)) as reported,
    ):
        page = reported["page"]
        assert reported["servers"] == 2
        until(f"{page}/v1/status", lambda found: states(found) == {"prefill-a0": "exact", "prefill-b0": "exact"})

        def half_of_each_phase(found: Any) -> bool:
            return found["coverage"] > 0.99 and 0.2 < found["prefill"] < 0.3 and 0.2 < found["decode"] < 0.3

        found = until(f"{page}/v1/occupancy", half_of_each_phase)
        assert found["estimate"] is None
        screen = subprocess.run(
            [*FULCRUM, "status", "--ready", reported["ready"]], capture_output=True, text=True, check=True, timeout=60
        )
        assert "GPU time of 2 servers is measured" in screen.stdout
        assert "estimated" not in screen.stdout

        decode.stop()
        until(f"{page}/v1/status", lambda found: states(found) == {"prefill-a0": "exact", "prefill-b0": "away"})


def test_a_folder_without_a_fleet_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [*OBSERVE, "--port", "0", "--json", "--dynamo", str(tmp_path)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert "DYN_DISCOVERY_BACKEND=file" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.alone
@pytest.mark.skipif(not python().exists(), reason="Dynamo is not installed: `make peer-dynamo` does it")
def test_two_prefill_and_two_decode_mockers_of_dynamo_show_their_shares(tmp_path: Path) -> None:
    mocker = ("--speedup-ratio", "1")
    with (
        running_dynamo(real_model_folder(), MODEL, prefill=2, decode=2, mocker=mocker) as dynamo,
        observing(tmp_path, "--dynamo", str(dynamo.discovery)) as reported,
        asking(dynamo.port),
    ):
        page = reported["page"]
        assert reported["servers"] == 4
        status = until(f"{page}/v1/status", lambda found: list(states(found).values()) == ["exact"] * 4)
        assert sorted(each["role"] for each in status["observed"]["servers"]) == ["decode"] * 2 + ["prefill"] * 2
        until(
            f"{page}/v1/occupancy",
            lambda found: found["coverage"] > 0.99 and found["prefill"] > 0.02 and found["decode"] > 0.02,
        )
        for worker in get(f"{page}/v1/occupancy")["workers"]:
            assert worker["decode" if worker["role"] == "prefill" else "prefill"] == 0

        os.kill(dynamo.decode[0], signal.SIGKILL)
        until(f"{page}/v1/status", lambda found: sorted(states(found).values()) == ["away"] + ["exact"] * 3)
        until(f"{page}/v1/status", lambda found: list(states(found).values()) == ["exact"] * 3)
