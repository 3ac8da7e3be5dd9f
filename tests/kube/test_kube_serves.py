"""Test of the chart on a real control plane with its pods as real processes. Requests are answered, the planner
scales decode from two workers to four under load and back, and an upgrade replaces every pod without a failed
request. Clients find gateways in EndpointSlices.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.kube.clients import KubeLoad, KubeService, running_load
from libs.testing.kube.kubelet import STAND_IN, TOLERATION, Kubelet, running_kubelet
from libs.testing.kube.namespace import STARTED_S, Namespace, namespace
from libs.testing.servers.stores import KafkaServer, RedisServer

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]
OLD = os.environ.get("FULCRUM_TEST_OLD_SOURCE", "")
"""The source of another version, from which the upgrade begins; empty: both are this one."""
GROWS_S = 180.0
PACE = {"FULCRUM_PLANNER_START_UP_S": 5, "FULCRUM_PLANNER_SCALE_CALM_S": 4, "FULCRUM_PLANNER_SCALE_LINGER_S": 6}
"""Minutes in seconds: a minute of calm before each worker that stands by, two until it is ended."""
DECODING = 4
ROLLED_S = 300.0
ANSWERS = 2_000
"""The answers to wait for while every pod is replaced, and afterwards."""


def tell(text: str) -> None:
    """Print progress, for a test of minutes."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def values(kafka: KafkaServer, redis: RedisServer) -> dict[str, Any]:
    here = {"nodeSelector": {STAND_IN: "true"}, "tolerations": [TOLERATION]}
    return {
        "kafka": {"address": kafka.servers},
        "redis": {"address": redis.url},
        "gateway": {**here, "env": {"FULCRUM_GATEWAY_NO_WORKERS_WAIT_MS": 60_000}},
        "metrics": here,
        "planner": {**here, "most": 2, "env": PACE},
        # Few at once: two decode workers are full with as many clients as two cores carry.
        "worker": {
            **here, "env": {"FULCRUM_WORKER_SIM_PROFILE": "llama-70b-tp4-h100", "FULCRUM_WORKER_MAX_SEQUENCES": 4},
        },
        "pools": {"decode": {"role": "decode", "replicas": 2}},
    }  # fmt: skip


async def test_the_chart_serves_scales_and_is_replaced_without_a_failed_request(
    tmp_path: Path, embedded_kafka_server: KafkaServer, embedded_redis_server: RedisServer
) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values(embedded_kafka_server, embedded_redis_server)))
    async with namespace(tmp_path) as own:
        since_s = time.monotonic()
        await own.helm("install", "--values", str(file), "--set", "image.tag=old")
        sources = {"old": Path(OLD)} if OLD else {}
        given = {"FULCRUM_PLANNER_ACTUATOR_URL": await own.account("fulcrum-planner")}
        async with running_kubelet(f"stand-in-{own.name}", tmp_path / "pods", given, sources=sources) as kubelet:
            for component in ("gateway", "planner", "metrics", "prefill", "decode"):
                await own.until(f"{component} is ready", partial(own.ready_pods, component), timeout_s=STARTED_S)
            service = KubeService(own, "fulcrum-gateway")
            await answers(own, service)
            await own.until("the decode pool decodes", partial(begins, own), timeout_s=STARTED_S)
            tell(f"a question is answered {time.monotonic() - since_s:.0f} s after the install")
            async with running_load(service, clients=16, prompt="word " * 20, max_tokens=96) as load:
                await grows(own, load)
            assert load.failed == []
            async with running_load(service, clients=1, prompt="word " * 20, max_tokens=4) as load:
                await shrinks(own, kubelet, load)
            assert load.failed == []
            async with running_load(service, clients=16, prompt="word " * 20, max_tokens=8) as load:
                await is_replaced(own, kubelet, load, str(file))
            assert load.failed == []
            tell(f"{load.answered} answers under the upgrade, none failed")


async def answers(own: Namespace, service: KubeService) -> None:
    async def both_listed() -> bool:
        await service.refresh()
        return len(service.urls) == 2

    await own.until("both gateways are in the Service's slices", both_listed)
    question = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{service.url()}/v1/chat/completions", json=question)
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


async def decoding(own: Namespace) -> set[str]:
    """Return the pods whose workers decode now, whatever their pools are called."""
    found = await own.kubectl("get", "pods", "--selector", "fulcrum.dev/role=decode", "--output", "name")
    ready = set[str]().union(*[await own.ready_pods(pool) for pool in ("prefill", "decode", "spare")])
    return {name.removeprefix("pod/") for name in found.split()} & ready


async def begins(own: Namespace) -> bool:
    """Return whether the planner has labelled exactly the workers of the decode pool as decoding."""
    return await decoding(own) == await own.ready_pods("decode")


async def grows(own: Namespace, load: KubeLoad) -> None:
    async def grown() -> bool:
        return len(await decoding(own)) == DECODING

    since_s = time.monotonic()
    await own.until("four workers decode", grown, timeout_s=GROWS_S)
    tell(f"2 to 4 workers decode in {time.monotonic() - since_s:.0f} s, {load.answered} answers")
    assert "the planner wishes for" in await own.kubectl("describe", "deployment", "fulcrum-spare")


async def shrinks(own: Namespace, kubelet: Kubelet, load: KubeLoad) -> None:
    """Check that every removed worker had been put on standby before, and that none in a role is removed."""
    since_s = time.monotonic()
    pools = {"spare": await own.ready_pods("spare")}
    for pool in ("prefill", "decode"):
        pools[pool] = await own.ready_pods(pool)

    async def back() -> bool:
        return not await own.ready_pods("spare")

    await own.until("the planner's pool is empty again", back, timeout_s=GROWS_S)
    await own.until("two workers decode", lambda: only(own, pools["decode"]), timeout_s=GROWS_S)
    tell(f"4 to 2 workers decode in {time.monotonic() - since_s:.0f} s, {load.answered} answers")
    for pool in ("prefill", "decode"):
        assert await own.ready_pods(pool) == pools[pool]
    events = await own.get("events", "--field-selector", "reason=ScaledByPlanner")
    lowered = [each["message"] for each in events["items"] if "first to end: " in each["message"]]
    named = {name for message in lowered for name in message.partition("first to end: ")[2].split(", ")}
    assert pools["spare"] <= named, lowered


async def only(own: Namespace, pods: set[str]) -> bool:
    return await decoding(own) == pods


async def is_replaced(own: Namespace, kubelet: Kubelet, load: KubeLoad, file: str) -> None:
    before, since_s = set(kubelet.pods), time.monotonic()
    usual = "planner.env.FULCRUM_PLANNER_SCALE_CALM_S=60,planner.env.FULCRUM_PLANNER_SCALE_LINGER_S=120"
    await own.helm("upgrade", "--values", file, "--set", f"image.tag=new,{usual}")

    async def rolled() -> bool:
        found = await own.get("deployments", "--selector", "app.kubernetes.io/name=fulcrum")
        return not before & set(kubelet.pods) and all(
            each["status"].get("updatedReplicas", 0)
            == each["status"].get("readyReplicas", 0)
            == each["spec"]["replicas"]
            for each in found["items"]
        )

    await own.until("every pod is another one", rolled, timeout_s=ROLLED_S)
    tell(f"every pod replaced in {time.monotonic() - since_s:.0f} s, {load.answered} answers")
    await load.until(ANSWERS, timeout_s=ROLLED_S)
    assert (await own.get("deployment", "fulcrum-gateway"))["status"]["readyReplicas"] == 2
