"""Tests of servers found as a namespace's pods, as the API server describes them."""

from typing import Any

import msgspec
import pytest

from libs.observe.fleet import MOST_SERVERS, ObservedTarget
from libs.observe.pods import ObservedPods, PodQuery, ServerPod

QUERY = PodQuery("app=vllm")


def pod(
    name: str = "vllm-0",
    *,
    uid: str = "",
    phase: str = "Running",
    ready: bool = True,
    ending: bool = False,
    **more: Any,
) -> ServerPod:
    """A pod in JSON, with the fields that an API server adds and no code reads."""
    meta = {"name": name, "uid": uid or name, "namespace": "ns", "managedFields": [{"manager": "kubelet"}]}
    if ending:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    if "labels" in more:
        meta["labels"] = more["labels"]
    containers = more.get("containers", [{"name": "vllm", "image": "vllm/vllm-openai"}])
    conditions = [{"type": "Ready", "status": "True" if ready else "False", "reason": None}]
    status = {"phase": phase, "podIP": more.get("ip", "10.0.0.5"), "conditions": conditions, "qosClass": "Burstable"}
    found = {"metadata": meta, "spec": {"containers": containers, "nodeName": "a"}, "status": status}
    return msgspec.json.decode(msgspec.json.encode(found), type=ServerPod)


def servers(*pods: ServerPod, query: PodQuery = QUERY) -> list[ObservedTarget]:
    found = ObservedPods(query)
    found.replace(pods)
    return found.targets()


def test_a_ready_pod_is_a_server_under_its_own_name() -> None:
    assert servers(pod()) == [ObservedTarget("http://10.0.0.5:8000", "vllm-0")]
    assert servers(pod(ip="fd00::5"))[0].url == "http://[fd00::5]:8000"


@pytest.mark.parametrize(
    "other", [pod(ready=False), pod(phase="Pending"), pod(phase="Succeeded"), pod(ip=""), pod(ending=True)]
)
def test_a_pod_that_has_never_been_ready_is_no_server(other: ServerPod) -> None:
    assert servers(other) == []


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({}, "mixed"),
        ({"llm-d.ai/role": "prefill"}, "prefill"),
        ({"llm-d.ai/role": "decode"}, "decode"),
        ({"llm-d.ai/role": "both"}, "mixed"),
        ({"llm-d.ai/role": "something-new"}, "mixed"),
    ],
)
def test_the_role_is_that_of_the_label(labels: dict[str, str], role: str) -> None:
    assert servers(pod(labels=labels))[0].role == role


def test_another_label_can_name_the_role() -> None:
    labels = {"llm-d.ai/role": "prefill", "role": "decode"}
    assert servers(pod(labels=labels), query=PodQuery("app=vllm", role_label="role"))[0].role == "decode"


@pytest.mark.parametrize(
    ("ports", "port"),
    [
        ([], 8000),
        ([{"containerPort": 9000}], 8000),
        ([{"containerPort": 9000, "name": "http"}], 9000),
        ([{"containerPort": 8000, "name": "http"}, {"containerPort": 8200, "name": "metrics"}], 8200),
    ],
)
def test_the_port_is_the_named_one_or_vllms_default(ports: list[dict[str, Any]], port: int) -> None:
    two = pod(containers=[{"name": "sidecar"}, {"name": "vllm", "ports": ports}])
    assert servers(two)[0].url == f"http://10.0.0.5:{port}"
    assert servers(two, query=PodQuery("app=vllm", port=7000))[0].url == "http://10.0.0.5:7000"


def test_gpus_are_those_that_the_pod_requests() -> None:
    limits = {"nvidia.com/gpu": "8", "cpu": "500m"}
    assert servers(pod(containers=[{"resources": {"limits": limits}}, {"resources": {}}]))[0].gpus == 8
    assert servers(pod(containers=[{"resources": {"limits": {"cpu": 4}}}]))[0].gpus == 1


def test_a_server_that_is_no_longer_ready_stays_until_its_pod_ends() -> None:
    found = ObservedPods(QUERY)
    found.replace([pod()])
    for later in (pod(ready=False), pod(ready=False, ending=True)):
        found.put(later)
        assert [each.name for each in found.targets()] == ["vllm-0"]
    found.replace([pod(ready=False)])
    assert [each.name for each in found.targets()] == ["vllm-0"]
    found.put(pod(phase="Failed"))
    assert found.targets() == []


def test_a_recreated_pod_is_a_server_once_it_is_ready() -> None:
    found = ObservedPods(QUERY)
    found.replace([pod()])
    found.put(pod(uid="new", ready=False, ip="10.0.0.9"))
    assert found.targets() == []
    found.put(pod(uid="new", ip="10.0.0.9"))
    assert found.targets() == [ObservedTarget("http://10.0.0.9:8000", "vllm-0")]


def test_a_deleted_pod_is_no_server() -> None:
    found = ObservedPods(QUERY)
    found.replace([pod("a"), pod("b", ip="10.0.0.6")])
    found.remove("a")
    found.remove("never-seen")
    assert [each.name for each in found.targets()] == ["b"]
    found.put(pod("c", ready=False))
    assert found.matching == 2


def test_an_address_passed_on_to_another_pod_belongs_to_the_ready_one() -> None:
    found = ObservedPods(QUERY)
    found.replace([pod("a")])
    found.replace([pod("a", ready=False), pod("b")])
    assert [each.name for each in found.targets()] == ["b"]


def test_the_number_of_servers_is_bounded_and_the_others_are_counted() -> None:
    found = ObservedPods(QUERY)
    found.replace([pod(f"p{number}", ip=f"10.1.{number // 250}.{number % 250}") for number in range(MOST_SERVERS + 3)])
    assert (len(found.targets()), found.left_out, found.matching) == (MOST_SERVERS, 3, MOST_SERVERS + 3)
