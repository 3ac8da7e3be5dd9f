"""llm-d's roles: the label of pods, changed through the API server. Needs the extra `kubernetes`.

llm-d's scheduler sends prompts to pods labelled `prefill` and decodes to pods labelled `decode` (llm-d-router,
pkg/epp/framework/plugins/scheduling/filter/bylabel/roles.go). It follows a changed label at once, and the pod keeps
running. `prefill-decode` and its deprecated name `both` stand for both phases.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec
from kubernetes_asyncio import client

from libs.actuators.kubernetes_client import RAW, ApiRefusal, ScaledMeanwhile, ShellClient
from libs.actuators.port import ActuatorDown
from libs.observe.pods import OwnerReference, PodList, PodQuery, ServerPod, role_of
from libs.observe.roles import FleetAway, FleetWorker, MoveRefused, check_move

LIST_S: Final = 10.0
MOST_PODS: Final = 4_096
MOST_OWNERS: Final = 256
"""The maximum number of owners read at a time."""
ROLES_ANNOTATION: Final = "fulcrum.dev/roles"
"""The annotation of a pod with the roles that it can take: either, or fixed."""
CHANGED_ANNOTATION: Final = "fulcrum.dev/role-changed"
MAX_WHY: Final = 500
MERGE: Final = "application/merge-patch+json"
PERMISSIONS: Final = "deploy/observe/kubernetes-act.yaml"
# vLLM takes the option as JSON, or as --kv-transfer-config.kv_role kv_both.
_KV_BOTH: Final = re.compile(r"""kv_role["']?[\s:=]+["']?kv_both\b""")
# llm-d's decode pods have a proxy in front of vLLM that requests the KV from a prefill pod.
_PROXIES: Final = ("routing-proxy", "routing-sidecar", "pd-sidecar")


class _Requirement(msgspec.Struct, frozen=True):
    key: str


class _Selector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = {}
    match_expressions: list[_Requirement] = []

    def has(self, label: str) -> bool:
        return label in self.match_labels or any(each.key == label for each in self.match_expressions)


class _OwnerMeta(msgspec.Struct, frozen=True, rename="camel"):
    owner_references: list[OwnerReference] = []


class _OwnerSpec(msgspec.Struct, frozen=True):
    selector: _Selector | None = None


class PodOwner(msgspec.Struct, frozen=True):
    """The fields of a ReplicaSet or StatefulSet that are read."""

    metadata: _OwnerMeta = _OwnerMeta()
    spec: _OwnerSpec = _OwnerSpec()


def fixed_because(pod: ServerPod, owner: PodOwner | None, label: str) -> str:
    """Return the reason why a pod's role label must stay as it is; empty if it may change.

    `owner` is the pod's ReplicaSet or StatefulSet, if it has one.
    """
    if role_of(pod, label) == "mixed":
        return f"it does both phases: its label {label} is neither prefill nor decode"
    return _owned_because(pod, owner, label) or _serves_one_because(pod)


def _owned_because(pod: ServerPod, owner: PodOwner | None, label: str) -> str:
    reference = controller_of(pod)
    if reference is None:
        return ""
    named = f"{reference.kind} {reference.name}"
    if owner is None or owner.spec.selector is None:
        return f"it belongs to {named}, whose selector cannot be read and may include {label}"
    if owner.spec.selector.has(label):
        # A Deployment's selector is part of its ReplicaSets', and a LeaderWorkerSet's pods belong to StatefulSets.
        above = next((f" (of {each.kind} {each.name})" for each in owner.metadata.owner_references), "")
        return (
            f"{named}{above} selects its pods by {label}: it would release this one and start another."
            " Recreate it with another selector"
        )
    return ""


def _serves_one_because(pod: ServerPod) -> str:
    said = pod.metadata.annotations.get(ROLES_ANNOTATION, "")
    if said == "either":
        return ""
    if said:
        return f"its annotation {ROLES_ANNOTATION} is {said[:40]!r}, not either"
    remedy = f"If it can serve either role, annotate it with {ROLES_ANNOTATION}=either"
    containers = pod.spec.containers
    words = (word for each in containers for word in (*each.command, *each.args, *(e.value for e in each.env)))
    if not _KV_BOTH.search(" ".join(words)):
        return f"its command does not set kv_role to kv_both. {remedy}"
    names = " ".join(f"{each.name} {each.image}" for each in (*containers, *pod.spec.init_containers))
    if not any(each in names for each in _PROXIES):
        return f"it has no routing sidecar, with which a decode pod fetches KV. {remedy}"
    return ""


def controller_of(pod: ServerPod) -> OwnerReference | None:
    """Return the owner that replaces the pod when it ends, or None for a pod without one."""
    return next((each for each in pod.metadata.owner_references if each.controller), None)


class PodRoles:
    """The roles of the pods that a query selects."""

    kind = "pod labels"

    def __init__(self, query: PodQuery, kubeconfig: str = "") -> None:
        """Create the roles; `kubeconfig` is as for `PodFollower`."""
        self._query = query
        self._client = ShellClient(kubeconfig)

    @property
    def namespace(self) -> str:
        return self._query.namespace or self._client.namespace

    async def workers(self) -> Sequence[FleetWorker]:
        """Return the running pods, with reasons from the present state of their owners."""
        try:
            pods = await self._pods()
            owners = await self._owners(pods)
        except ActuatorDown as error:
            raise FleetAway(self._explained(error)) from None
        return [self._worker(each, owners) for each in sorted(pods, key=lambda each: each.metadata.name)]

    async def set_role(self, worker: FleetWorker, role: str, why: str) -> None:
        """Change the label, unless the pod has changed since it was read."""
        check_move(worker, role)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        said = f"{at} {worker.role} to {role}: {why}"[:MAX_WHY]
        meta = {
            "resourceVersion": worker.version,
            "labels": {self._query.role_label: role},
            "annotations": {CHANGED_ANNOTATION: said},
        }
        try:
            core = client.CoreV1Api(await self._client.connected())
            await self._client.call(
                lambda: core.patch_namespaced_pod(
                    worker.name, self.namespace, {"metadata": meta}, _content_type=MERGE, **RAW
                ),
                ServerPod,
            )
        except ScaledMeanwhile:
            raise MoveRefused(f"pod {worker.name} has changed since it was read: it is read again") from None
        except ApiRefusal as error:
            raise MoveRefused(f"pod {worker.name} was not labelled: {self._explained(error)}") from None
        except ActuatorDown as error:
            raise FleetAway(self._explained(error)) from None

    async def close(self) -> None:
        await self._client.close()

    def _worker(self, pod: ServerPod, owners: Mapping[tuple[str, str], PodOwner]) -> FleetWorker:
        label, owner = self._query.role_label, controller_of(pod)
        known = None if owner is None else owners.get((owner.kind, owner.name))
        return FleetWorker(
            pod.metadata.name, role_of(pod, label), pod.is_ready, fixed_because(pod, known, label),
            pod.metadata.resource_version,
        )  # fmt: skip

    async def _pods(self) -> list[ServerPod]:
        core = client.CoreV1Api(await self._client.connected())
        found = await self._client.call(
            lambda: core.list_namespaced_pod(
                self.namespace, label_selector=self._query.selector, limit=MOST_PODS,
                **{**RAW, "_request_timeout": LIST_S},
            ),
            PodList,
        )  # fmt: skip
        if found.metadata.more:
            raise ActuatorDown(f"over {MOST_PODS} pods match {self._query.selector!r}")
        return found.items

    async def _owners(self, pods: Sequence[ServerPod]) -> dict[tuple[str, str], PodOwner]:
        """Read the ReplicaSets and StatefulSets to which the pods belong, each once."""
        apps = client.AppsV1Api(await self._client.connected())
        read: dict[str, Any] = {
            "ReplicaSet": apps.read_namespaced_replica_set, "StatefulSet": apps.read_namespaced_stateful_set,
        }  # fmt: skip
        references = {(each.kind, each.name) for pod in pods if (each := controller_of(pod)) is not None}
        found = {}
        for kind, name in sorted(references)[:MOST_OWNERS]:
            if (call := read.get(kind)) is not None:
                found[kind, name] = await self._client.call(
                    lambda call=call, name=name: call(name, self.namespace, **RAW),  # type: ignore[misc]
                    PodOwner,
                    gone=True,
                )
        return found

    def _explained(self, error: ActuatorDown) -> str:
        if isinstance(error, ApiRefusal) and error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"{error}. Apply {PERMISSIONS}, which grants the rights to act, in namespace {self.namespace!r}"
        return str(error)
