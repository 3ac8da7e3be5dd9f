"""The lease of the one process that labels a fleet's pods: a Lease object in their namespace. Needs `kubernetes`.

It follows Kubernetes' own leader election (client-go, tools/leaderelection). A holder renews its lease, and acts only
while its last renewal is younger than the deadline. Others take a lease over once they have seen no renewal for its
whole duration by their own clock, so clocks need not agree.
"""

import asyncio
import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import msgspec
import structlog
from kubernetes_asyncio import client

from libs.actuators.kubernetes_client import RAW, ApiRefusal, ScaledMeanwhile, ShellClient
from libs.actuators.port import ActuatorDown
from libs.observe.pods import PodQuery
from libs.observe.roles import FleetAway

NAME: Final = "fulcrum-observe-act"
DIGEST_CHARS: Final = 8
LEASE_S: Final = 15
"""The seconds without a renewal after which another process takes over."""
DEADLINE_S: Final = 10.0
"""The seconds since its last renewal for which a holder acts; the rest of the lease outlasts a call in progress."""
RENEW_S: Final = 2.0
"""The seconds between two reads of the lease."""
PERMISSIONS: Final = "deploy/observe/kubernetes-act.yaml"
log = structlog.get_logger()


class _LeaseMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    acquire_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct, frozen=True):
    metadata: _LeaseMeta = _LeaseMeta()
    spec: _LeaseSpec = _LeaseSpec()


def _steady_s() -> float:
    return asyncio.get_running_loop().time()


class PodLease:
    """The Lease object of the pods that a selector names."""

    def __init__(self, query: PodQuery, kubeconfig: str, identity: str, now_s: Callable[[], float] = _steady_s) -> None:
        """Create the lease. `kubeconfig` is as for `PodFollower`; `now_s` is a clock that never steps back."""
        self.name = f"{NAME}-{hashlib.sha256(query.selector.encode()).hexdigest()[:DIGEST_CHARS]}"
        self._query = query
        self._client = ShellClient(kubeconfig)
        self._identity = identity
        self._now_s = now_s
        self._renewed_s: float | None = None
        """The time of the last renewal while this process holds the lease."""
        self._looked_s: float | None = None
        self._seen = _Lease()
        self._seen_s = 0.0
        """The time at which the lease was first seen in its present state."""
        self._holder = ""

    @property
    def namespace(self) -> str:
        return self._query.namespace or self._client.namespace

    async def hold(self) -> str:
        now_s = self._now_s()
        if self._looked_s is not None and now_s - self._looked_s < RENEW_S:
            return self._holder
        try:
            self._holder = await self._hold(now_s)
        except ActuatorDown as error:
            if self._renewed_s is not None and self._now_s() - self._renewed_s < DEADLINE_S:
                return ""
            self._renewed_s = self._looked_s = None
            raise FleetAway(self._explained(error)) from None
        self._looked_s = now_s
        return self._holder

    async def close(self) -> None:
        """Release the lease, so that another process need not wait for its end, and disconnect. Idempotent."""
        held, self._renewed_s, self._looked_s = self._renewed_s is not None, None, None
        try:
            if held:
                found = await self._read()
                if found.spec.holder_identity == self._identity:
                    await self._write(found, "")
        except ActuatorDown as error:
            log.warning("the lease to act could not be released; it will expire", seconds=LEASE_S, error=str(error))
        finally:
            await self._client.close()

    async def _hold(self, now_s: float) -> str:
        found, read_s = await self._read(), self._now_s()
        if found != self._seen:
            self._seen, self._seen_s = found, read_s
        holder = found.spec.holder_identity or ""
        ended = read_s - self._seen_s >= (found.spec.lease_duration_seconds or LEASE_S)
        if holder not in ("", self._identity) and not ended:
            self._renewed_s = None
            return holder
        try:
            await self._write(found, self._identity)
        except ScaledMeanwhile:
            self._renewed_s = None
            return "another process"
        self._renewed_s = now_s
        return ""

    async def _read(self) -> _Lease:
        api = client.CoordinationV1Api(await self._client.connected())
        return await self._client.call(
            lambda: api.read_namespaced_lease(self.name, self.namespace, **RAW), _Lease, gone=True
        )

    async def _write(self, found: _Lease, holder: str) -> None:
        """Write the lease unless it has changed since it was read. Raise ScaledMeanwhile if it has."""
        api = client.CoordinationV1Api(await self._client.connected())
        at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        new = holder != found.spec.holder_identity
        version, meta = found.metadata.resource_version, {"name": self.name}
        body: dict[str, Any] = {
            "metadata": meta | ({"resourceVersion": version} if version else {}),
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": LEASE_S,
                "renewTime": at,
                "acquireTime": at if new or not found.spec.acquire_time else found.spec.acquire_time,
                "leaseTransitions": (found.spec.lease_transitions or 0) + bool(new and holder),
            },
        }
        if version:
            await self._client.call(
                lambda: api.replace_namespaced_lease(self.name, self.namespace, body, **RAW), _Lease
            )
        else:
            await self._client.call(lambda: api.create_namespaced_lease(self.namespace, body, **RAW), _Lease)

    def _explained(self, error: ActuatorDown) -> str:
        if isinstance(error, ApiRefusal) and error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return f"{error}. Apply {PERMISSIONS}, which grants the rights to act, in namespace {self.namespace!r}"
        return str(error)
