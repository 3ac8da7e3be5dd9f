"""Tests of `fulcrum forecast` and `fulcrum capacity plan` over observed servers, and across a restart of observe."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.suites.observe import observe_page
from tests.observe_rig import FakeVllm, Load, serving

pytestmark = [pytest.mark.suite, pytest.mark.timeout(600)]

PATIENCE_S = 120.0
PLAN_S = 400.0
"""A first plan measures for 20 s of CPU time."""
DAY_S = "600"
"""A day in which a bin lasts 0.42 s and a quarter of an hour 6.25 s."""
PREFILL, DECODE = Load(prompts_per_s=8, prompt_tokens=2_000), Load(decoding=24, prompts_per_s=8, prompt_tokens=2_000)


async def where(url: str, holds: Callable[[Any], bool]) -> Any:
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient(timeout=PATIENCE_S) as http:
        while True:
            answer = await http.get(url)
            if answer.is_success and holds(answer.json()):
                return answer.json()
            await asyncio.sleep(0.5)


def command(*arguments: str) -> Any:
    """Return the JSON of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "libs.cli.main", *arguments, "--json"],
        capture_output=True, text=True, check=False, timeout=PLAN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def known(demand: Any) -> int:
    return sum(demand["heard"])


def fleet_file(stack: ExitStack, folder: Path) -> Path:
    """Write the file of a prefill and a decode server under a steady load."""
    urls = {
        name: stack.enter_context(serving(FakeVllm(load))) for name, load in (("prefill", PREFILL), ("decode", DECODE))
    }
    file = folder / "fleet.toml"
    tables = (f'[[server]]\nurl = "{url}"\nname = "{name}"\nrole = "{name}"\n' for name, url in urls.items())
    file.write_text("".join(tables))
    return file


async def test_demand_of_an_observed_pair_is_counted_predicted_and_survives_a_restart(tmp_path: Path) -> None:
    with ExitStack() as stack:
        kept = ("--file", str(fleet_file(stack, tmp_path)), "--history", str(tmp_path / "history"))
        with observe_page(tmp_path, *kept, FULCRUM_METRICS_DAY_S=DAY_S) as first:
            page = first.answer["page"]
            before = await where(f"{page}/v1/demand?span=120s", lambda found: known(found) >= 40)
            first.process.terminate()
            assert await asyncio.to_thread(first.process.wait, 30) == 0
        with observe_page(tmp_path, *kept, FULCRUM_METRICS_DAY_S=DAY_S) as again:
            page = again.answer["page"]
            after = await where(f"{page}/v1/demand?span=240s", lambda found: known(found) >= known(before) + 40)
            (row,) = after["series"]
            received = after["heard"]
            first_at, last_at = received.index(True), len(received) - 1 - received[::-1].index(True)
            assert not all(received[first_at:last_at]), "the time without observe is unknown"
            seconds = known(after) * after["bin_s"]
            # Requests and prompts of a pair count once; answers are 24 sequences at 10 ms a step, less prompts' time.
            assert sum(row["requests"]) / seconds == pytest.approx(8, rel=0.1)
            assert sum(row["prompt_tokens"]) / seconds == pytest.approx(16_000, rel=0.1)
            assert sum(row["output_tokens"]) / seconds == pytest.approx(24 * 60, rel=0.25)
            # What `fulcrum forecast` prints; the command itself allows a service less time on a busy machine.
            forecast = await where(f"{page}/v1/forecast?horizon=60s", lambda found: found["model"] == "m")
            assert forecast["series"]["requests"]["p50"][0] == pytest.approx(8, rel=0.2)
            assert forecast["series"]["prefill"]["gpus"]["p50"][0] > 0


async def test_a_capacity_plan_covers_observed_servers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        file = str(fleet_file(stack, tmp_path))
        with observe_page(tmp_path, "--file", file, FULCRUM_METRICS_DAY_S=DAY_S) as observing:
            page, ready = observing.answer["page"], observing.answer["ready"]
            await where(f"{page}/v1/demand?span=120s", lambda found: known(found) >= 40)
            plan = await asyncio.to_thread(
                command, "capacity", "plan", "--ready", ready, "--horizon", "60s", "--no-check",
                "--slo", "ttft=2s,tpot=100ms",
            )  # fmt: skip
            assert plan["model"] == "m"
            for phase in ("prefill", "decode"):
                assert plan["pools"][phase]["there"] == 1
                assert all(each >= 1 for each in plan["pools"][phase]["gpus"])


async def test_history_stays_in_memory_if_no_file_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "fulcrum").mkdir()
    (tmp_path / "fulcrum" / "observe").write_text("a file in place of the folder")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        file = str(fleet_file(stack, tmp_path))
        with observe_page(tmp_path, "--file", file, port=port) as observing:
            assert httpx.get(f"{observing.answer['page']}/v1/status").is_success
