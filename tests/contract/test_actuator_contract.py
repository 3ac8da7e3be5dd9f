"""Contract tests of the actuators of workers: names in memory, processes of a launcher, containers of Docker, and
pods of a Kubernetes cluster."""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from libs.actuators.docker import SERVICE, DockerActuator
from libs.actuators.kubernetes import KubernetesActuator
from libs.actuators.kubernetes_client import CALL_S
from libs.actuators.port import Actuator, ActuatorDown, Started
from libs.actuators.process import ProcessActuator
from libs.contracts.errors import StartupError
from libs.launch.processes.port import Child, ChildSpec, StatusLine
from libs.launch.processes.supervisor import Supervisor
from libs.launch.suite import Spares, make_spares_app
from libs.runtime.tasks import TaskOwner
from libs.testing.kube.namespace import installed
from libs.testing.memory.actuator import MemoryActuator

MOST = 3
WAIT_S = 60.0
Reopen = Callable[[], Actuator]


class FakeChild:
    """A process that is ready at once, and ends on a signal."""

    pid = 1

    def __init__(self, spec: ChildSpec, lines: list[StatusLine]) -> None:
        self._lines = lines
        self._ended = asyncio.Event()
        self.code = -15 if lines else 1
        if not lines:
            self._ended.set()

    async def statuses(self) -> AsyncIterator[StatusLine]:
        for line in self._lines:
            yield line

    async def wait(self) -> int:
        await self._ended.wait()
        return self.code

    async def stop(self, grace_s: float) -> None:
        self._ended.set()

    def kill(self) -> None:
        self._ended.set()


class FakeLauncher:
    """`fails`: the number of next starts that end before they are ready."""

    def __init__(self) -> None:
        self.fails = 0
        self.running: list[FakeChild] = []

    async def start(self, spec: ChildSpec) -> Child:
        failing = self.fails > 0
        self.fails -= failing
        child = FakeChild(spec, [] if failing else [StatusLine("ready", grpc="127.0.0.1:1")])
        self.running.append(child)
        return child

    def log_of(self, name: str) -> str:
        return name

    def last_words(self, name: str) -> str:
        return ""

    async def bound_logs(self) -> None: ...


class Quiet:
    """A reporter that discards its messages."""

    def progress(self, name: str, stage: str, fraction: float) -> None: ...

    def ready(self, name: str, address: str) -> None: ...

    def note(self, text: str) -> None: ...


@asynccontextmanager
async def launcher_spares(launcher: FakeLauncher) -> AsyncIterator[Spares]:
    tasks = TaskOwner()

    def unwanted(error: StartupError) -> None:
        raise AssertionError(error)

    specs = [ChildSpec(f"spare-{number}", ("python",), {}) for number in range(1, MOST + 1)]
    spares = Spares(
        specs, lambda spec: Supervisor(launcher, spec, Quiet(), restart=True, on_death=unwanted), Quiet(), tasks,
        model="sim", grace_s=1.0,
    )  # fmt: skip
    try:
        yield spares
        assert tasks.error is None
    finally:
        await spares.stop(1.0)
        await tasks.close()


def over_http(spares: Spares, token: str = "secret") -> ProcessActuator:
    transport = httpx.ASGITransport(make_spares_app(spares, "secret"))
    return ProcessActuator("http://launcher", token, transport)


@asynccontextmanager
async def docker_service() -> AsyncIterator[Reopen]:
    import docker

    try:
        engine = docker.from_env()
        engine.ping()
        image = engine.images.list()[0].id
    except (docker.errors.DockerException, IndexError):
        pytest.skip("no Docker engine answers here, or it has no image")
    service = f"worker-{uuid.uuid4().hex[:8]}"
    engine.containers.run(
        image, ["sleep", "300"], entrypoint=[], labels={SERVICE: service}, detach=True,
        environment={"FULCRUM_WORKER_MODEL": "sim"}, stop_signal="SIGKILL",
    )  # fmt: skip
    try:
        yield lambda: DockerActuator(service=service, most=MOST)
    finally:
        ours = {"label": f"{SERVICE}={service}"}
        for each in engine.containers.list(all=True, ignore_removed=True, filters=ours):
            with suppress(docker.errors.APIError):  # the actuator may be in the middle of it
                each.remove(force=True)
        engine.close()


@asynccontextmanager
async def spare_pool(folder: Path) -> AsyncIterator[Reopen]:
    """The chart's Deployment, with the rights of its planner."""
    async with installed(folder) as own:
        kubeconfig = await own.account("fulcrum-planner")
        yield lambda: KubernetesActuator(deployment=f"{own.name}/fulcrum-spare", most=MOST, kubeconfig=kubeconfig)


@pytest.fixture(params=["memory", "process", "docker", pytest.param("kubernetes", marks=pytest.mark.kube)])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Reopen]:
    if request.param == "memory":
        only = MemoryActuator(MOST)
        yield lambda: only
    elif request.param == "process":
        async with launcher_spares(FakeLauncher()) as spares:
            yield lambda: over_http(spares)
    elif request.param == "kubernetes":
        async with spare_pool(tmp_path) as opened:
            yield opened
    else:
        async with docker_service() as opened:
            yield opened


async def until(actuator: Actuator, count: int) -> Started:
    async with asyncio.timeout(WAIT_S):
        while len((found := await actuator.look()).worker_ids) != count:
            await asyncio.sleep(0.01)
    return found


async def test_the_latest_requested_number_of_workers_runs_under_stable_names(reopen: Reopen) -> None:
    actuator = reopen()
    assert await actuator.look() == Started((), MOST, "sim")
    await actuator.have(2)
    first = await until(actuator, 2)
    await actuator.have(2)
    assert (await actuator.look()).worker_ids == first.worker_ids
    kept, goes = first.worker_ids
    await actuator.have(1, first_to_end=[goes, "somebody else"])
    assert (await until(actuator, 1)).worker_ids == (kept,)
    await actuator.have(0)
    assert (await until(actuator, 0)).worker_ids == ()
    await actuator.close()


async def test_the_number_of_workers_never_exceeds_the_maximum(reopen: Reopen) -> None:
    actuator = reopen()
    await actuator.have(MOST + 5)
    assert len((await until(actuator, MOST)).worker_ids) == MOST
    await actuator.have(0)
    await actuator.have(MOST)
    assert len((await actuator.look()).worker_ids) <= MOST
    await actuator.have(0)
    await until(actuator, 0)
    await actuator.close()


async def test_a_new_actuator_sees_the_number_requested_by_an_earlier_one(reopen: Reopen) -> None:
    before = reopen()
    await before.have(2)
    names = (await until(before, 2)).worker_ids
    after = reopen()
    assert (await after.look()).worker_ids == names
    await after.have(0)
    await until(after, 0)
    for each in {before, after}:
        await each.close()


async def test_an_unreachable_or_refusing_launcher_raises_actuator_down_and_changes_nothing() -> None:
    away = ProcessActuator("http://127.0.0.1:1", "secret")
    with pytest.raises(ActuatorDown, match="does not answer"):
        await away.look()
    await away.close()
    async with launcher_spares(FakeLauncher()) as spares:
        stranger = over_http(spares, token="wrong")
        with pytest.raises(ActuatorDown, match="401"):
            await stranger.have(2)
        assert spares.state.worker_ids == []
        await stranger.close()


async def test_a_spare_worker_that_cannot_start_is_not_retried_at_every_request() -> None:
    launcher = FakeLauncher()
    launcher.fails = 1
    async with launcher_spares(launcher) as spares:
        actuator = over_http(spares)
        await actuator.have(1)
        await until(actuator, 0)
        for _ in range(5):
            await actuator.have(1)
        assert len(launcher.running) == 1, "it failed a moment ago"
        await actuator.close()


async def test_docker_without_a_daemon_raises_actuator_down() -> None:
    actuator = DockerActuator(service="decode", most=2, engine_url=f"unix:///tmp/none-{os.getpid()}.sock")
    with pytest.raises(ActuatorDown, match="Docker"):
        await actuator.look()
    await actuator.close()


async def test_kubernetes_without_a_server_or_an_account_raises_actuator_down_within_a_bound(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere.json"
    cluster = {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True}
    nowhere.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "c", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    }))  # fmt: skip
    for kubeconfig, says in ((str(nowhere), "does not answer"), ("", "no configuration for a Kubernetes API server")):
        actuator = KubernetesActuator(deployment="default/spare", most=2, kubeconfig=kubeconfig)
        began_s = time.monotonic()
        with pytest.raises(ActuatorDown, match=says):
            await actuator.look()
        with pytest.raises(ActuatorDown, match=says):
            await actuator.have(1)
        assert time.monotonic() - began_s < 3 * CALL_S
        await actuator.close()
        await actuator.close()
