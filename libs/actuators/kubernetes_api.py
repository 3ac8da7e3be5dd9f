"""Calls of a Kubernetes API server, each with a timeout, and the next call towards a number of workers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec
from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException

from libs.actuators.kubernetes_client import (
    RAW,
    KubeClient,
    WatchEvent,
    failures,
    said,
    watch_events,
)
from libs.actuators.port import ActuatorDown, to_end

# A ReplicaSet first deletes pods that have not started, then those of the lowest deletion cost. A request that names
# others therefore takes several steps: set the costs, wait until they are visible, set the number.


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod of a worker, which has not ended."""

    name: str
    created: str
    """The time of creation in RFC 3339, with a resolution of a second."""
    ending: bool
    started: int
    """The progress of the pod's start: 0 without a node, 1 on one, 2 running, 3 ready.

    A ReplicaSet ends the lowest first.
    """
    cost: int
    """The deletion cost; 0 for a pod without one."""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The arguments of the latest call of the port's `have`."""

    count: int
    first_to_end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetCosts:
    """A step that sets deletion costs, by pod name."""

    costs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SetReplicas:
    """A step that scales the Deployment to this number."""

    count: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that waits for a pod to change."""


Step = SetCosts | SetReplicas | Wait | None
"""The next step, or None once the request has been fulfilled."""


def oldest_first(pods: Sequence[Pod]) -> list[Pod]:
    return sorted(pods, key=lambda pod: (pod.created, pod.name))


def next_step(pods: Sequence[Pod], replicas: int, request: ScaleRequest, *, most: int, in_order: bool = True) -> Step:
    """Return the next step.

    `replicas` is the Deployment's present scale. With `in_order`, unnamed pods that are still starting may delay the
    removal of the named ones, since a ReplicaSet would end them first.
    """
    count = min(request.count, most)
    staying = [pod for pod in oldest_first(pods) if not pod.ending]
    if count == replicas:
        return None
    if count > replicas:
        # Ending pods still hold their GPUs, and the ReplicaSet may not have begun to end some of them.
        ending = len(pods) - len(staying) + max(len(staying) - replicas, 0)
        target = min(count, most - ending)
        return SetReplicas(target) if target > replicas else Wait()
    going = to_end([pod.name for pod in staying], count, request.first_to_end)
    wanted = {name: place - len(going) for place, name in enumerate(going)}
    costs = {pod.name: wanted.get(pod.name, 0) for pod in staying if pod.cost != wanted.get(pod.name, 0)}
    if costs:
        return SetCosts(costs)
    furthest = max((pod.started for pod in staying if pod.name in wanted), default=0)
    if in_order and any(pod.started < furthest for pod in staying if pod.name not in wanted):
        return Wait()
    return SetReplicas(count)


# The timeout for listing all pods: a thousand are megabytes, and only the watch waits for them.
LIST_S: Final = 10.0
WATCH_S: Final = 60
"""The time after which a watch ends by itself and is opened again."""
# A server that has not ended the watch by then counts as unreachable.
SILENCE_S: Final = WATCH_S + 5.0
MAX_PODS: Final = 4096
ROLE: Final = "fulcrum.dev/role"
"""The pod label with the worker's current role, which is independent of its pool."""
COST: Final = "controller.kubernetes.io/pod-deletion-cost"
MODEL: Final = "FULCRUM_WORKER_MODEL"
ENDED: Final = ("Succeeded", "Failed")
MERGE: Final = "application/merge-patch+json"


class _ApiObject(msgspec.Struct, frozen=True, rename="camel"):
    pass


class _ApiMeta(_ApiObject, frozen=True):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = {}


class _PodCondition(_ApiObject, frozen=True):
    type: str
    status: str


class _PodSpec(_ApiObject, frozen=True):
    node_name: str = ""


class _PodStatus(_ApiObject, frozen=True):
    phase: str = ""
    conditions: list[_PodCondition] = []


class _Pod(_ApiObject, frozen=True):
    metadata: _ApiMeta
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _PodList(_ApiObject, frozen=True):
    metadata: _ApiMeta
    items: list[_Pod]


class _TemplateVariable(_ApiObject, frozen=True):
    name: str
    value: str = ""


class _TemplateContainer(_ApiObject, frozen=True):
    env: list[_TemplateVariable] = []


class _PodTemplate(_ApiObject, frozen=True):
    class Containers(_ApiObject, frozen=True):
        containers: list[_TemplateContainer]

    spec: Containers


class _DeploymentSpec(_ApiObject, frozen=True):
    class Selector(_ApiObject, frozen=True):
        match_labels: dict[str, str]

    selector: Selector
    template: _PodTemplate


class _Deployment(_ApiObject, frozen=True):
    metadata: _ApiMeta
    spec: _DeploymentSpec


class _Scale(_ApiObject, frozen=True):
    class Size(_ApiObject, frozen=True):
        replicas: int = 0

    metadata: _ApiMeta
    spec: Size


@dataclass(frozen=True, slots=True)
class DeploymentPool:
    """The properties of a Deployment that do not change while it runs."""

    uid: str
    model: str
    selector: str
    """The label selector of the Deployment's pods."""


@dataclass(frozen=True, slots=True)
class Change:
    """A watch event about a pod, or without a pod if the server only reports the watch's progress."""

    version: str
    """The resource version from which a watch can continue."""
    name: str = ""
    pod: Pod | None = None
    """The pod's new state; None once it has ended."""


class KubeApi:
    """The calls about one Deployment and its pods.

    `kubeconfig` is a file; if empty, the service account of this pod is used. Every method raises ActuatorDown.
    """

    def __init__(self, namespace: str, name: str, kubeconfig: str) -> None:
        self._namespace = namespace
        self._name = name
        self._client = KubeClient(kubeconfig)

    async def pool(self) -> DeploymentPool:
        apps = client.AppsV1Api(await self._client.connected())
        found = await self._client.call(
            lambda: apps.read_namespaced_deployment(self._name, self._namespace, **RAW), _Deployment
        )
        variables = {
            each.name: each.value for container in found.spec.template.spec.containers for each in container.env
        }
        selector = ",".join(f"{key}={value}" for key, value in found.spec.selector.match_labels.items())
        return DeploymentPool(found.metadata.uid, variables.get(MODEL, ""), selector)

    async def pods(self, selector: str) -> tuple[dict[str, Pod], str]:
        """Return the pods that have not ended, by name, and the version from which to watch."""
        core = client.CoreV1Api(await self._client.connected())
        found = await self._client.call(
            lambda: core.list_namespaced_pod(
                self._namespace, label_selector=selector, **{**RAW, "_request_timeout": LIST_S}
            ),
            _PodList,
        )
        if len(found.items) > MAX_PODS:
            raise ActuatorDown(
                f"the cluster has {len(found.items)} pods of {self._name}: at most {MAX_PODS} are followed"
            )
        pods = {each.metadata.name: _pod(each) for each in found.items if each.status.phase not in ENDED}
        return pods, found.metadata.resource_version

    async def changes(self, selector: str, version: str) -> AsyncIterator[Change]:
        """Yield changes since `version` for up to WATCH_S. A later call can continue from the last change's version.

        Raise TooOld if the server no longer keeps the changes since that version.
        """
        core = client.CoreV1Api(await self._client.connected())
        with failures():
            response = await core.list_namespaced_pod(
                self._namespace, label_selector=selector, resource_version=version, watch=True,
                allow_watch_bookmarks=True, timeout_seconds=WATCH_S, **{**RAW, "_request_timeout": SILENCE_S},
            )  # fmt: skip
            try:
                if response.status >= HTTPStatus.BAD_REQUEST:
                    raise ApiException(status=response.status, reason=said(await response.read()))
                async for event in watch_events(response):
                    yield _change(event)
            finally:
                response.close()

    async def scale(self) -> tuple[int, str]:
        """Return the requested number of pods, and the resource version of that number."""
        apps = client.AppsV1Api(await self._client.connected())
        found = await self._client.call(
            lambda: apps.read_namespaced_deployment_scale(self._name, self._namespace, **RAW), _Scale
        )
        return found.spec.replicas, found.metadata.resource_version

    async def set_scale(self, count: int, version: str) -> None:
        """Request this many pods. Raise ScaledMeanwhile if the scale no longer has that version."""
        apps = client.AppsV1Api(await self._client.connected())
        body = {
            "metadata": {"name": self._name, "namespace": self._namespace, "resourceVersion": version},
            "spec": {"replicas": count},
        }
        await self._client.call(
            lambda: apps.replace_namespaced_deployment_scale(self._name, self._namespace, body, **RAW), _Scale
        )

    async def set_cost(self, pod: str, cost: int) -> None:
        """Set the deletion cost of a pod; 0 removes it. A pod that no longer exists is ignored."""
        await self._patch(pod, {"annotations": {COST: str(cost) if cost else None}})

    async def set_role(self, pod: str, role: str) -> None:
        await self._patch(pod, {"labels": {ROLE: role}})

    async def write_event(self, pool: DeploymentPool, reason: str, message: str) -> None:
        """Write an event on the Deployment, which `kubectl describe` shows."""
        of = {"apiVersion": "apps/v1", "kind": "Deployment", "name": self._name, "uid": pool.uid}
        await self._say(of, reason, message)

    async def write_pod_event(self, pod: Pod, reason: str, message: str) -> None:
        await self._say({"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}, reason, message)

    async def _say(self, of: dict[str, str], reason: str, message: str) -> None:
        core = client.CoreV1Api(await self._client.connected())
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        body = {
            "metadata": {"generateName": f"{of['name']}-"}, "type": "Normal", "reason": reason, "message": message,
            "involvedObject": {**of, "namespace": self._namespace}, "source": {"component": "fulcrum-planner"},
            "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        }  # fmt: skip
        await self._client.call(lambda: core.create_namespaced_event(self._namespace, body, **RAW), dict)

    async def close(self) -> None:
        await self._client.close()

    async def _patch(self, pod: str, metadata: dict[str, Any]) -> None:
        core = client.CoreV1Api(await self._client.connected())
        body = {"metadata": metadata}
        await self._client.call(
            lambda: core.patch_namespaced_pod(pod, self._namespace, body, _content_type=MERGE, **RAW), _Pod, gone=True
        )


def _change(event: WatchEvent) -> Change:
    found = msgspec.json.decode(event.object, type=_Pod)
    version = found.metadata.resource_version
    if event.type == "BOOKMARK":
        return Change(version)
    ended = event.type == "DELETED" or found.status.phase in ENDED
    return Change(version, found.metadata.name, None if ended else _pod(found))


def _pod(found: _Pod) -> Pod:
    running = found.status.phase == "Running"
    ready = running and any(each.type == "Ready" and each.status == "True" for each in found.status.conditions)
    started = 3 if ready else 2 if running else 1 if found.spec.node_name else 0
    cost = found.metadata.annotations.get(COST, "0")
    meta = found.metadata
    return Pod(
        name=meta.name,
        created=meta.creation_timestamp,
        ending=meta.deletion_timestamp is not None,
        started=started,
        cost=int(cost) if cost.removeprefix("-").isdecimal() else 0,
        uid=meta.uid,
    )
