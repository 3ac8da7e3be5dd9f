"""Contract tests of the lease of the process that changes roles: in memory, a locked file, and a Kubernetes Lease."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from libs.actuators.kubernetes_client import RAW
from libs.observe.leases import FileLease
from libs.observe.pod_lease import DEADLINE_S, LEASE_S, RENEW_S, PodLease
from libs.observe.pods import PodQuery
from libs.observe.roles import ActingLease, FleetAway
from libs.testing.kube.namespace import namespace
from libs.testing.memory.fleet_roles import MemoryLeases

DEPLOY = Path(__file__).resolve().parents[2] / "deploy/observe"
PODS = pytest.param("pods", marks=[pytest.mark.kube, pytest.mark.timeout(180)])


@dataclass
class Leases:
    """Factory of the lease of a process with this name. `wait` advances time for all of them."""

    of: Callable[[str], ActingLease]
    wait: Callable[[float], None]
    unreachable: ActingLease | None = None


class Clock:
    now_s = 100.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(params=["memory", "file", PODS])
async def leases(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Leases]:
    clock, made = Clock(), list[ActingLease]()
    if request.param == "memory":
        yield Leases(MemoryLeases().of, clock.wait)
        return
    if request.param == "file":
        (tmp_path / "file").write_text("")
        yield Leases(
            lambda name: FileLease(tmp_path, "http://10.0.0.1:30000", name), clock.wait,
            FileLease(tmp_path / "file", "http://10.0.0.1:30000", "away"),
        )  # fmt: skip
        return
    async with namespace(tmp_path) as own:
        rights, _, _ = (DEPLOY / "kubernetes.yaml").read_text().partition("apiVersion: apps/v1")
        await own.kubectl("apply", "--filename", "-", stdin=rights)
        await own.kubectl("apply", "--filename", str(DEPLOY / "kubernetes-act.yaml"))
        account = await own.account("fulcrum-observe")
        nowhere = json.loads(Path(account).read_text())
        nowhere["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
        (tmp_path / "nowhere.json").write_text(json.dumps(nowhere))
        query = PodQuery("app=vllm", own.name)

        def lease(name: str, kubeconfig: str = account) -> ActingLease:
            made.append(PodLease(query, kubeconfig, name, lambda: clock.now_s))
            return made[-1]

        yield Leases(lease, clock.wait, lease("away", str(tmp_path / "nowhere.json")))
        for each in made:
            await each.close()


async def test_one_process_holds_the_lease_and_the_others_learn_its_name(leases: Leases) -> None:
    first, second = leases.of("first"), leases.of("second")
    assert await first.hold() == ""
    assert await second.hold() == "first"
    leases.wait(RENEW_S)
    assert await first.hold() == ""
    leases.wait(RENEW_S)
    assert await second.hold() == "first"
    await first.close()
    await second.close()


async def test_a_released_lease_goes_to_the_next_process(leases: Leases) -> None:
    first, second = leases.of("first"), leases.of("second")
    assert (await first.hold(), await second.hold()) == ("", "first")
    await first.close()
    await first.close()
    leases.wait(RENEW_S)
    assert await second.hold() == ""
    leases.wait(RENEW_S)
    assert await first.hold() == "second"
    await second.close()
    await first.close()


async def test_an_unreadable_lease_raises_an_error(leases: Leases, tmp_path: Path) -> None:
    if leases.unreachable is not None:
        with pytest.raises(FleetAway) as away:
            await leases.unreachable.hold()
        assert str(tmp_path) not in str(away.value), "readers of the status see the reason"


@pytest.mark.system
async def test_a_killed_process_releases_its_lease_file(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, pathlib; from libs.observe.leases import FileLease\n"
        "lease = FileLease(pathlib.Path(sys.argv[1]), 'r', 'the other one')\n"
        "print(repr(asyncio.run(lease.hold())), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "''"
        lease = FileLease(tmp_path, "r", "this")
        assert await lease.hold() == "the other one"
        assert await FileLease(tmp_path, "another router", "this").hold() == ""
        other.kill()
        other.wait()
        assert await lease.hold() == ""
        await lease.close()


class SlowApi:
    """An API server with one lease, whose answers take `slow_s` of a clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lease: Any = None
        self.slow_s = 0.0
        self.fails = False

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            lease = await request.json()
            version = int(lease["metadata"].get("resourceVersion", 0))
            self._lease = lease | {"metadata": {"resourceVersion": str(version + 1)}}
        self._clock.wait(self.slow_s)
        status = 500 if self.fails else 404 if self._lease is None else 200
        return web.json_response(self._lease or {}, status=status)


@pytest.fixture
async def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[SlowApi, Clock, Path]]:
    monkeypatch.setitem(RAW, "_request_timeout", 60.0)
    clock = Clock()
    api, app = SlowApi(clock), web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(json.dumps(config))
    yield api, clock, tmp_path / "config"
    await runner.cleanup()


@pytest.mark.system
async def test_a_slow_answer_shortens_no_lease_and_extends_no_right_to_act(slow: tuple[SlowApi, Clock, Path]) -> None:
    api, clock, config = slow
    first, second = (
        PodLease(PodQuery("app=vllm", "n"), str(config), name, lambda: clock.now_s) for name in ("first", "second")
    )
    assert await first.hold() == ""
    api.slow_s = DEADLINE_S - 1
    assert await second.hold() == "first"
    api.slow_s = 0.0
    clock.wait(LEASE_S - 1)
    assert await second.hold() == "first", "it has seen the lease for less than its duration"
    assert await first.hold() == ""
    clock.wait(RENEW_S)
    api.slow_s, api.fails = DEADLINE_S - 1, True
    with pytest.raises(FleetAway):
        await first.hold()
    api.slow_s, api.fails = 0.0, False
    for each in (first, second):
        await each.close()


@pytest.mark.kube
@pytest.mark.timeout(180)
async def test_the_lease_of_a_holder_that_vanished_is_taken_only_after_it_has_run_out(tmp_path: Path) -> None:
    async with namespace(tmp_path) as own:
        clock, query = Clock(), PodQuery("app=vllm", own.name)
        first = PodLease(query, "", "first", lambda: clock.now_s)
        second = PodLease(query, "", "second", lambda: clock.now_s)
        try:
            assert (await first.hold(), await second.hold()) == ("", "first")
            clock.wait(LEASE_S - 1)
            assert await second.hold() == "first"
            clock.wait(RENEW_S)
            assert await second.hold() == ""
            assert await first.hold() == "second"
            found = (await own.get("lease", first.name))["spec"]
            assert (found["holderIdentity"], found["leaseTransitions"]) == ("second", 2)
            # Other fleets of the namespace have leases of their own.
            third = PodLease(PodQuery("app=other", own.name), "", "third", lambda: clock.now_s)
            assert await third.hold() == ""
            await third.close()
        finally:
            await first.close()
            await second.close()
        assert (await own.get("lease", first.name))["spec"]["holderIdentity"] == ""
        assert DEADLINE_S < LEASE_S
