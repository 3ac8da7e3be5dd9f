"""Tests of the Kubernetes actuator on a real control plane, with exactly the rights that the chart grants."""

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from libs.actuators.kubernetes import CONFLICTS, KubernetesActuator, PodView
from libs.actuators.kubernetes_api import Change, KubeApi
from libs.actuators.kubernetes_client import CALL_S
from libs.actuators.port import ActuatorDown
from libs.runtime.tasks import TaskOwner
from libs.testing.kube.namespace import CommandFailed, Namespace, installed, run, two_models
from libs.testing.servers.proxy import vanishing_proxy

pytestmark = pytest.mark.kube
MOST = 8
BOUND_S = 3 * CALL_S
"""Bound on one request to an unreachable server: the Deployment, its pods, its number."""


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Namespace]:
    async with installed(tmp_path) as found:
        yield found


@asynccontextmanager
async def actuator_of(
    own: Namespace, kubeconfig: str, name: str = "fulcrum-spare", by_hand_s: float = 0.0
) -> AsyncIterator[KubernetesActuator]:
    found = KubernetesActuator(deployment=f"{own.name}/{name}", most=MOST, kubeconfig=kubeconfig, by_hand_s=by_hand_s)
    try:
        yield found
    finally:
        await found.close()


async def ready(own: Namespace, count: int) -> set[str]:
    async def there() -> set[str] | None:
        found = await own.ready_pods("spare")
        return found if len(found) == count else None

    found: set[str] = await own.until(f"{count} are ready", there)
    return found


async def test_the_named_pod_of_many_is_removed_and_the_deployment_records_why(own: Namespace) -> None:
    async with actuator_of(own, await own.account("fulcrum-planner")) as actuator:
        await actuator.have(4)
        there = await ready(own, 4)
        drained = sorted(there)[1]
        await actuator.have(3, first_to_end=[drained])
        assert await ready(own, 3) == there - {drained}
        of_pods = await own.get("events", "--field-selector", "reason=EndedByPlanner")
        assert [each["involvedObject"]["name"] for each in of_pods["items"]] == [drained]
        second, third = sorted(there - {drained})[:2]
        await actuator.have(1, first_to_end=[third, second])
        assert await ready(own, 1) == there - {drained, second, third}
    reported = await own.get("events", "--field-selector", "reason=ScaledByPlanner")
    messages = [each["message"] for each in reported["items"]]
    assert "the planner wishes for 4 workers of sim: 0 to 4" in messages
    assert f"the planner wishes for 3 workers of sim: 4 to 3; first to end: {drained}" in messages
    assert drained in await own.kubectl("describe", "deployment", "fulcrum-spare")


async def test_a_deleted_or_lost_pod_is_replaced_under_another_name(own: Namespace) -> None:
    async with actuator_of(own, await own.account("fulcrum-planner")) as actuator:
        await actuator.have(2)
        before = await ready(own, 2)
        await own.kubectl("delete", "pod", min(before), "--wait=false")
        await own.until("another takes its place", lambda: replaced(own, min(before)))
        assert min(before) not in (await actuator.look()).worker_ids


async def replaced(own: Namespace, gone: str) -> bool:
    found = await own.ready_pods("spare")
    return len(found) == 2 and gone not in found


async def test_a_number_set_by_hand_is_not_lowered_for_a_while_and_raised_at_once(own: Namespace) -> None:
    async with actuator_of(own, await own.account("fulcrum-planner"), by_hand_s=2.0) as actuator:
        await actuator.have(1)
        await ready(own, 1)
        await own.kubectl("scale", "deployment/fulcrum-spare", "--replicas=3")
        await ready(own, 3)
        await actuator.have(1)
        assert (await own.get("deployment", "fulcrum-spare"))["spec"]["replicas"] == 3
        assert "somebody set 3 workers" in await own.kubectl("describe", "deployment", "fulcrum-spare")
        await actuator.have(4)
        await ready(own, 4)

        async def lowered() -> bool:
            await actuator.have(1)
            return len(await own.ready_pods("spare")) == 1

        await own.until("the planner's number holds again", lowered)


async def test_pods_of_all_pools_show_the_roles_of_their_workers(own: Namespace) -> None:
    (prefill,) = await own.until("prefill is ready", lambda: own.ready_pods("prefill"))
    async with actuator_of(own, await own.account("fulcrum-planner")) as actuator:
        for role in ("prefill", "mixed"):
            await actuator.show({prefill: role, "not-a-pod": "decode"})
            said = await own.kubectl("get", "pod", "--selector", f"fulcrum.dev/role={role}", "--output", "name")
            assert f"pod/{prefill}" in said.split()


async def test_the_planners_account_has_exactly_the_rights_it_needs(own: Namespace) -> None:
    as_planner = ("--kubeconfig", await own.account("fulcrum-planner"))
    await own.kubectl(*as_planner, "get", "deployment", "fulcrum-spare")
    await own.kubectl(*as_planner, "get", "pods")
    for beyond in (
        ("delete", "pod", "any"),
        ("create", "deployment", "other", "--image=other"),
        ("get", "deployment", "fulcrum-decode"),
        ("scale", "deployment/fulcrum-decode", "--replicas=9"),
        ("set", "image", "deployment/fulcrum-spare", "worker=other"),
        ("get", "secret", "fulcrum-token"),
        ("get", "configmaps"),
        ("get", "nodes"),
        ("get", "pods", "--namespace", "kube-system"),
    ):
        with pytest.raises(CommandFailed, match="orbidden"):
            await own.kubectl(*as_planner, *beyond)
    async with actuator_of(own, as_planner[1], "fulcrum-decode") as actuator:
        with pytest.raises(ActuatorDown, match="refuses: 403"):
            await actuator.have(2)


async def test_the_planner_may_scale_one_pool_of_each_model_and_no_other(tmp_path: Path) -> None:
    async with installed(tmp_path, *two_models()) as own:
        kubeconfig = await own.account("fulcrum-planner")
        for name, model in (("spare", "sim"), ("other-spare", "other")):
            async with actuator_of(own, kubeconfig, f"fulcrum-{name}") as actuator:
                assert (await actuator.look()).model == model
                await actuator.have(1)
                await own.until("its pod is ready", partial(own.ready_pods, name))
        async with actuator_of(own, kubeconfig, "fulcrum-other") as actuator:
            with pytest.raises(ActuatorDown, match="refuses: 403"):
                await actuator.have(2)


async def test_a_pod_that_waits_for_a_node_is_reported_until_there_is_one(tmp_path: Path) -> None:
    """As a node autoscaler brings it."""
    label = f"to-come-{uuid.uuid4().hex[:8]}"
    node = {
        "apiVersion": "v1", "kind": "Node", "metadata": {
            "name": label, "labels": {"fulcrum.dev/test": label}, "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "status": {each: {"cpu": "8", "memory": "64Gi", "pods": "10"} for each in ("allocatable", "capacity")},
    }  # fmt: skip
    pool = {"role": "standby", "replicas": 0, "nodeSelector": {"fulcrum.dev/test": label}}
    async with (
        installed(tmp_path, "--set-json", f"pools.spare={json.dumps(pool)}") as own,
        actuator_of(own, await own.account("fulcrum-planner")) as actuator,
    ):
        await actuator.have(1)
        await until_known(actuator, lambda names: len(names) == 1)
        started = await actuator.look()
        assert started.without_machine == set(started.worker_ids)
        try:
            await run("kubectl", "apply", "--filename", "-", stdin=json.dumps(node))
            assert await ready(own, 1) == set(started.worker_ids)
            assert (await actuator.look()).without_machine == set()
        finally:
            await run("kubectl", "delete", "node", label, "--wait=false")


def scaled_by_another(own: Namespace, monkeypatch: pytest.MonkeyPatch, times: int) -> Callable[[], int]:
    """Let another actor write between an actuator's read and its write."""
    read, left = KubeApi.scale, [times]

    async def scale(self: KubeApi) -> tuple[int, str]:
        found = await read(self)
        if left[0]:
            left[0] -= 1
            await own.kubectl("scale", "deployment/fulcrum-spare", f"--replicas={1 + left[0] % 2}")
        return found

    monkeypatch.setattr(KubeApi, "scale", scale)
    return lambda: left[0]


async def test_a_conflict_is_retried_and_a_lasting_one_is_a_bounded_error(
    own: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with actuator_of(own, await own.account("fulcrum-planner")) as actuator:
        await actuator.look()
        with monkeypatch.context() as once:
            scaled_by_another(own, once, 1)
            await actuator.have(3)
        await ready(own, 3)
        with monkeypatch.context() as always:
            left = scaled_by_another(own, always, 99)
            with pytest.raises(ActuatorDown, match="3 conflicts"):
                await actuator.have(7)
            assert left() == 95
        await actuator.have(2)
        await ready(own, 2)


async def test_writes_of_the_deployment_that_do_not_change_its_scale_are_no_conflict(
    own: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, writes = KubeApi.scale, iter(range(CONFLICTS + 2))

    async def scale(self: KubeApi) -> tuple[int, str]:
        found = await read(self)
        for write in itertools.islice(writes, 1):
            await own.kubectl("annotate", "deployment/fulcrum-spare", f"fulcrum.dev/test={write}", "--overwrite")
        return found

    monkeypatch.setattr(KubeApi, "scale", scale)
    async with actuator_of(own, await own.account("fulcrum-planner")) as actuator:
        await actuator.have(3)
        await ready(own, 3)
    assert next(writes, None) is None


async def test_an_unreachable_api_server_is_a_bounded_error_and_is_found_again(own: Namespace) -> None:
    admin = json.loads(await run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
    async with vanishing_proxy(admin["clusters"][0]["cluster"]["server"].removeprefix("https://")) as proxy:
        kubeconfig = await own.account("fulcrum-planner", server=f"https://{proxy.address}")
        async with actuator_of(own, kubeconfig) as actuator:
            await actuator.have(1)
            names = await ready(own, 1)
            proxy.forwards.clear()
            began_s = time.monotonic()
            with pytest.raises(ActuatorDown, match="does not answer"):
                await actuator.have(2)
            assert time.monotonic() - began_s < BOUND_S
            proxy.forwards.set()
            await proxy.close()  # what hung is gone, new connections are taken
            await until_known(actuator, lambda found: set(found) == names)
            await actuator.have(2)
            await ready(own, 2)


async def test_a_watch_that_ends_continues_and_lists_again_only_if_the_server_requires_it(
    own: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.actuators.kubernetes_api.WATCH_S", 1)
    api = KubeApi(own.name, "fulcrum-spare", await own.account("fulcrum-planner"))
    ended, changes = [0], KubeApi.changes

    async def counted(self: KubeApi, selector: str, version: str) -> AsyncIterator[Change]:
        requested = "1" if ended[0] == forgotten else version
        async for change in changes(self, selector, requested):
            yield change
        ended[0] += 1

    forgotten = -1
    monkeypatch.setattr(KubeApi, "changes", counted)
    view, tasks = PodView(api), TaskOwner()
    tasks.spawn("watch", view.run())
    try:
        await own.until("three watches have ended", lambda: reached(lambda: ended[0] >= 3))
        await own.kubectl("scale", "deployment/fulcrum-spare", "--replicas=2")
        await own.until("both pods are known", lambda: reached(lambda: len(view.pods) == 2))
        assert view.lists == 1
        forgotten = ended[0] + 1
        await own.until("pods were listed again", lambda: reached(lambda: view.lists == 2))
        assert set(view.pods) == await ready(own, 2)
    finally:
        await tasks.close()
        await api.close()
    assert tasks.error is None


async def reached(holds: Callable[[], bool]) -> bool:
    return holds()


async def until_known(actuator: KubernetesActuator, holds: Callable[[tuple[str, ...]], Any]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if holds((await actuator.look()).worker_ids):
                    return
            except ActuatorDown:
                pass
            await asyncio.sleep(0.1)
