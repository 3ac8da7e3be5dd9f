"""Leases of KWOK's nodes, renewed as a kubelet renews its own.

A KWOK that was started without leases reports a node once and then every ten minutes, and the node controller takes a
node that is silent for 50 s for lost: it marks the node's pods as not ready. KWOK reports the node again at once, and
never its pods, which a kubelet would: they stay unready for good.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from libs.runtime.tasks import TaskOwner

KWOK: Final = "kwok.x-k8s.io/node"
"""Annotation of its nodes."""
HOLDER: Final = "fulcrum-tests"
LEASES: Final = "kube-node-lease"
RENEW_S: Final = 10.0
LEASE_S: Final = 40
MERGE: Final = "application/merge-patch+json"


async def renew(api: client.ApiClient) -> None:
    """Once, of every node of KWOK's whose lease nobody else holds."""
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
    """While the context is open; once before it begins."""
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
        except (aiohttp.ClientError, TimeoutError, OSError):  # the server is away: tests of that are meant to go on
            continue
        except ApiException as error:
            if int(error.status) < 500:  # it begins
                raise
