"""Tests of which pods may change their role label, and why others may not."""

from typing import Any

import msgspec
import pytest

from libs.observe.pod_roles import PodOwner, fixed_because
from libs.observe.pods import ServerPod

LABEL = "llm-d.ai/role"
KV_BOTH = ["--port", "8200", "--kv-transfer-config", '{"kv_connector":"NixlConnector", "kv_role":"kv_both"}']
SIDECAR = {"name": "routing-proxy", "image": "ghcr.io/llm-d/llm-d-routing-sidecar:v0.6.0", "restartPolicy": "Always"}


def pod(
    role: str = "decode", args: Any = KV_BOTH, sidecar: bool = True, owner: Any = None, says: str = "", **container: Any
) -> ServerPod:
    meta: dict[str, Any] = {"name": "vllm-0", "labels": {LABEL: role}}
    if owner is not None:
        meta["ownerReferences"] = [{"apiVersion": "apps/v1", "uid": "1", "blockOwnerDeletion": True} | owner]
    if says:
        meta["annotations"] = {"fulcrum.dev/roles": says}
    spec = {
        "containers": [{"name": "vllm", "image": "vllm/vllm-openai", "args": args, **container}],
        "initContainers": [SIDECAR] if sidecar else [],
    }
    return msgspec.convert({"metadata": meta, "spec": spec}, ServerPod)


def owner(selector: Any, *above: dict[str, str]) -> PodOwner:
    return msgspec.convert({"metadata": {"ownerReferences": list(above)}, "spec": {"selector": selector}}, PodOwner)


REPLICAS = {"kind": "ReplicaSet", "name": "vllm-5d8", "controller": True}


def test_a_pod_that_serves_either_role_may_change_its_label() -> None:
    assert fixed_because(pod(), None, LABEL) == ""
    assert fixed_because(pod(role="prefill"), None, LABEL) == ""
    assert (
        fixed_because(pod(owner=REPLICAS), owner({"matchLabels": {"app": "vllm", "pod-template-hash": "x"}}), LABEL)
        == ""
    )


@pytest.mark.parametrize(
    "selector",
    [{"matchLabels": {"app": "vllm", LABEL: "decode"}}, {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}],
)
def test_an_owner_that_selects_by_the_label_fixes_the_pod(selector: Any) -> None:
    above = {"kind": "Deployment", "name": "vllm"}
    why = fixed_because(pod(owner=REPLICAS, says="either"), owner(selector, above), LABEL)
    assert "ReplicaSet vllm-5d8 (of Deployment vllm) selects its pods by llm-d.ai/role" in why
    assert "would release this one and start another" in why


@pytest.mark.parametrize("found", [None, PodOwner()])
def test_an_owner_with_an_unknown_selector_fixes_the_pod(found: PodOwner | None) -> None:
    why = fixed_because(pod(owner={"kind": "CloneSet", "name": "vllm", "controller": True}), found, LABEL)
    assert "CloneSet vllm, whose selector cannot be read" in why


def test_an_owner_that_does_not_select_the_pod_fixes_nothing() -> None:
    assert fixed_because(pod(owner={"kind": "Node", "name": "gpu-1"}), None, LABEL) == ""


@pytest.mark.parametrize("role", ["both", "prefill-decode", "encode", ""])
def test_a_pod_of_both_phases_does_not_move(role: str) -> None:
    assert "does both phases" in fixed_because(pod(role=role), None, LABEL)


@pytest.mark.parametrize("args", [[], ["--kv-transfer-config", '{"kv_role":"kv_producer"}']])
def test_a_server_of_one_role_does_not_move_unless_annotated(args: list[str]) -> None:
    why = fixed_because(pod(args=args), None, LABEL)
    assert "kv_role to kv_both" in why and "fulcrum.dev/roles=either" in why
    assert fixed_because(pod(args=args, says="either"), None, LABEL) == ""


@pytest.mark.parametrize(
    "container",
    [
        {"args": ["--kv-transfer-config.kv_role", "kv_both"]},
        {"args": [], "command": ["sh", "-c", 'vllm serve m --kv-transfer-config \'{"kv_role": "kv_both"}\'']},
        {"args": ["$(KV)"], "env": [{"name": "KV", "value": '{"kv_role":"kv_both"}'}, {"name": "A", "valueFrom": {}}]},
    ],
)
def test_the_role_is_read_from_arguments_commands_and_variables(container: dict[str, Any]) -> None:
    assert fixed_because(pod(**container), None, LABEL) == ""


def test_a_pod_without_a_routing_sidecar_does_not_move_unless_annotated() -> None:
    assert "no routing sidecar" in fixed_because(pod(sidecar=False), None, LABEL)
    assert fixed_because(pod(sidecar=False, says="either"), None, LABEL) == ""


def test_an_annotation_fixes_a_pod() -> None:
    assert "'fixed', not either" in fixed_because(pod(says="fixed"), None, LABEL)
