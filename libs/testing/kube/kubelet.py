"""A stand-in kubelet: one node whose pods run as local processes, with readiness, restarts and grace periods."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import aiohttp
from kubernetes_asyncio import client, config, watch
from kubernetes_asyncio.client.exceptions import ApiException

from libs.runtime.tasks import TaskOwner
from libs.testing.kube.pod_process import PodProcess

STAND_IN: Final = "fulcrum.dev/stand-in"
"""The node's label, which selects it for pods, and the taint that keeps others away."""
TOLERATION: Final = {"key": STAND_IN, "operator": "Exists"}
HEARTBEAT_S: Final = 10.0
PROBE_S: Final = 1.0
"""The probe interval until a pod is ready; afterwards its own interval applies."""
RESTART_S: Final = 1.0
RETRY_S: Final = 0.5
AWAY: Final = (aiohttp.ClientError, TimeoutError, OSError)
"""The errors of calls to a server that is away. Pods go on meanwhile, and the call is repeated."""
BUSY: Final = 429
BROKEN: Final = 500
"""Statuses from here on, and BUSY, mean that the server is not ready yet."""
MAX_PODS: Final = 200
MERGE: Final = "application/strategic-merge-patch+json"
T = TypeVar("T")


def now() -> str:
    """Return the time in Kubernetes' format."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


class Kubelet:
    """The kubelet of one node."""

    def __init__(
        self,
        api: client.ApiClient,
        node: str,
        folder: Path,
        given: Mapping[str, str],
        *,
        subnet: str = "10.99.0",
        sources: Mapping[str, Path] = MappingProxyType({}),
    ) -> None:
        """`subnet` is the first three bytes of the pods' addresses, different for each node. `sources` is that of
        PodProcess.
        """
        self.node = node
        self.tasks = TaskOwner()
        self.pods: dict[str, PodProcess] = {}
        """The pods that have not ended, by uid."""
        self._core = client.CoreV1Api(api)
        self._folder = folder
        self._given = given
        self._sources = sources
        self._free = [f"{subnet}.{number}" for number in range(MAX_PODS, 0, -1)]
        self._ending: set[str] = set()
        self._said: dict[str, tuple[bool, bool]] = {}
        """The state of each pod as the server knows it: whether it is ready, and has been."""

    async def register(self) -> None:
        """Create the node."""
        room = {"cpu": "64", "memory": "512Gi", "pods": str(MAX_PODS)}
        status = {"capacity": room, "allocatable": room, "conditions": [self._condition()]}
        labels = {STAND_IN: "true", "kubernetes.io/hostname": self.node}
        spec = {"taints": [{"key": STAND_IN, "value": "true", "effect": "NoSchedule"}]}
        meta = {"name": self.node, "labels": labels}
        await self._core.create_node({"metadata": meta, "spec": spec, "status": status})

    async def close(self) -> None:
        """Kill what runs, and delete the node."""
        await self.lose()
        try:
            await self._core.delete_node(self.node)
        except ApiException as error:
            if error.status != 404:  # another process has deleted it
                raise

    async def lose(self) -> None:
        """Lose the machine: its processes end at once, and it sends nothing more."""
        await self.tasks.close()
        for pod in self.pods.values():
            pod.kill()
            await pod.wait()
        self.pods.clear()

    async def heartbeat(self) -> None:
        """Renew the node's lease until cancelled."""
        while True:
            body = {"status": {"conditions": [self._condition()]}}
            await _answer(partial(self._core.patch_node_status, self.node, body, _content_type=MERGE))
            await asyncio.sleep(HEARTBEAT_S)

    async def follow(self) -> None:
        """Run scheduled pods and end deleted ones, until cancelled."""
        while True:
            async with watch.Watch(return_type="object") as stream:
                changes = stream.stream(
                    self._core.list_pod_for_all_namespaces, field_selector=f"spec.nodeName={self.node}",
                    timeout_seconds=60,
                )  # fmt: skip
                try:
                    async for event in changes:
                        self._take(event["type"], event["raw_object"])
                except AWAY:
                    await asyncio.sleep(RETRY_S)
                except ApiException as error:
                    if not _is_away(error):
                        raise
                    await asyncio.sleep(RETRY_S)

    def _take(self, kind: str, pod: Mapping[str, Any]) -> None:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        known = self.pods.get(uid)
        if known is None and kind != "DELETED":
            address = self._free.pop()
            secret = partial(self._secret, pod["metadata"]["namespace"])
            known = self.pods[uid] = PodProcess(
                pod, address, secret, self._folder / name, self._given, sources=self._sources
            )
            if "deletionTimestamp" not in pod["metadata"]:
                self.tasks.spawn(f"run {name}", self._run(uid))
        said = self._said.get(uid)
        if said is not None and said[0] != _is_ready(pod):
            del self._said[uid]  # the node controller may have taken this node for lost, so the state is sent again
        if (
            known is not None
            and uid not in self._ending
            and (kind == "DELETED" or "deletionTimestamp" in pod["metadata"])
        ):
            self._ending.add(uid)
            self.tasks.spawn(f"end {name}", self._end(uid))

    async def _run(self, uid: str) -> None:
        pod = self.pods[uid]
        while uid not in self._ending:
            await pod.start()
            self._said.pop(uid, None)
            while pod.runs and uid not in self._ending:
                ready = await pod.ready()
                if self._said.get(uid) != (ready, pod.started):
                    self._said[uid] = (ready, pod.started)
                    await self._say(pod, ready=ready)
                period_s = float(pod.container["readinessProbe"]["periodSeconds"]) if ready else PROBE_S
                try:
                    async with asyncio.timeout(period_s):
                        await pod.wait()
                except TimeoutError:
                    continue
            if uid not in self._ending:
                pod.restarts += 1
                self._said[uid] = (False, pod.started)
                await self._say(pod, ready=False)
                await asyncio.sleep(RESTART_S)

    async def _end(self, uid: str) -> None:
        pod = self.pods[uid]
        await pod.stop()
        await self._gone(pod)
        self._free.insert(0, pod.pod_ip)
        del self.pods[uid]
        self._said.pop(uid, None)
        self._ending.discard(uid)

    async def _gone(self, pod: PodProcess) -> None:
        meta = pod.pod["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        try:
            await _answer(partial(self._core.delete_namespaced_pod, meta["name"], meta["namespace"], body=body))
        except ApiException as error:
            if error.status not in (404, 409):  # it is deleted, and another pod may have its name
                raise

    async def _say(self, pod: PodProcess, *, ready: bool) -> None:
        meta, container = pod.pod["metadata"], pod.container
        kinds = {"Initialized": True, "PodReadyToStartContainers": True, "ContainersReady": ready, "Ready": ready}
        status = {
            "phase": "Running", "podIP": pod.pod_ip, "podIPs": [{"ip": pod.pod_ip}],
            "conditions": [
                {"type": kind, "status": str(holds), "lastTransitionTime": now()} for kind, holds in kinds.items()
            ],
            "containerStatuses": [{
                "name": container["name"], "image": container["image"], "imageID": "", "ready": ready,
                "started": pod.started, "restartCount": pod.restarts, "state": {"running": {"startedAt": now()}},
            }],
        }  # fmt: skip
        try:
            patch = partial(self._core.patch_namespaced_pod_status, _content_type=MERGE)
            await _answer(partial(patch, meta["name"], meta["namespace"], {"status": status}))
        except ApiException as error:
            if error.status != 404:  # the pod was deleted meanwhile
                raise

    async def _secret(self, namespace: str, name: str, key: str) -> str:
        found = await _answer(partial(self._core.read_namespaced_secret, name, namespace))
        return base64.b64decode(found.data[key]).decode()

    def _condition(self) -> dict[str, str]:
        return {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": now()}


def _is_away(error: ApiException) -> bool:
    return int(error.status) == BUSY or int(error.status) >= BROKEN


def _is_ready(pod: Mapping[str, Any]) -> bool:
    return any(
        each["type"] == "Ready" and each["status"] == "True" for each in pod.get("status", {}).get("conditions", ())
    )


async def _answer(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of a call, repeated until the server is there."""
    while True:
        try:
            return await call()
        except AWAY:
            await asyncio.sleep(RETRY_S)
        except ApiException as error:
            if not _is_away(error):
                raise
            await asyncio.sleep(RETRY_S)


@asynccontextmanager
async def running_kubelet(
    node: str,
    folder: Path,
    given: Mapping[str, str],
    *,
    subnet: str = "10.99.0",
    kubeconfig: str | None = None,
    sources: Mapping[str, Path] = MappingProxyType({}),
) -> AsyncIterator[Kubelet]:
    """Run a kubelet in the cluster of `kubeconfig`, or of KUBECONFIG, while the context is open.

    `given` is environment in addition to that of the pods. `sources` has trees of source by image tag.
    """
    settings = client.Configuration()
    await config.load_kube_config(kubeconfig, client_configuration=settings)
    async with client.ApiClient(settings) as api:
        kubelet = Kubelet(api, node, folder, given, subnet=subnet, sources=sources)
        await kubelet.register()
        try:
            kubelet.tasks.spawn("heartbeat", kubelet.heartbeat())
            kubelet.tasks.spawn("pods", kubelet.follow())
            yield kubelet
            if kubelet.tasks.error is not None:
                raise kubelet.tasks.error
        finally:
            await kubelet.close()
