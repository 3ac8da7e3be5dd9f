"""Contract tests of the port that changes roles in an observed fleet: in memory, pods of a Kubernetes cluster by
their label, and servers behind the real sglang-router."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.observe.pod_roles import PodRoles
from libs.observe.pods import PodQuery
from libs.observe.roles import FleetAway, FleetRoles, FleetWorker, MoveRefused
from libs.observe.router_roles import RouterRoles
from libs.testing.kube.namespace import Namespace, namespace
from libs.testing.memory.fleet_roles import MemoryFleetRoles
from libs.testing.servers.sglang_router import install_router, running_router
from tests.observe_rig import FakeVllm, serving

DEPLOY = Path(__file__).resolve().parents[2] / "deploy/observe"


@dataclass
class Fleet:
    """A fleet with prefill worker p0 and decode workers d0 and d1."""

    roles: FleetRoles
    unreachable: FleetRoles
    """The same without a control plane that answers."""
    change: Callable[[str, str], Awaitable[object]]
    """Gives a worker a role as another actor would."""


def memory() -> Fleet:
    def worker(name: str, role: str, why: str = "") -> FleetWorker:
        return FleetWorker(name, role, fixed_because=why)

    roles, away = MemoryFleetRoles(), MemoryFleetRoles()
    away.away = "it does not answer"
    for each in (
        worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "decode"), worker("both", "mixed", "does both"),
    ):  # fmt: skip
        roles.put(each)

    async def change(name: str, role: str) -> None:
        known = {each.name: each for each in await roles.workers()}[name]
        roles.put(replace(known, role=role))

    return Fleet(roles, away, change)


def _pod(name: str, role: str) -> dict[str, Any]:
    secure = {
        "allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": name, "labels": {"app": "vllm", "llm-d.ai/role": role},
            "annotations": {"fulcrum.dev/roles": "either"},
        },
        "spec": {
            "containers": [{"name": "vllm", "image": "vllm/vllm-openai", "securityContext": secure}],
            "nodeSelector": {"type": "kwok"},
        },
    }  # fmt: skip


async def pods(own: Namespace, folder: Path) -> Fleet:
    rights, _, _ = (DEPLOY / "kubernetes.yaml").read_text().partition("apiVersion: apps/v1")
    await own.kubectl("apply", "--filename", "-", stdin=rights)
    await own.kubectl("apply", "--filename", str(DEPLOY / "kubernetes-act.yaml"))
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"), ("both", "both")):
        await own.kubectl("apply", "--filename", "-", stdin=json.dumps(_pod(name, role)))
        await own.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=30s")
    account = await own.account("fulcrum-observe")
    nowhere = json.loads(Path(account).read_text())
    nowhere["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (folder / "nowhere.json").write_text(json.dumps(nowhere))
    query = PodQuery("app=vllm", own.name)

    async def change(name: str, role: str) -> object:
        return await own.kubectl("label", "--overwrite", "pod", name, f"llm-d.ai/role={role}")

    return Fleet(PodRoles(query, account), PodRoles(query, str(folder / "nowhere.json")), change)


@asynccontextmanager
async def behind_router(python: Path) -> AsyncIterator[Fleet]:
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serving(FakeVllm())) for name in ("p0", "d0", "d1")}
        prefill, *decode = urls.values()
        names = {url: name for name, url in urls.items()}
        async with running_router(python, [prefill], decode) as url, httpx.AsyncClient() as http:

            async def change(name: str, role: str) -> None:
                listed = {each["url"]: each["id"] for each in (await http.get(f"{url}/workers")).json()["workers"]}
                await http.delete(f"{url}/workers/{listed[urls[name]]}")
                async with asyncio.timeout(30):
                    while urls[name] in await roles_of(http, url):
                        await asyncio.sleep(0.1)
                    await http.post(f"{url}/workers", json={"url": urls[name], "worker_type": role})
                    while (await roles_of(http, url)).get(urls[name]) != role:
                        await asyncio.sleep(0.1)

            yield Fleet(RouterRoles(url, lambda: names), RouterRoles("http://127.0.0.1:1", lambda: names), change)


async def roles_of(http: httpx.AsyncClient, url: str) -> dict[str, str]:
    found: dict[str, str] = {
        each["url"]: each["worker_type"] for each in (await http.get(f"{url}/workers")).json()["workers"]
    }
    return found


@pytest.fixture(scope="session")
def router_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_router(tmp_path_factory.mktemp("router") / "venv")


ROUTER = pytest.param("router", marks=[pytest.mark.packages, pytest.mark.alone, pytest.mark.timeout(400)])
PODS = pytest.param("pods", marks=[pytest.mark.kube, pytest.mark.timeout(180)])


@pytest.fixture(params=["memory", ROUTER, PODS])
async def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Fleet]:
    if request.param == "memory":
        yield memory()
        return
    if request.param == "router":
        async with behind_router(request.getfixturevalue("router_python")) as found:
            yield found
            await found.roles.close()
            await found.unreachable.close()
        return
    async with namespace(tmp_path) as own:
        found = await pods(own, tmp_path)
        try:
            yield found
        finally:
            await found.roles.close()
            await found.unreachable.close()


async def worker_of(fleet: Fleet, name: str) -> FleetWorker:
    return next(each for each in await fleet.roles.workers() if each.name == name)


async def test_workers_report_their_roles_and_why_a_role_is_fixed(fleet: Fleet) -> None:
    found = await fleet.roles.workers()
    assert [(each.name, each.role, each.fixed_because) for each in found if each.name != "both"] == [
        ("d0", "decode", ""), ("d1", "decode", ""), ("p0", "prefill", ""),
    ]  # fmt: skip
    assert all(each.fixed_because for each in found if each.role == "mixed")
    assert all(each.ready for each in found)


async def test_a_role_change_and_its_reversal_leave_other_workers_unchanged(fleet: Fleet) -> None:
    await fleet.roles.set_role(await worker_of(fleet, "d0"), "prefill", "prompts press")
    roles = {each.name: each.role for each in await fleet.roles.workers() if each.name != "both"}
    assert roles == {"d0": "prefill", "d1": "decode", "p0": "prefill"}
    await fleet.roles.set_role(await worker_of(fleet, "d0"), "decode", "decodes press")
    assert (await worker_of(fleet, "d0")).role == "decode"


async def test_a_fixed_worker_and_unsupported_roles_are_refused(fleet: Fleet) -> None:
    fixed = replace(await worker_of(fleet, "d0"), fixed_because="it is fixed")
    with pytest.raises(MoveRefused, match="d0 stays decode: it is fixed"):
        await fleet.roles.set_role(fixed, "prefill", "")
    with pytest.raises(MoveRefused, match="a role is prefill or decode"):
        await fleet.roles.set_role(await worker_of(fleet, "d0"), "standby", "")
    assert (await worker_of(fleet, "d0")).role == "decode"


async def test_a_worker_changed_since_it_was_read_keeps_that_change(fleet: Fleet) -> None:
    read = await worker_of(fleet, "d0")
    await fleet.change("d0", "prefill")
    with pytest.raises(MoveRefused, match="has changed since it was read"):
        await fleet.roles.set_role(read, "prefill", "")
    assert (await worker_of(fleet, "d0")).role == "prefill"


async def test_a_control_plane_that_does_not_answer_raises_fleet_away_for_reads_and_changes(fleet: Fleet) -> None:
    worker = await worker_of(fleet, "d0")
    with pytest.raises(FleetAway):
        await fleet.unreachable.workers()
    with pytest.raises(FleetAway):
        await fleet.unreachable.set_role(worker, "prefill", "")
    assert (await worker_of(fleet, "d0")).role == "decode"


async def test_closing_twice_is_harmless(fleet: Fleet) -> None:
    await fleet.roles.set_role(await worker_of(fleet, "d1"), "prefill", "")
    assert (await worker_of(fleet, "d1")).role == "prefill"
    await fleet.roles.close()
    await fleet.roles.close()
