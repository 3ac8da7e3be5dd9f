"""Test of faults in a cluster under load: pods are evicted, the API server is away, and a node is lost. No request
fails, and roles move meanwhile.
"""

import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.kube.clients import KubeLoad, KubeService, running_load
from libs.testing.kube.kubelet import TOLERATION, Kubelet, running_kubelet
from libs.testing.kube.namespace import STARTED_S, CommandFailed, Namespace, killed, namespace, run
from libs.testing.servers.proxy import VanishingProxy, vanishing_proxy
from libs.testing.servers.stores import KafkaServer, RedisServer

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]
API_SERVER = os.environ.get("FULCRUM_TEST_API_SERVER_PID", "")
"""A file with the process id of the API server, which is killed then; empty: connections to it end and are refused."""
AWAY_S = float(os.environ.get("FULCRUM_TEST_API_AWAY_S", "60" if API_SERVER else "15"))
"""Outage of the API server, longer than calls, probes and pauses of watches."""
RECONNECTED_S = 150.0
"""Bound on the reconnection of controllers and scheduler after an outage of a minute."""
ANSWERS = 100
"""The answers to wait for after each fault."""
ANSWERS_S = 120.0


def tell(text: str) -> None:
    """Print progress, for a test of minutes."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def values(own: Namespace, kafka: KafkaServer, redis: RedisServer) -> dict[str, Any]:
    first = {"nodeSelector": {"kubernetes.io/hostname": f"first-{own.name}"}, "tolerations": [TOLERATION]}
    second = {"nodeSelector": {"kubernetes.io/hostname": f"second-{own.name}"}}
    return {
        "kafka": {"address": kafka.servers},
        "redis": {"address": redis.url},
        "gateway": {**first, "env": {"FULCRUM_GATEWAY_NO_WORKERS_WAIT_MS": 60_000}},
        "metrics": first,
        # It moves nothing by itself: the test does.
        "planner": {**first, "most": 1, "env": {"FULCRUM_PLANNER_MODE": "advisory"}},
        "worker": {**first, "env": {"FULCRUM_WORKER_SIM_PROFILE": "llama-8b-h100"}},
        "pools": {
            "prefill": {"role": "prefill", "replicas": 1},
            "decode": {"role": "decode", "replicas": 2},
            "far": {"role": "decode", "replicas": 1, **second},
        },
    }


async def test_evictions_an_api_outage_and_a_lost_node_fail_no_request(
    tmp_path: Path, embedded_kafka_server: KafkaServer, embedded_redis_server: RedisServer
) -> None:
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(namespace(tmp_path))
        admin = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
        proxy = await stack.enter_async_context(
            vanishing_proxy(admin["clusters"][0]["cluster"]["server"].removeprefix("https://"))
        )
        server = f"https://{proxy.address}"
        file = tmp_path / "values.json"
        file.write_text(json.dumps(values(own, embedded_kafka_server, embedded_redis_server)))
        await own.helm("install", "--values", str(file))
        kubeconfig = await own.admin(server)
        given = {"FULCRUM_PLANNER_ACTUATOR_URL": await own.account("fulcrum-planner", server=server)}
        kubelet = await stack.enter_async_context(
            running_kubelet(f"first-{own.name}", tmp_path / "first", given, kubeconfig=kubeconfig)
        )
        far = await stack.enter_async_context(far_kubelet(own, tmp_path / "second"))
        for component in ("gateway", "planner", "metrics", "prefill", "decode", "far"):
            await own.until(f"{component} is ready", partial(own.ready_pods, component), timeout_s=STARTED_S)
        service = KubeService(own, "fulcrum-gateway", kubeconfig)
        async with running_load(service, clients=8, prompt="word " * 20, max_tokens=16) as load:
            await load.until(ANSWERS, ANSWERS_S)
            await pods_are_evicted(own, load)
            await a_worker_is_killed(own, kubelet, load)
            await the_server_is_away(own, kubelet, load, proxy)
            await a_node_is_lost(own, far, load)
            async with far_kubelet(own, tmp_path / "again"):
                await own.until("its pod runs on the node that is back", lambda: own.ready_pods("far"))
        assert load.failed == []
        tell(f"{load.answered} answers, none failed")


def far_kubelet(own: Namespace, folder: Path) -> Any:
    return running_kubelet(f"second-{own.name}", folder, {}, subnet="10.99.1")


async def evict(own: Namespace, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": own.name}}
    path = f"/api/v1/namespaces/{own.name}/pods/{pod}/eviction"
    await own.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(body))


async def pods_are_evicted(own: Namespace, load: KubeLoad) -> None:
    """Evict one pod at a time: the budget refuses the second until another has replaced the first."""
    first, second = await own.until("both decode pods are ready", lambda: two(own))
    await own.until("the budget allows one", lambda: allowed(own))
    await evict(own, first)
    with pytest.raises(CommandFailed, match="disruption budget"):
        await evict(own, second)
    await own.until("another has taken its place", lambda: two(own, less=first))
    await load.until(load.answered + ANSWERS, ANSWERS_S)
    assert load.failed == []
    tell(f"a pod was evicted, another one refused: {load.answered} answers")


async def a_worker_is_killed(own: Namespace, kubelet: Kubelet, load: KubeLoad) -> None:
    """Kill a worker, whose pod restarts it under its identity."""
    name = min(await own.ready_pods("decode"))
    (pod,) = (each for each in kubelet.pods.values() if each.pod["metadata"]["name"] == name)
    (planner,) = (each for each in kubelet.pods.values() if "-planner-" in each.pod["metadata"]["name"])
    async with httpx.AsyncClient(base_url=f"http://{planner.address}:8001", timeout=30) as http:

        async def incarnation() -> int:
            found = (await http.get("/v1/workers")).json()
            return next((int(each["started_unix_ns"]) for each in found if each["id"] == name), 0)

        before = await own.until("it is registered", incarnation)
        pod.kill()

        async def again() -> bool:
            return await incarnation() > before and name in await own.ready_pods("decode")

        await own.until("it is there under the same name", again)
    assert pod.restarts == 1 and load.failed == []
    tell(f"a worker was killed and came back as itself: {load.answered} answers")


async def two(own: Namespace, less: str = "") -> list[str]:
    found = sorted(await own.ready_pods("decode") - {less})
    return found if len(found) == 2 else []


async def allowed(own: Namespace) -> bool:
    return bool((await own.get("poddisruptionbudget", "fulcrum-decode"))["status"].get("disruptionsAllowed"))


@asynccontextmanager
async def away(proxy: VanishingProxy) -> AsyncIterator[None]:
    """Close connections and refuse new ones; if the server's process is known, kill it."""
    there, since_s = proxy.target, time.monotonic()
    async with AsyncExitStack() as stack:
        if API_SERVER:
            await stack.enter_async_context(killed(Path(API_SERVER)))
        else:
            proxy.target = "127.0.0.1:1"
            await proxy.close()
        try:
            yield
            await asyncio.sleep(max(AWAY_S - (time.monotonic() - since_s), 0.0))
        finally:
            proxy.target = there


async def the_server_is_away(own: Namespace, kubelet: Kubelet, load: KubeLoad, proxy: VanishingProxy) -> None:
    """Make the server unreachable for the kubelet, the planner and the clients."""
    secret = (await own.get("secret", "fulcrum-token"))["data"]["token"]
    moved = min(await own.ready_pods("decode"))
    (planner,) = (each for each in kubelet.pods.values() if "-planner-" in each.pod["metadata"]["name"])
    headers = {"authorization": f"Bearer {base64.b64decode(secret).decode()}"}
    url, before = f"http://{planner.address}:8001", load.answered
    async with away(proxy), httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:

        async def noticed() -> bool:
            text = (await http.get("/metrics")).text
            return 'actuator_calls_total{outcome="failed"} 0.0' not in text

        await own.until("the planner knows that the server is away", noticed)
        for role in ("prefill", "decode"):
            answer = await http.put(f"/v1/workers/{moved}/role", json={"role": role, "force": True})
            assert answer.status_code == 200 and answer.json()["role"] == role and answer.json()["changed"]
    assert load.answered > before and load.failed == []
    await own.kubectl("delete", "pod", moved, "--wait=false")
    again = "the kubelet runs what is scheduled again"
    await own.until(again, lambda: two(own, less=moved), timeout_s=RECONNECTED_S)
    how = "killed, and away" if API_SERVER else "away"
    tell(f"the API server was {how} for {AWAY_S:.0f} s: two roles moved, {load.answered - before} answers")


async def a_node_is_lost(own: Namespace, far: Kubelet, load: KubeLoad) -> None:
    """A node goes with what ran there. Its pod waits for another one."""
    (lost,) = await own.ready_pods("far")
    since_s = time.monotonic()
    await far.lose()
    await load.until(load.answered + ANSWERS, ANSWERS_S)
    await own.kubectl("delete", "node", far.node, "--wait=false")
    await own.kubectl("delete", "pod", lost, "--force", "--grace-period=0", "--wait=false")
    await load.until(load.answered + ANSWERS, ANSWERS_S)
    assert load.failed == [] and not await own.ready_pods("far")
    tell(f"a node was lost: {2 * ANSWERS} more answers in {time.monotonic() - since_s:.0f} s")
