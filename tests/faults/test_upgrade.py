"""Test of a suite whose processes are replaced one by one by another release and back, while clients stream."""

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import libs.launch.processes.leash
from libs.testing.servers.stores import KafkaServer, RedisServer
from libs.testing.suites.processes import gateway_metrics
from libs.testing.suites.steady_load import SteadyLoad, steady_load

pytestmark = [pytest.mark.alone, pytest.mark.suite, pytest.mark.redis, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
LAST_OF_0_1_0 = "dd595903e2d0dc99514314725f4618c21061e82c"
ROLES = {"prefill-1": "prefill", "prefill-2": "prefill", "decode-1": "decode", "decode-2": "decode"}
GATEWAYS = ("gateway-1", "gateway-2")
ORDER = (*ROLES, *GATEWAYS, "planner", "metrics")
"""The order that docs/upgrade.md names."""
START_S, STOP_S, KNOWN_S = 120.0, 40.0, 60.0
POLL_S = 0.05
CLIENTS, TOKENS = 4, 40
SOME = 20
"""Answers between two replacements: more than there are clients and kinds of requests."""


class Fleet:
    """The processes of a suite by name, each of the release in its folder, and the ports where they answer."""

    def __init__(self, folder: Path, stores: Mapping[str, str]) -> None:
        self.folder = folder
        self.stores = stores
        self.urls: list[str] = []
        """The gateways that a balancer would send requests to."""
        self._running: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
        self._started = 0

    def url(self, name: str) -> str:
        return self._running[name][1]

    async def start(self, name: str, release: Path) -> None:
        """Start a process, and return once it serves."""
        self._started += 1
        out, err = (self.folder / f"{self._started}-{name}.{kind}" for kind in ("out", "err"))
        leash = [sys.executable, "-I", "-S", str(Path(libs.launch.processes.leash.__file__)), str(os.getpid())]
        service = ROLES.get(name, name.split("-", maxsplit=1)[0])
        env = {**os.environ, **self.stores, **_settings(name, service), "PYTHONPATH": str(release)}
        with out.open("w") as said, err.open("w") as logged:
            process = subprocess.Popen(
                [*leash, sys.executable, "-m", f"services.{service}"],
                env=env, cwd=release, stdout=said, stderr=logged,
            )  # fmt: skip
        self._running[name] = (process, "")
        async with asyncio.timeout(START_S):
            while (ready := _ready(out)) is None:
                assert process.poll() is None, f"{name} of {release.name} ended: {err.read_text()[-2000:]}"
                await asyncio.sleep(POLL_S)
        self._running[name] = (process, str(ready.get("http", "")))
        if service == "gateway":
            self.urls.append(self.url(name))

    async def replace(self, name: str, release: Path, load: SteadyLoad) -> None:
        """Replace a process as docs/upgrade.md says: gateways start before the old one ends, others after."""
        process, url = self._running[name]
        if name in GATEWAYS:
            await self.start(name, release)
            self.urls.remove(url)
            await load.more(SOME)  # every process that chose its address is connected by now
        process.terminate()
        assert await asyncio.to_thread(process.wait, STOP_S) == 0, f"{name} did not end well"
        if name not in GATEWAYS:
            await self.start(name, release)

    def stop(self) -> None:
        for process, _ in self._running.values():
            process.terminate()
        for process, _ in self._running.values():
            process.wait(STOP_S)


def _settings(name: str, service: str) -> dict[str, str]:
    sim = {"FULCRUM_WORKER_ENGINE": "sim", "FULCRUM_WORKER_MODEL": "sim", "FULCRUM_WORKER_SIM_SPEEDUP": "0.5"}
    return {
        "gateway": {
            "FULCRUM_GATEWAY_ID": name, "FULCRUM_GATEWAY_PORT": "0", "FULCRUM_GATEWAY_DRAIN_S": "25",
            "FULCRUM_GATEWAY_MODELS": '{"sim": "builtin:sim"}',
        },
        "planner": {"FULCRUM_PLANNER_PORT": "0", "FULCRUM_PLANNER_MODE": "advisory"},
        "metrics": {"FULCRUM_METRICS_PORT": "0"},
    }.get(service, {
        **sim, "FULCRUM_WORKER_ID": name, "FULCRUM_WORKER_ROLE": service, "FULCRUM_WORKER_PORT": "0",
        "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": "512",
    })  # fmt: skip


def _ready(out: Path) -> dict[str, Any] | None:
    events: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    return next((each for each in events if each["event"] == "ready"), None)


@contextmanager
def running_fleet(folder: Path, kafka: KafkaServer, redis: RedisServer) -> Iterator[Fleet]:
    stores = {
        "FULCRUM_KAFKA": kafka.servers, "FULCRUM_KAFKA_PROTOCOL": "PLAINTEXT", "FULCRUM_REDIS": redis.url,
        "FULCRUM_CLUSTER": folder.name.replace("_", "-"), "FULCRUM_TOKEN": "token-of-a-test",
    }  # fmt: skip
    fleet = Fleet(folder, stores)
    try:
        yield fleet
    finally:
        fleet.stop()


def unpacked(commit: str, folder: Path) -> Path:
    """Unpack a commit of this repository into a new folder; skip the test where the history lacks it."""
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{tree}}"], capture_output=True, check=False).returncode:
        pytest.skip(f"commit {commit[:10]} is not in this clone: `git fetch --unshallow` fetches it")
    folder.mkdir()
    packed = subprocess.run(
        [*git, "archive", commit, "libs", "services", "pyproject.toml"], capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir()  # an installed release has this, and workers read their version from it
    metadata.write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    where = "import libs.contracts, services.gateway as found; print(libs.__file__, found.__file__)"
    env = {**os.environ, "PYTHONPATH": str(folder)}
    shown = subprocess.run(
        [sys.executable, "-c", where], env=env, cwd=folder, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(f"{folder}/") for path in shown.stdout.split()), "another release would be imported"
    return folder


async def until_known(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """Wait until every gateway and the planner know every worker."""
    async with asyncio.timeout(KNOWN_S):
        while True:
            counts = [(await gateway_metrics(http, url))["workers"] for url in fleet.urls]
            answer = await http.get(f"{fleet.url('planner')}/v1/workers")
            counts.append(len(answer.json()) if answer.is_success else 0)
            if set(counts) == {len(ROLES)}:
                return
            await asyncio.sleep(POLL_S)


async def until_covered(http: httpx.AsyncClient, fleet: Fleet) -> None:
    """Wait until the GPU time of all workers is known, with both phases in it."""
    async with asyncio.timeout(KNOWN_S):
        while True:
            answer = await http.get(f"{fleet.url('metrics')}/v1/occupancy", params={"window": "2s"})
            known = answer.json() if answer.is_success else {"gpus": 0}
            if known["gpus"] == len(ROLES) and known["coverage"] >= 0.99 and known["prefill"] > 0 < known["decode"]:
                return
            await asyncio.sleep(POLL_S)


async def test_no_request_fails_while_a_release_is_replaced_and_restored(
    embedded_kafka_server: KafkaServer, real_redis_server: RedisServer, tmp_path: Path
) -> None:
    before = unpacked(LAST_OF_0_1_0, tmp_path / "0.1.0")
    with running_fleet(tmp_path, embedded_kafka_server, real_redis_server) as fleet:
        for name in ORDER:
            await fleet.start(name, before)
        async with httpx.AsyncClient(timeout=10) as http:
            await until_known(http, fleet)
            async with steady_load(fleet.urls, clients=CLIENTS, tokens=TOKENS) as load:
                await load.more(SOME)
                await until_covered(http, fleet)
                for release in (ROOT, before):
                    for name in ORDER:
                        await fleet.replace(name, release, load)
                        await load.more(SOME)
                        await until_known(http, fleet)
                        assert (load.failed, load.broken) == ([], 0), f"{name} by {release}"
                    await until_covered(http, fleet)
            assert (load.failed, load.broken) == ([], 0)
