"""The servers of a Kubernetes namespace: from pods, as the API server describes them, to targets."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from libs.observe.fleet import MAX_GPUS, MOST_SERVERS, ObservedTarget

ROLE_LABEL: Final = "llm-d.ai/role"
PORT_NAMES: Final = ("metrics", "http")
"""The names of container ports to look for, most specific first, since a sidecar may also have a port `http`."""
DEFAULT_PORT: Final = 8_000
GPU_RESOURCE: Final = "/gpu"
"""The suffix of the names of GPU resources, such as nvidia.com/gpu."""
RUNNING: Final = "Running"
NO_EXTRA: Final = "to observe pods, install the extra: pip install 'fulcrum-serving[kubernetes]'"


@dataclass(frozen=True, slots=True)
class PodQuery:
    """The pods to observe."""

    selector: str
    namespace: str = ""
    """The namespace; if empty, that of the kubeconfig or service account."""
    port: int = 0
    """The port of all pods; 0 means each pod's own."""
    role_label: str = ROLE_LABEL


class _Struct(msgspec.Struct, frozen=True, rename="camel"):
    pass


class OwnerReference(_Struct, frozen=True):
    """An object that owns a pod."""

    kind: str
    name: str
    controller: bool = False


class _Meta(_Struct, frozen=True):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []


class _Port(_Struct, frozen=True):
    container_port: int
    name: str = ""


class _Resources(_Struct, frozen=True):
    limits: dict[str, str | int] = {}


class _Variable(_Struct, frozen=True):
    name: str
    value: str = ""


class _Container(_Struct, frozen=True):
    name: str = ""
    image: str = ""
    command: list[str] = []
    args: list[str] = []
    env: list[_Variable] = []
    ports: list[_Port] = []
    resources: _Resources = _Resources()


class _Spec(_Struct, frozen=True):
    containers: list[_Container] = []
    init_containers: list[_Container] = []


class _Condition(_Struct, frozen=True):
    type: str
    status: str


class _Status(_Struct, frozen=True):
    phase: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    conditions: list[_Condition] = []


class ServerPod(_Struct, frozen=True):
    """The used parts of a pod."""

    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def is_ready(self) -> bool:
        """Return whether the pod accepts requests; a pod that is being deleted does not."""
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        return ready and self.metadata.deletion_timestamp is None

    def port(self, wanted: int) -> int:
        """Return the port of the pod's metrics; `wanted` unless that is 0."""
        named = {port.name: port.container_port for each in self.spec.containers for port in each.ports}
        return wanted or next((named[name] for name in PORT_NAMES if name in named), DEFAULT_PORT)

    @property
    def gpus(self) -> int:
        limits = [(name, value) for each in self.spec.containers for name, value in each.resources.limits.items()]
        counts = [str(value) for name, value in limits if name.endswith(GPU_RESOURCE)]
        return min(max(sum(int(count) for count in counts if count.isdecimal()), 1), MAX_GPUS)


class _ListMeta(_Struct, frozen=True):
    resource_version: str = ""
    more: str = msgspec.field(name="continue", default="")
    """The token that continues a list cut short by its limit; empty at the end."""


class PodList(_Struct, frozen=True):
    metadata: _ListMeta
    items: list[ServerPod]


class ObservedPods:
    """The pods of a query that are servers.

    A pod counts as a server from the moment it is ready until it ends; one that is no longer ready is a server that
    is away. Its name is its identity, so a pod of a StatefulSet keeps its history when it is recreated.
    """

    def __init__(self, query: PodQuery) -> None:
        self._query = query
        self._pods: dict[str, ServerPod] = {}
        """Servers by the name of their pod."""
        self._matching: set[str] = set()
        """The names of the matching pods, servers or not."""

    def replace(self, pods: Iterable[ServerPod]) -> None:
        """Enter a list of all matching pods."""
        known, self._pods, self._matching = self._pods, {}, set()
        for pod in pods:
            self._enter(pod, known.get(pod.metadata.name))

    def put(self, pod: ServerPod) -> None:
        """Enter the new state of one pod."""
        self._enter(pod, self._pods.pop(pod.metadata.name, None))

    def remove(self, name: str) -> None:
        """Remove a pod that was deleted, or no longer matches."""
        self._pods.pop(name, None)
        self._matching.discard(name)

    def targets(self) -> list[ObservedTarget]:
        """Return the servers by name, MOST_SERVERS at most."""
        return sorted(self._targets(), key=lambda each: each.name)[:MOST_SERVERS]

    @property
    def matching(self) -> int:
        """The number of matching pods, servers or not."""
        return len(self._matching)

    @property
    def left_out(self) -> int:
        """The number of servers beyond MOST_SERVERS."""
        return max(len(self._pods) - MOST_SERVERS, 0)

    def _targets(self) -> Iterator[ObservedTarget]:
        taken: set[str] = set()
        # A deleted pod may still be listed when another already has its address.
        for pod in sorted(self._pods.values(), key=lambda each: not each.is_ready):
            target = target_of(pod, self._query)
            if target.url not in taken:
                taken.add(target.url)
                yield target

    def _enter(self, pod: ServerPod, known: ServerPod | None) -> None:
        self._matching.add(pod.metadata.name)
        serves = pod.is_ready or (known is not None and known.metadata.uid == pod.metadata.uid)
        if serves and pod.status.phase == RUNNING and pod.status.pod_ip:
            self._pods[pod.metadata.name] = pod


def target_of(pod: ServerPod, query: PodQuery) -> ObservedTarget:
    """Return the server of a pod that has an address."""
    address = pod.status.pod_ip
    host = f"[{address}]" if ":" in address else address
    return ObservedTarget(
        url=f"http://{host}:{pod.port(query.port)}",
        name=pod.metadata.name,
        role=role_of(pod, query.role_label),
        gpus=pod.gpus,
    )


def role_of(pod: ServerPod, label: str) -> str:
    """Return the role in a pod's label; llm-d's other values mean both phases."""
    role = pod.metadata.labels.get(label, "")
    return role if role in ("prefill", "decode") else "mixed"
