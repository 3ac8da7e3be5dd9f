"""A whole suite of real processes for tests, started by `fulcrum up` as a user would."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import libs.launch.processes.leash
from libs.bus.kafka import KafkaBus
from libs.contracts.pb.fulcrum.telemetry.v1.telemetry_pb2 import KvTransfer, StepBatch
from libs.contracts.topics import STEPS

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
AS_STARTED = {
    "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": "512",
    "FULCRUM_PLANNER_MODE": "advisory",
    "FULCRUM_WORKER_NAMES": "role",
}
"""Defaults that `env` can override. Prefill workers do not measure themselves, which takes seconds on a CPU. Roles stay
unless a test is about moving them. Names show the initial roles.
"""
_DEFAULT_WORKERS = {"prefill": 1, "decode": 1, "mixed": 0}


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """A running suite with its addresses."""

    process: "subprocess.Popen[str]"
    ready_file: Path
    ready: dict[str, Any]
    env: dict[str, str]
    workers: int
    """The number of workers of the complete suite."""

    @property
    def gateway(self) -> str:
        """The base URL of the first gateway."""
        return str(self.ready["gateway"])

    def fulcrum(self, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
        """Run the command line against this suite."""
        return subprocess.run(
            [sys.executable, "-m", "libs.cli.main", *arguments],
            env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip


@contextlib.contextmanager
def running_suite(
    folder: Path, *arguments: str, env: dict[str, str] | None = None, start_s: float = START_TIMEOUT_S
) -> Iterator[RunningSuite]:
    """Run `fulcrum up ARGUMENTS` until the context closes or this process dies. Fail with its stderr if it is not
    ready.

    Open it on the main thread, since the kernel ends the suite with the thread that started it.
    """
    ready_file = folder / "ready.json"
    own = {"FULCRUM_READY": str(ready_file), "FULCRUM_KEYS": str(folder / "keys.json")}
    full_env = {**AS_STARTED, **os.environ, **own, **(env or {})}
    leash = [sys.executable, "-I", "-S", str(Path(libs.launch.processes.leash.__file__)), str(os.getpid())]
    command = [*leash, sys.executable, "-m", "libs.cli.main", "up", "--no-question", "--json-ready", str(ready_file)]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--gateway-port", "0", *arguments],
            env=full_env, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            ready = _await_ready(process, ready_file, folder / "up.log", start_s)
            yield RunningSuite(process, ready_file, ready, full_env, _workers(arguments))
        finally:
            _stop(process)


def _workers(arguments: Sequence[str]) -> int:
    flags = dict(pairwise(arguments))
    return sum(int(flags.get(f"--{role}", default)) for role, default in _DEFAULT_WORKERS.items())


def _await_ready(process: "subprocess.Popen[str]", ready_file: Path, log: Path, start_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + start_s
    while time.monotonic() < deadline_s:
        if ready_file.exists():
            ready: dict[str, Any] = json.loads(ready_file.read_text())
            return ready
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
            break
    raise AssertionError(f"the suite did not get ready (exit code {process.poll()}):\n{log.read_text()[-4000:]}")


def _stop(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the suite did not stop within {STOP_TIMEOUT_S} s of SIGTERM") from None


WAIT_S = 30.0


async def kv_transfers(suite: RunningSuite, wanted: Mapping[int, int]) -> list[KvTransfer]:
    """Return all transfers once there are the `wanted` ones, counts by prompt tokens. Raise TimeoutError.

    A rerouted request has several. Transfers of other prompts are left out.
    """
    bus = KafkaBus(suite.ready["kafka"], "local", "test")
    await bus.start()
    found: list[KvTransfer] = []
    try:
        async with asyncio.timeout(WAIT_S):
            async for record in bus.subscribe([STEPS], from_start=True):
                assert isinstance(record.value, StepBatch)
                found += (transfer for transfer in record.value.kv_transfers if transfer.prompt_tokens in wanted)
                if Counter(transfer.prompt_tokens for transfer in found) >= Counter(wanted):
                    break
    finally:
        await bus.close()
    return found


STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A joined process with the files of its output."""

    process: "subprocess.Popen[bytes]"
    out: Path
    err: Path

    @property
    def ready(self) -> bool:
        """True once it has reported that it serves."""
        return '"ready"' in self.out.read_text()


@contextmanager
def joining(
    suite: RunningSuite, folder: Path, name: str, *, service: str = "decode", **settings: str
) -> Iterator[Joined]:
    """Run a decode worker of that name, or another service. `settings` are additional environment variables."""
    shared = {f"FULCRUM_{each.upper()}": suite.ready[each] for each in ("kafka", "redis", "token", "cluster")}
    own = {"FULCRUM_WORKER_ID": name, "FULCRUM_WORKER_ROLE": "decode"}
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    command = [sys.executable, "-m", f"services.{service}"]
    with out.open("w") as said, err.open("w") as logged:
        process = subprocess.Popen(command, env=suite.env | shared | own | settings, stdout=said, stderr=logged)
        try:
            yield Joined(process, out, err)
        finally:
            process.terminate()
            process.wait(STOP_S)
