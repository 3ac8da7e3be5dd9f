"""A namespace for one test: the chart in it, kubeconfigs of accounts, its API server, and leases of nodes.

Leases of KWOK's nodes are renewed as a kubelet renews its own. A KWOK that was started without leases reports a node
once and then every ten minutes, but the node controller takes a node for lost after 50 s of silence, and marks its pods
as not ready. KWOK then reports the node again, but not its pods as a kubelet would, so they stay unready.
"""

import asyncio
import json
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from libs.runtime.tasks import TaskOwner

KWOK: Final = "kwok.x-k8s.io/node"
"""The annotation of KWOK's nodes."""
HOLDER: Final = "fulcrum-tests"
LEASES: Final = "kube-node-lease"
RENEW_S: Final = 10.0
LEASE_S: Final = 40
MERGE: Final = "application/merge-patch+json"


async def renew(api: client.ApiClient) -> None:
    """Renew the leases of KWOK's nodes once, unless another process holds them."""
    coordination = client.CoordinationV1Api(api)
    nodes = (await client.CoreV1Api(api).list_node()).items
    found = (await coordination.list_namespaced_lease(LEASES)).items
    held = {each.metadata.name: each.spec.holder_identity for each in found}
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = {"holderIdentity": HOLDER, "leaseDurationSeconds": LEASE_S, "renewTime": now}
    for node in nodes:
        name = node.metadata.name
        if KWOK not in (node.metadata.annotations or {}) or held.get(name, HOLDER) != HOLDER:
            continue
        try:
            if name in held:
                await coordination.patch_namespaced_lease(name, LEASES, {"spec": spec}, _content_type=MERGE)
            else:
                await coordination.create_namespaced_lease(LEASES, {"metadata": {"name": name}, "spec": spec})
        except ApiException as error:
            if error.status not in (404, 409):  # another test was quicker
                raise


@asynccontextmanager
async def renewed_leases() -> AsyncIterator[None]:
    """Renew leases while the context is open, the first time before it begins."""
    settings, tasks = client.Configuration(), TaskOwner()
    await config.load_kube_config(client_configuration=settings)
    async with client.ApiClient(settings) as api:
        await renew(api)
        tasks.spawn("renew leases", _renew_forever(api))
        try:
            yield
            if tasks.error is not None:
                raise tasks.error
        finally:
            await tasks.close()


async def _renew_forever(api: client.ApiClient) -> None:
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await renew(api)
        except (aiohttp.ClientError, TimeoutError, OSError):  # the server is away, and tests of outages must go on
            continue
        except ApiException as error:
            if int(error.status) < 500:  # with a higher status the server is still starting
                raise


CHART: Final = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "fulcrum"
RELEASE: Final = "fulcrum"
OLDEST: Final = "1.30"
"""The Kubernetes version for which the chart is rendered."""
COMMAND_S: Final = 60.0
STARTED_S: Final = 240.0
"""The bound on a suite's start when its pods are processes, which compete for cores."""
CHECK_EVERY_S: Final = 0.4


SHOWN_EVENTS: Final = 60


class CommandFailed(Exception):
    """A command failed; the message is its output."""


async def run(*command: str, stdin: str = "") -> str:
    """Run a command and return its output. Raise CommandFailed with that output."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, said = await process.communicate(stdin.encode())
    except TimeoutError:
        process.kill()
        raise CommandFailed(f"{' '.join(command)}: no end after {COMMAND_S:.0f} s") from None
    if process.returncode:
        raise CommandFailed(f"{' '.join(command)}: {said.decode().strip()}")
    return out.decode()


async def render(*options: str, namespace: str = "default") -> str:
    """Return the chart's objects as YAML."""
    known = ("--kube-version", OLDEST)  # a helm built by `go install` takes every cluster for an old one
    return await run("helm", "template", RELEASE, str(CHART), "--namespace", namespace, *known, *options)


def several_nodes() -> tuple[str, ...]:
    """Return values for three decode workers, each of which spans two nodes."""
    pool = {"role": "decode", "replicas": 3, "nodes": 2, "gpus": 8, "env": {
        "FULCRUM_WORKER_VLLM_ARGUMENTS": json.dumps({"tensor_parallel_size": 16})
    }}  # fmt: skip
    named = ("--set", "engine=vllm", "--set", "model.name=some/model")
    return (*named, "--set-json", f"pools.decode={json.dumps(pool)}")


def two_models() -> tuple[str, ...]:
    """Return values for pools of a second model beside those of the first, and one scaled pool for each."""
    pools = {
        "other": {"role": "mixed", "replicas": 1, "model": "other", "gpus": 2},
        "other-spare": {"role": "standby", "replicas": 0, "model": "other", "gpus": 2},
    }
    return ("--set-json", f"pools={json.dumps(pools)}", "--set-json", 'planner.scales=["spare","other-spare"]')


class Namespace:
    """A namespace whose pods must meet the restricted Pod Security Standard."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder

    async def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl as the cluster's administrator."""
        return await run("kubectl", "--namespace", self.name, *arguments, stdin=stdin)

    async def helm(self, verb: str, *options: str) -> str:
        """Install or upgrade the chart."""
        return await run("helm", verb, RELEASE, str(CHART), "--namespace", self.name, *options)

    async def get(self, *what: str) -> Any:
        """Return objects as parsed JSON."""
        return json.loads(await self.kubectl("get", *what, "--output", "json"))

    async def account(self, name: str, *, server: str = "") -> str:
        """Write a kubeconfig with a token of a service account, for the real server or a proxy to it."""
        admin = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
        cluster = admin["clusters"][0]["cluster"]
        if server:
            cluster = {"server": server, "insecure-skip-tls-verify": True}
        token = (await self.kubectl("create", "token", name)).strip()
        path = self._folder / f"{name}-{uuid.uuid4().hex[:8]}.json"
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }))  # fmt: skip
        return str(path)

    async def admin(self, server: str) -> str:
        """Write a kubeconfig of the cluster's administrator for a proxy to the server."""
        found = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
        found["clusters"][0]["cluster"] = {"server": server, "insecure-skip-tls-verify": True}
        path = self._folder / f"admin-{uuid.uuid4().hex[:8]}.json"
        path.write_text(json.dumps(found))
        return str(path)

    async def ready_pods(self, component: str) -> set[str]:
        """Return the names of a component's pods that are ready and not terminating."""
        found = await self.get("pods", "--selector", f"app.kubernetes.io/component={component}")
        return {
            each["metadata"]["name"]
            for each in found["items"]
            if "deletionTimestamp" not in each["metadata"]
            and any(
                state["type"] == "Ready" and state["status"] == "True" for state in each["status"].get("conditions", ())
            )
        }

    async def until(self, what: str, holds: Callable[[], Awaitable[Any]], *, timeout_s: float = COMMAND_S) -> Any:
        """Return the result of `holds` once it is true. Raise TimeoutError that names `what` and describes the present
        state.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (found := await holds()):  # noqa: ASYNC110 - in another process
                    await asyncio.sleep(CHECK_EVERY_S)
        except TimeoutError:
            try:
                there = await self.described()
            except CommandFailed as error:  # the server is away, or too busy to answer
                there = str(error)
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}\n{there}") from None
        return found

    async def described(self) -> str:
        """Describe nodes, pods of this namespace and its last events, a line each."""
        nodes, pods, events = [(await self.get(kind))["items"] for kind in ("nodes", "pods", "events")]
        latest = sorted(events, key=lambda each: each["metadata"]["creationTimestamp"])[-SHOWN_EVENTS:]
        return "\n".join((
            "nodes:", *map(_node_line, nodes), "pods:", *map(_pod_line, pods), "events:", *map(_event_line, latest)
        ))  # fmt: skip


def _conditions(found: Any) -> str:
    return " ".join(
        f"{each['type']}={each['status']}{'/' + each['reason'] if each.get('reason') else ''}"
        f"@{(each.get('lastTransitionTime') or '')[11:19]}"
        for each in found["status"].get("conditions", ())
    )


def _node_line(node: Any) -> str:
    taints = ",".join(f"{each['key']}:{each['effect']}" for each in node["spec"].get("taints", ()))
    return f"  {node['metadata']['name']} taints=[{taints}] {_conditions(node)}"


def _pod_line(pod: Any) -> str:
    meta = pod["metadata"]
    states = " ".join(
        f"{each['name']}:{'/'.join(each['state'])} ready={each['ready']} restarts={each['restartCount']}"
        for each in pod["status"].get("containerStatuses", ())
    )
    return (
        f"  {meta['name']} {pod['status'].get('phase')} node={pod['spec'].get('nodeName', '')}"
        f" made={meta['creationTimestamp']} ends={meta.get('deletionTimestamp', '')}"
        f" ip={pod['status'].get('podIP', '')} {_conditions(pod)} {states}"
    )


def _event_line(event: Any) -> str:
    of = event["involvedObject"]
    at = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"]["creationTimestamp"]
    return f"  {at} {of['kind']}/{of['name']} {event.get('reason')}: {event.get('message', '')[:300]}"


@asynccontextmanager
async def namespace(folder: Path) -> AsyncIterator[Namespace]:
    """Create a namespace, and KWOK's nodes, while the context is open."""
    own = Namespace(f"test-{uuid.uuid4().hex[:8]}", folder)
    await run("kubectl", "create", "namespace", own.name)
    try:
        await run("kubectl", "label", "namespace", own.name, "pod-security.kubernetes.io/enforce=restricted")
        async with renewed_leases():
            yield own
    finally:
        await run("kubectl", "delete", "namespace", own.name, "--wait=false")


@asynccontextmanager
async def installed(folder: Path, *options: str) -> AsyncIterator[Namespace]:
    """Install the chart in a new namespace while the context is open."""
    async with namespace(folder) as own:
        await own.helm("install", *options)
        yield own


BACK_S: Final = 60.0
LOOK_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process that was killed."""

    command: list[str]
    log: Path

    def start_again(self) -> int:
        """Start the command again and return its process id. It outlives this process."""
        with self.log.open("ab") as out:
            return subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            ).pid


def _kill(pid: int) -> _Ended:
    process = Path(f"/proc/{pid}")
    command = (process / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
    found = _Ended(command, (process / "fd" / "1").readlink())
    os.kill(pid, signal.SIGKILL)
    return found


@asynccontextmanager
async def killed(pid_file: Path) -> AsyncIterator[None]:
    """Kill the process of a pid file as the context begins. At the end, start it again and wait until it answers."""
    ended = _kill(int(await asyncio.to_thread(pid_file.read_text)))
    try:
        yield
    finally:
        await asyncio.to_thread(pid_file.write_text, f"{ended.start_again()}\n")
        async with asyncio.timeout(BACK_S):
            while not await _answers():  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_S)


async def _answers() -> bool:
    try:
        await run("kubectl", "get", "--raw", "/readyz")
    except CommandFailed:
        return False
    return True
