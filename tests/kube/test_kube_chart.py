"""Tests of the chart on a real control plane: objects are accepted, pods restricted, and upgrades safe."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.testing.kube.namespace import (
    CHART,
    CommandFailed,
    Namespace,
    installed,
    namespace,
    render,
    run,
    several_nodes,
)

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.kube
PROFILES = sorted(file.stem for file in (CHART / "profiles").glob("*.yaml"))


@pytest.mark.parametrize("name", ["", *PROFILES])
async def test_the_server_accepts_every_object_of_a_profile(name: str, tmp_path: Path) -> None:
    options = ("--values", str(CHART / "profiles" / f"{name}.yaml")) if name else ()
    async with namespace(tmp_path) as own:
        said = await own.kubectl(
            "apply", "--dry-run=server", "--filename", "-", stdin=await render(*options, namespace=own.name)
        )
    assert "deployment.apps/fulcrum-decode created (server dry run)" in said


@pytest.fixture
async def groups() -> AsyncIterator[None]:
    """Define LeaderWorkerSets, by the operator's own definition or by one for this test."""
    if "leaderworkersets" in await run("kubectl", "api-resources", "--output", "name"):
        yield
        return
    file = str(Path(__file__).with_name("leaderworkerset.yaml"))
    await run("kubectl", "create", "--filename", file)
    try:
        await run("kubectl", "wait", "--for=condition=Established", "--timeout=30s", "--filename", file)
        yield
    finally:
        await run("kubectl", "delete", "--wait=false", "--filename", file)


async def test_the_server_accepts_workers_over_several_nodes_and_their_pods(groups: None, tmp_path: Path) -> None:
    async with namespace(tmp_path) as own:
        rendered = await render(*several_nodes(), namespace=own.name)
        said = await own.kubectl("apply", "--dry-run=server", "--filename", "-", stdin=rendered)
        assert "leaderworkerset.leaderworkerset.x-k8s.io/fulcrum-decode created (server dry run)" in said
        group = next(each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "LeaderWorkerSet")
        for part in ("leaderTemplate", "workerTemplate"):
            template = {
                "apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": part.lower()},
                "template": group["spec"]["leaderWorkerTemplate"][part],
            }  # fmt: skip
            await own.kubectl("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(template))


async def test_every_pod_passes_the_restricted_standard_and_gets_a_node(tmp_path: Path) -> None:
    async with installed(tmp_path) as own:
        for component in ("gateway", "planner", "metrics", "prefill", "decode", "kafka", "redis"):
            await own.until(f"{component} is ready", lambda of=component: own.ready_pods(of))
        await own.until("both gateways are ready", lambda: both(own, "gateway"))
        assert await own.ready_pods("spare") == set()


async def test_two_suites_in_one_cluster_share_no_names_and_no_rights(tmp_path: Path) -> None:
    async with installed(tmp_path) as one, installed(tmp_path) as other:
        names = set()
        for own in (one, other):
            gateway = (await own.get("deployment", "fulcrum-gateway"))["spec"]["template"]["spec"]["containers"][0]
            names |= {each["value"] for each in gateway["env"] if each["name"] == "FULCRUM_CLUSTER"}
            await own.until("its workers are ready", lambda own=own: own.ready_pods("decode"))
        assert names == {f"{own.name}-fulcrum" for own in (one, other)}
        as_planner = ("--kubeconfig", await one.account("fulcrum-planner"))
        await one.kubectl(*as_planner, "get", "deployment", "fulcrum-spare")
        for beyond in (("get", "deployment", "fulcrum-spare"), ("get", "pods")):
            with pytest.raises(CommandFailed, match="orbidden"):
                await other.kubectl(*as_planner, *beyond)


async def test_an_upgrade_preserves_the_planners_number_and_the_token(tmp_path: Path) -> None:
    async with installed(tmp_path) as own:
        token = (await own.get("secret", "fulcrum-token"))["data"]
        await own.kubectl("scale", "deployment/fulcrum-spare", "--replicas=2")
        await own.until("two are ready", lambda: both(own, "spare"))
        await own.helm("upgrade", "--set", "gateway.replicas=1", "--set", "pools.decode.replicas=2")
        assert (await own.get("deployment", "fulcrum-spare"))["spec"]["replicas"] == 2
        assert (await own.get("deployment", "fulcrum-decode"))["spec"]["replicas"] == 2
        assert (await own.get("secret", "fulcrum-token"))["data"] == token


async def both(own: Namespace, component: str) -> bool:
    return len(await own.ready_pods(component)) == 2
