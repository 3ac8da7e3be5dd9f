"""Tests of `fulcrum observe` beside real `vllm serve` processes, with and without the plugin."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from libs.runtime.net.ports import held_port
from libs.testing.engines.real_model import real_model_folder
from libs.testing.suites.observe import observe_page
from libs.testing.wait import until
from load.engine.bench_vllm_serve import vllm_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PLUGIN = Path(__file__).parents[2] / "deploy" / "vllm-plugin"
# A plugin of the test's own that takes the times around EngineCore's whole step.
CLOCK = """
import os, time

def register():
    from vllm.v1.engine.core import EngineCore

    step = EngineCore.step

    def timed(self):
        start_ns = time.time_ns()
        result = step(self)
        if result[1]:
            with open(os.environ["STEP_CLOCK"], "a") as file:
                file.write(f"{start_ns} {time.time_ns()}\\n")
        return result

    EngineCore.step = timed
"""
REQUESTS = 12
MOST_REQUESTS = 150
SECOND_NS = 10**9
MEAN_POINTS, WORST_POINTS = 1.0, 3.0


@dataclass(frozen=True)
class Fleet:
    plugged: str
    plain: str
    page: str
    clock: Path
    serve: Callable[[], Any]
    """Context that starts the metrics service on the page's port."""

    def status(self) -> Any:
        return httpx.get(f"{self.page}/v1/status", trust_env=False).json()

    def states(self) -> dict[str, str]:
        with_port = {"plugged": self.plugged, "plain": self.plain}
        found = {each["url"]: each["state"] for each in self.status()["observed"]["servers"]}
        return {name: found[url] for name, url in with_port.items()}


def complete(url: str, model: str, seed: int, tokens: int = 8) -> None:
    prompt = [random.Random(seed).randrange(100, 40_000) for _ in range(20 + 60 * (seed % 4))]
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == tokens


@contextmanager
def observing(folder: Path, port: int, *options: str) -> Iterator[psutil.Process]:
    """Run the command, and yield the process of its metrics service."""
    with observe_page(folder, *options, port=port) as page:
        (service,) = psutil.Process(page.process.pid).children()
        try:
            yield service
        finally:
            if service.is_running():
                service.resume()


def installed(folder: Path) -> dict[str, str]:
    """Install the plugin and the clock into a folder, and return the variable by which Python finds them."""
    shutil.copytree(PLUGIN, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(folder / "source")], check=True)
    info = folder / "site" / "step_clock-1.dist-info"
    info.mkdir()
    (folder / "site" / "step_clock.py").write_text(CLOCK)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: step_clock\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nstep_clock = step_clock:register\n")
    return {"PYTHONPATH": str(folder / "site")}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, model = tmp_path_factory.mktemp("observe"), real_model_folder()
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        page = f"http://127.0.0.1:{port}"
        own = {"FULCRUM_OBSERVE_URL": page, "FULCRUM_OBSERVE_NAME": "plugged", "STEP_CLOCK": str(folder / "clock")}
        own["OMP_NUM_THREADS"] = "1"
        for name in ("plugged", "plain"):
            (folder / name).mkdir()
        plugged = stack.enter_context(vllm_server(model, folder / "plugged", **own, **installed(folder)))
        plain = stack.enter_context(vllm_server(model, folder / "plain", OMP_NUM_THREADS="1"))
        file = folder / "fleet.toml"
        tables = (f'[[server]]\nurl = "{url}"\nname = "{name}"\n' for name, url in (("plugged", plugged), ("b", plain)))
        file.write_text("".join(tables))

        def serve() -> Any:
            return observing(folder, port, "--file", str(file))

        yield Fleet(plugged, plain, page, folder / "clock", serve)


MODEL = "SmolLM2-135M-Instruct"


async def test_a_plain_server_is_estimated_and_one_with_the_plugin_is_exact(fleet: Fleet) -> None:
    with fleet.serve():
        for seed in range(REQUESTS):
            complete(fleet.plugged, MODEL, seed)
        for seed in range(MOST_REQUESTS):  # on cores that are short it takes more to learn its times
            if fleet.states()["plain"] == "observed":
                break
            complete(fleet.plain, MODEL, seed)
        await until(lambda: fleet.states() == {"plugged": "exact", "plain": "observed"}, timeout_s=60)
        estimates = {each["id"]: each["estimate"] is not None for each in fleet.status()["workers"]}
        assert estimates == {"plugged": False, "b": True}


async def test_occupancy_matches_a_clock_around_the_engines_steps(fleet: Fleet) -> None:
    with fleet.serve():
        await until(lambda: fleet.states()["plugged"] == "exact", timeout_s=60)
        for seed in range(3 * REQUESTS):
            complete(fleet.plugged, MODEL, seed)
        steps = [tuple(map(int, line.split())) for line in fleet.clock.read_text().splitlines()]
        last_ms = steps[-1][1] // 1_000_000

        def history() -> Any:
            return httpx.get(
                f"{fleet.page}/v1/occupancy/history", params={"window": "1s", "span": "1m", "scope": "worker:plugged"},
                trust_env=False,
            ).json()  # fmt: skip

        await until(lambda: history()["starts_unix_ms"][-1] > last_ms, timeout_s=60)
        found = history()
    rows = zip(
        found["starts_unix_ms"], *(found["gpu_ns"][name] for name in ("covered", "prefill", "decode")), strict=True
    )
    errors = []
    for start_ms, covered, prefill, decode in rows:
        low_ns = start_ms * 1_000_000
        if covered == SECOND_NS and start_ms < last_ms:
            true_ns = sum(max(min(end, low_ns + SECOND_NS) - max(start, low_ns), 0) for start, end in steps)
            errors.append(100 * (prefill + decode - true_ns) / SECOND_NS)
    assert len(errors) > 3
    assert abs(sum(errors) / len(errors)) <= MEAN_POINTS
    assert max(map(abs, errors)) <= WORST_POINTS


async def test_a_frozen_or_killed_service_stops_no_request_and_receives_the_missed_steps(fleet: Fleet) -> None:
    with fleet.serve() as service:
        await until(lambda: fleet.states()["plugged"] == "exact", timeout_s=60)
        service.suspend()
        complete(fleet.plugged, MODEL, 1)
        service.resume()
        await until(lambda: fleet.states()["plugged"] == "exact", timeout_s=60)
        service.kill()
        complete(fleet.plugged, MODEL, 2)
    with fleet.serve():
        complete(fleet.plugged, MODEL, 3)
        await until(lambda: fleet.states()["plugged"] == "exact", timeout_s=60)
