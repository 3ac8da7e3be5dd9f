"""Tests of `fulcrum observe --kubernetes` on a real control plane, with exactly the rights of its manifest."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.contracts.errors import InvalidRequest
from libs.observe.fleet import ObservedTarget
from libs.observe.pod_roles import PodRoles
from libs.observe.pod_watch import PodFollower
from libs.observe.pods import PodQuery
from libs.observe.roles import MoveRefused
from libs.runtime.tasks import TaskOwner
from libs.testing.kube.namespace import CommandFailed, Namespace, namespace, run
from libs.testing.servers.proxy import vanishing_proxy
from tests.observe_rig import FakeVllm, Load, serving

pytestmark = [pytest.mark.kube, pytest.mark.timeout(300)]
MANIFEST = Path(__file__).resolve().parents[2] / "deploy/observe/kubernetes.yaml"
ACCOUNT = "fulcrum-observe"
SELECTOR = "app=vllm"
PATIENCE_S = 30.0
NOT_READY = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Namespace]:
    async with namespace(tmp_path) as found:
        rights, _, _ = MANIFEST.read_text().partition("apiVersion: apps/v1")
        await found.kubectl("apply", "--filename", "-", stdin=rights)
        yield found


async def add_pod(own: Namespace, name: str, role: str = "", *, ip: str = "", port: int = 0) -> None:
    """A pod of vLLM's, which KWOK runs; its address is `ip` where given."""
    labels = {"app": "vllm"} | ({"llm-d.ai/role": role} if role else {})
    secure = {
        "allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    container: dict[str, Any] = {"name": "vllm", "image": "vllm/vllm-openai", "securityContext": secure}
    if port:
        container["ports"] = [{"name": "metrics", "containerPort": port}]
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [container], "nodeSelector": {"type": "kwok"}},
    }  # fmt: skip
    await own.kubectl("apply", "--filename", "-", stdin=json.dumps(pod))
    await own.kubectl("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={PATIENCE_S:.0f}s")
    if ip:
        await patch_status(own, name, {"status": {"podIP": ip, "podIPs": [{"ip": ip}]}})


async def patch_status(own: Namespace, name: str, status: dict[str, Any]) -> None:
    await own.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "--patch", json.dumps(status))


class Following:
    """A follower and the tests' way to wait for what it knows."""

    def __init__(self, pods: PodFollower) -> None:
        self.pods = pods
        self.changed = asyncio.Event()

    async def until(self, holds: Callable[[list[ObservedTarget], str], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds(self.pods.targets, self.pods.trouble):
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def following(own: Namespace, kubeconfig: str) -> AsyncIterator[Following]:
    pods, tasks = PodFollower(PodQuery(SELECTOR, own.name), kubeconfig), TaskOwner()
    found = Following(pods)
    try:
        await pods.begin()
        tasks.spawn("follow", pods.follow(found.changed.set))
        yield found
        assert tasks.error is None
    finally:
        await tasks.close()
        await pods.close()


def roles(targets: list[ObservedTarget]) -> dict[str, str]:
    return {each.name: each.role for each in targets}


async def test_rights_to_read_pods_suffice_to_see_them_come_change_and_go(own: Namespace) -> None:
    await add_pod(own, "first", "prefill")
    async with following(own, await own.account(ACCOUNT)) as seen:
        assert roles(seen.pods.targets) == {"first": "prefill"}
        address = seen.pods.targets[0].url
        await add_pod(own, "second", "decode")
        await add_pod(own, "third")
        await seen.until(
            lambda targets, _: roles(targets) == {"first": "prefill", "second": "decode", "third": "mixed"}
        )
        await own.kubectl("label", "--overwrite", "pod", "first", "llm-d.ai/role=decode")
        await seen.until(lambda targets, _: roles(targets)["first"] == "decode")
        assert seen.pods.targets[0].url == address
        await patch_status(own, "first", NOT_READY)
        await own.kubectl("delete", "pod", "second", "--grace-period=0", "--force")
        await own.kubectl("label", "--overwrite", "pod", "third", "app=another")
        await seen.until(lambda targets, _: roles(targets) == {"first": "decode"})
        await own.kubectl("delete", "pod", "first", "--grace-period=0", "--force")
        await seen.until(lambda targets, trouble: not targets and "waiting for pods" in trouble)


async def test_a_namespace_without_pods_is_reported_and_waited_for(own: Namespace) -> None:
    async with following(own, await own.account(ACCOUNT)) as seen:
        assert f"no pod matches 'app=vllm' in namespace '{own.name}'" in seen.pods.trouble
        await add_pod(own, "first")
        await seen.until(lambda targets, trouble: len(targets) == 1 and not trouble)


async def test_an_account_without_rights_gets_an_error_that_names_the_missing_one(own: Namespace) -> None:
    await own.kubectl("create", "serviceaccount", "nobody")
    pods = PodFollower(PodQuery(SELECTOR, own.name), await own.account("nobody"))
    with pytest.raises(InvalidRequest, match=r"cannot list resource \"pods\".*verbs list and watch on pods"):
        await pods.begin()
    await pods.close()


async def test_an_account_that_may_not_watch_reports_it_and_lists_again(own: Namespace) -> None:
    await own.kubectl("create", "serviceaccount", "lister")
    await own.kubectl("create", "role", "lister", "--verb=list", "--resource=pods")
    await own.kubectl("create", "rolebinding", "lister", "--role=lister", f"--serviceaccount={own.name}:lister")
    async with following(own, await own.account("lister")) as seen:
        await seen.until(lambda _, trouble: 'cannot watch resource "pods"' in trouble)
        await add_pod(own, "first")
        await seen.until(lambda targets, _: len(targets) == 1)


async def test_an_invalid_selector_is_refused_with_the_reason(own: Namespace) -> None:
    pods = PodFollower(PodQuery("app in vllm", own.name), await own.account(ACCOUNT))
    with pytest.raises(InvalidRequest, match="unable to parse"):
        await pods.begin()
    await pods.close()


async def test_the_account_can_read_pods_and_nothing_else(own: Namespace) -> None:
    await add_pod(own, "first")
    account = ("--kubeconfig", await own.account(ACCOUNT))
    await own.kubectl(*account, "get", "pods")
    for beyond in (
        ("label", "pod", "first", "llm-d.ai/role=decode"),
        ("delete", "pod", "first"),
        ("get", "secrets"),
        ("get", "nodes"),
        ("get", "pods", "--all-namespaces"),
    ):
        with pytest.raises(CommandFailed, match="forbidden"):
            await own.kubectl(*account, *beyond)


async def may_act(own: Namespace) -> str:
    """The kubeconfig of the account with the rights to act."""
    await own.kubectl("apply", "--filename", str(MANIFEST.with_name("kubernetes-act.yaml")))
    return await own.account(ACCOUNT)


async def test_the_rights_to_act_allow_changing_pods_and_reading_their_owners_and_nothing_else(own: Namespace) -> None:
    await add_pod(own, "first")
    account = ("--kubeconfig", await may_act(own))
    await own.kubectl(*account, "label", "pod", "first", "llm-d.ai/role=decode")
    for beyond in (("delete", "pod", "first"), ("get", "secrets"), ("get", "deployments"), ("get", "replicasets")):
        with pytest.raises(CommandFailed, match="forbidden"):
            await own.kubectl(*account, *beyond)


async def add_deployment(own: Namespace, name: str, selector: dict[str, str]) -> None:
    """A Deployment of one decode pod, which KWOK runs."""
    secure = {
        "allowPrivilegeEscalation": False, "runAsNonRoot": True, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    labels = {"app": "vllm", "pool": name, "llm-d.ai/role": "decode"}
    template = {
        "metadata": {"labels": labels, "annotations": {"fulcrum.dev/roles": "either"}},
        "spec": {
            "containers": [{"name": "vllm", "image": "vllm/vllm-openai", "securityContext": secure}],
            "nodeSelector": {"type": "kwok"},
        },
    }
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"pool": name, **selector}}, "template": template},
    }  # fmt: skip
    await own.kubectl("apply", "--filename", "-", stdin=json.dumps(deployment))
    await own.kubectl("rollout", "status", f"deployment/{name}", f"--timeout={PATIENCE_S:.0f}s")


async def test_a_deployment_that_selects_by_the_label_fixes_its_pod_and_another_does_not(own: Namespace) -> None:
    await add_deployment(own, "held", {"llm-d.ai/role": "decode"})
    await add_deployment(own, "free", {})
    roles = PodRoles(PodQuery(SELECTOR, own.name), await may_act(own))
    try:
        free, held = await roles.workers()
        assert "(of Deployment held) selects its pods by llm-d.ai/role" in held.fixed_because
        with pytest.raises(MoveRefused, match="selects its pods by"):
            await roles.set_role(held, "prefill", "prompts press")
        await roles.set_role(free, "prefill", "prompts press")
        await own.kubectl("rollout", "status", "deployment/free", f"--timeout={PATIENCE_S:.0f}s")
        assert {each.name: each.role for each in await roles.workers()} == {free.name: "prefill", held.name: "decode"}
        pod = await own.get("pod", free.name)
        assert "decode to prefill: prompts press" in pod["metadata"]["annotations"]["fulcrum.dev/role-changed"]
    finally:
        await roles.close()


async def test_without_the_rights_to_act_the_refusal_names_the_manifest(own: Namespace) -> None:
    await add_pod(own, "first", "decode")
    await own.kubectl("annotate", "pod", "first", "fulcrum.dev/roles=either")
    roles = PodRoles(PodQuery(SELECTOR, own.name), await own.account(ACCOUNT))
    try:
        (first,) = await roles.workers()
        with pytest.raises(MoveRefused, match=r"forbidden.*deploy/observe/kubernetes-act.yaml"):
            await roles.set_role(first, "prefill", "prompts press")
    finally:
        await roles.close()


async def test_while_the_api_server_is_away_the_last_list_stands_and_the_outage_is_reported(own: Namespace) -> None:
    admin = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
    await add_pod(own, "first", "prefill")
    async with vanishing_proxy(admin["clusters"][0]["cluster"]["server"].removeprefix("https://")) as proxy:
        kubeconfig = await own.account(ACCOUNT, server=f"https://{proxy.address}")
        async with following(own, kubeconfig) as seen:
            proxy.forwards.clear()
            await proxy.close()
            await seen.until(lambda _, trouble: "that of before" in trouble and "does not answer" in trouble)
            assert roles(seen.pods.targets) == {"first": "prefill"}
            await own.kubectl("label", "--overwrite", "pod", "first", "llm-d.ai/role=decode")
            proxy.forwards.set()
            await seen.until(lambda targets, trouble: roles(targets) == {"first": "decode"} and not trouble)


async def test_the_whole_manifest_is_accepted_in_a_restricted_namespace(own: Namespace) -> None:
    said = await own.kubectl("apply", "--dry-run=server", "--filename", str(MANIFEST))
    assert "deployment.apps/fulcrum-observe created" in said
    assert "would violate" not in said


def own_address() -> str:
    """An address of this machine that is none of loopback, which the API server takes for a pod's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


@asynccontextmanager
async def command(own: Namespace, folder: Path, *options: str) -> AsyncIterator[asyncio.StreamReader]:
    """Run `fulcrum observe --kubernetes` with the account's kubeconfig, and yield its output."""
    env = {
        **os.environ, "KUBECONFIG": await own.account(ACCOUNT), "FULCRUM_KEYS": str(folder / "keys"),
        "XDG_CACHE_HOME": str(folder),
    }  # fmt: skip
    words = ("-m", "libs.cli.main", "observe", "--kubernetes", SELECTOR, "--namespace", own.name, "--json", *options)
    process = await asyncio.create_subprocess_exec(sys.executable, *words, env=env, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        process.terminate()
        await process.wait()


async def line_where(lines: asyncio.StreamReader, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found: dict[str, Any] = json.loads(await lines.readline())
            if holds(found):
                return found


async def test_lines_name_pods_and_a_deleted_one_disappears(own: Namespace, tmp_path: Path) -> None:
    address = own_address()
    with serving(FakeVllm(Load(decoding=8)), host=address) as url:
        await add_pod(own, "here", "decode", ip=address, port=int(url.rpartition(":")[2]))
        async with command(own, tmp_path) as lines:
            found = await line_where(lines, lambda line: line["busy"] is not None)
            assert (found["server"], found["url"], found["role"]) == ("here", url, "decode")
            await own.kubectl("delete", "pod", "here", "--grace-period=0", "--force")
            gone = await line_where(lines, lambda line: line.get("trouble", "").startswith("gone"))
            assert gone["server"] == "here"


async def test_the_page_follows_the_pods(own: Namespace, tmp_path: Path) -> None:
    address = own_address()
    with serving(FakeVllm(Load(decoding=8)), host=address) as url:
        await add_pod(own, "here", "decode", ip=address, port=int(url.rpartition(":")[2]))
        async with command(own, tmp_path, "--page", "--port", "0") as lines, httpx.AsyncClient() as http:
            page = json.loads(await lines.readline())["page"]

            async def observed() -> dict[str, Any]:
                status: dict[str, dict[str, Any]] = json.loads((await http.get(f"{page}/v1/status")).text)
                observed: dict[str, Any] = status["observed"]
                return observed

            async def is_observed() -> bool:
                servers = (await observed())["servers"]
                return [(each["name"], each["role"], each["state"]) for each in servers] == [
                    ("here", "decode", "observed")
                ]

            async def is_prefill() -> bool:
                return [each["role"] for each in (await observed())["servers"]] == ["prefill"]

            async def is_gone() -> bool:
                found = await observed()
                return not found["servers"] and "waiting for pods" in found["trouble"]

            await own.until("the server is observed", is_observed)
            await own.kubectl("label", "--overwrite", "pod", "here", "llm-d.ai/role=prefill")
            await own.until("its new role shows", is_prefill)
            assert (await observed())["servers"][0]["restarts"] == 0
            await own.kubectl("delete", "pod", "here", "--grace-period=0", "--force")
            await own.until("the server has left", is_gone)


async def test_one_of_two_acting_processes_acts_and_the_other_names_it_and_takes_over(
    own: Namespace, tmp_path: Path
) -> None:
    await may_act(own)
    address = own_address()
    acts = ("--page", "--port", "0", "--act", "--rest-s", "5")
    async with AsyncExitStack() as stack:
        url = stack.enter_context(serving(FakeVllm(Load(decoding=8)), host=address))
        await add_pod(own, "here", "decode", ip=address, port=int(url.rpartition(":")[2]))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))

        async def where(page: str, what: str, holds: Callable[[dict[str, Any]], bool]) -> None:
            async def does() -> bool:
                return holds((await http.get(f"{page}/v1/status")).json()["planner"])

            await own.until(what, does, timeout_s=2 * PATIENCE_S)

        async with command(own, tmp_path / "first", *acts) as lines:
            first = json.loads(await lines.readline())["page"]
            await where(first, "the first one acts", lambda planner: planner["acts"])
            (lease,) = (await own.get("leases"))["items"]
            holder = lease["spec"]["holderIdentity"]
            others = await stack.enter_async_context(command(own, tmp_path / "second", *acts))
            second = json.loads(await others.readline())["page"]
            named = f"{holder} acts on this fleet"
            await where(second, "the second one names the first", lambda planner: named in planner["idle_because"])
            await where(first, "the first one still acts", lambda planner: planner["acts"])
        await where(second, "the second one acts", lambda planner: planner["acts"])
