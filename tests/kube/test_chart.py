"""Tests of the Helm chart with helm alone: every profile renders, and invalid values are refused."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from libs.engine.config import parallel_of
from libs.testing.kube.namespace import CHART, CommandFailed, render, run, several_nodes, two_models

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm: run `make test-chart`")
PROFILES = sorted(file.stem for file in (CHART / "profiles").glob("*.yaml"))


def with_profile(name: str) -> tuple[str, ...]:
    return ("--values", str(CHART / "profiles" / f"{name}.yaml")) if name else ()


async def objects(*options: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(await render(*options)) if each]


def pods(found: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in found:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def environment(spec: dict[str, Any]) -> dict[str, Any]:
    listed = spec["containers"][0]["env"]
    names = [each["name"] for each in listed]
    assert len(names) == len(set(names)), "a variable that stands twice has the value of either"
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in listed}


@pytest.mark.parametrize("name", ["", *PROFILES])
async def test_lint_finds_nothing(name: str) -> None:
    said = await run("helm", "lint", "--strict", str(CHART), *with_profile(name))
    assert "WARNING" not in said and "0 chart(s) failed" in said


@pytest.mark.parametrize("name", ["", *PROFILES])
async def test_every_pod_has_limits_and_no_needless_rights(name: str) -> None:
    found = dict(pods(await objects(*with_profile(name))))
    assert {"fulcrum-gateway", "fulcrum-planner", "fulcrum-metrics", "fulcrum-prefill", "fulcrum-decode"} <= set(found)
    for pod, spec in found.items():
        assert spec["securityContext"]["runAsNonRoot"], pod
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert spec["enableServiceLinks"] is False, pod
        assert spec["automountServiceAccountToken"] is (pod == "fulcrum-planner"), pod
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False and rights["capabilities"] == {"drop": ["ALL"]}, pod
            assert rights.get("readOnlyRootFilesystem", False) is (pod != "fulcrum-kafka"), pod
            assert container["resources"]["limits"]["memory"], pod


async def test_workers_request_gpus_and_know_their_pods_name_and_address() -> None:
    found = dict(pods(await objects(*with_profile("gpt-oss-120b-tp2-8xh100"))))
    for pool in ("prefill", "decode", "spare"):
        spec = found[f"fulcrum-{pool}"]
        resources = spec["containers"][0]["resources"]
        assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 2
        set_to = environment(spec)
        assert set_to["FULCRUM_WORKER_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}
        assert set_to["FULCRUM_WORKER_ADVERTISE"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert json.loads(set_to["FULCRUM_WORKER_VLLM_ARGUMENTS"])["tensor_parallel_size"] == 2
        assert set_to["FULCRUM_WORKER_ROLE"] == {"spare": "standby"}.get(pool, pool)
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in spec["volumes"]


async def test_a_services_own_setting_overrides_the_common_one_and_numbers_are_unchanged() -> None:
    found = dict(pods(await objects(
        "--set", "env.FULCRUM_LOG_LEVEL=warning", "--set", "gateway.env.FULCRUM_LOG_LEVEL=debug",
        "--set", "gateway.env.FULCRUM_GATEWAY_MAX_OPEN_BODY_BYTES=268435456",
        "--set", "pools.decode.env.FULCRUM_WORKER_MAX_SEQUENCES=7",
        "--set", "worker.env.FULCRUM_WORKER_MAX_SEQUENCES=5",
    )))  # fmt: skip
    gateway = environment(found["fulcrum-gateway"])
    assert (gateway["FULCRUM_LOG_LEVEL"], gateway["FULCRUM_GATEWAY_MAX_OPEN_BODY_BYTES"]) == ("debug", "268435456")
    assert environment(found["fulcrum-planner"])["FULCRUM_LOG_LEVEL"] == "warning"
    assert environment(found["fulcrum-decode"])["FULCRUM_WORKER_MAX_SEQUENCES"] == "7"
    assert environment(found["fulcrum-prefill"])["FULCRUM_WORKER_MAX_SEQUENCES"] == "5"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--set", "gateway.env.FULCRUM_GATEWAY_MAX_WAITNG=1"), "FULCRUM_GATEWAY_MAX_WAITNG"),
        (("--set", "gateway.env.FULCRUM_GATEWAY_MAX_WAITING=0"), "FULCRUM_GATEWAY_MAX_WAITING"),
        (("--set", "engine=trt"), "engine"),
        (("--set", "planner.scales=spares"), "name one of decode, prefill, spare"),
        (("--set-json", 'planner.scales=["spare","decode"]'), "the planner scales one of each model"),
        (("--set-json", 'planner.scales=["nobody"]'), "name one of decode, prefill, spare"),
        (("--set", "pools.decode.nodes=2"), "only workers of engine vllm span several"),
        (("--set", "engine=vllm", "--set", "pools.spare.nodes=2"), "pools.spare has nodes"),
    ],
)
async def test_an_invalid_value_is_refused_by_its_name(options: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandFailed, match=says):
        await render(*options)


@pytest.mark.parametrize(("engine", "folder"), [("sim", "builtin:sim"), ("vllm", "/models/{}")])
async def test_pools_of_another_model_serve_it_and_one_pool_of_each_model_is_scaled(engine: str, folder: str) -> None:
    name = "sim" if engine == "sim" else "some/model"
    found = await objects(*two_models(), "--set", f"engine={engine}", "--set", f"model.name={name}")
    specs = dict(pods(found))
    assert json.loads(environment(specs["fulcrum-gateway"])["FULCRUM_GATEWAY_MODELS"]) == {
        each: folder.format(each) for each in (name, "other")
    }
    for pool, model in (("decode", name), ("spare", name), ("other", "other"), ("other-spare", "other")):
        set_to = environment(specs[f"fulcrum-{pool}"])
        assert (set_to["FULCRUM_WORKER_MODEL"], set_to["FULCRUM_WORKER_MODEL_PATH"]) == (model, folder.format(model))
        fetched = [each["command"][3] for each in specs[f"fulcrum-{pool}"].get("initContainers", ())]
        assert fetched == ([] if engine == "sim" else [model])
    fetched = [each["command"][3] for each in specs["fulcrum-gateway"].get("initContainers", ())]
    assert fetched == ([] if engine == "sim" else ["other", name])
    planner = environment(specs["fulcrum-planner"])
    assert planner["FULCRUM_PLANNER_ACTUATOR_SERVICE"] == "default/fulcrum-spare,default/fulcrum-other-spare"
    (role,) = (each for each in found if each["kind"] == "Role")
    scaled = [rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule]
    assert scaled == [["fulcrum-spare", "fulcrum-other-spare"]] * 2


async def test_external_stores_replace_the_built_in_ones() -> None:
    found = dict(pods(await objects("--set", "kafka.address=broker:9092", "--set", "redis.existingSecret=redis-url")))
    assert not {"fulcrum-kafka", "fulcrum-redis"} & set(found)
    for spec in found.values():
        assert environment(spec)["FULCRUM_KAFKA"] == "broker:9092"
        assert environment(spec)["FULCRUM_REDIS"] == {"secretKeyRef": {"name": "redis-url", "key": "url"}}


async def test_without_an_actuator_the_planner_has_no_rights() -> None:
    found = await objects("--set", "planner.scales=", "--set", "pools.spare=null")
    assert not [each for each in found if each["kind"] in ("Role", "RoleBinding")]
    assert dict(pods(found))["fulcrum-planner"]["automountServiceAccountToken"] is False
    assert "FULCRUM_PLANNER_ACTUATOR" not in environment(dict(pods(found))["fulcrum-planner"])


async def test_with_certificates_no_token_is_sent_in_plaintext() -> None:
    found = dict(pods(await objects("--set", "tls.existingSecret=certs")))
    for name, spec in found.items():
        if name in ("fulcrum-kafka", "fulcrum-redis"):
            continue
        set_to = environment(spec)
        assert set_to["FULCRUM_TLS_CA"] == "/tls/ca.crt" and "FULCRUM_ALLOW_PLAINTEXT_TOKEN" not in set_to
        assert {"name": "tls", "mountPath": "/tls", "readOnly": True} in spec["containers"][0]["volumeMounts"]


async def test_a_service_monitor_scrapes_every_service_with_metrics() -> None:
    found = await objects("--set", "serviceMonitor.enabled=true", "--set", "serviceMonitor.labels.release=prometheus")
    monitor = next(each for each in found if each["kind"] == "ServiceMonitor")
    chosen = monitor["spec"]["selector"]["matchExpressions"][0]["values"]
    services = {
        each["metadata"]["labels"]["app.kubernetes.io/component"] for each in found if each["kind"] == "Service"
    }
    assert set(chosen) <= services and monitor["metadata"]["labels"]["release"] == "prometheus"


async def test_rules_and_dashboards_are_the_projects_own_restricted_to_this_release() -> None:
    found = await objects(
        "--set", "prometheusRule.enabled=true", "--set", "grafanaDashboards.enabled=true",
        "--set", "metrics.env.FULCRUM_METRICS_PUBLIC_URL=https://fulcrum.example",
    )  # fmt: skip
    rule = next(each for each in found if each["kind"] == "PrometheusRule")
    given = yaml.safe_load((CHART.parents[1] / "prometheus" / "rules.yml").read_text())["groups"]
    rules = {each["alert"]: each for group in rule["spec"]["groups"] for each in group["rules"]}
    assert set(rules) == {each["alert"] for group in given for each in group["rules"]}
    assert rules["FulcrumDown"]["expr"] == 'up{namespace="default",job=~"fulcrum-(gateway|planner|metrics)"} == 0'
    assert rules["FulcrumDown"]["annotations"]["runbook_url"] == "https://fulcrum.example/runbook/FulcrumDown"
    for file in (CHART.parents[1] / "grafana" / "dashboards").glob("*.json"):
        made = next(each for each in found if each["metadata"]["name"] == f"fulcrum-dashboard-{file.stem}")
        shown = json.loads(made["data"][file.name])
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(shown["panels"]) == len(json.loads(file.read_text())["panels"])
        assert shown["panels"][0]["datasource"]["uid"] == "prometheus"


async def test_a_worker_over_several_nodes_is_a_leader_with_followers() -> None:
    found = await objects(*several_nodes())
    assert "fulcrum-decode" not in dict(pods(found))
    group = next(each for each in found if each["kind"] == "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["metadata"]["name"], group["spec"]["replicas"], template["size"]) == ("fulcrum-decode", 3, 2)
    leader, follower = template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]
    for spec in (leader, follower):
        written = environment(spec)["FULCRUM_WORKER_VLLM_ARGUMENTS"]
        # As the operator's variables make it of a pod's.
        for node, made in enumerate(("0", "1")):
            given = written.replace("$(LWS_WORKER_INDEX)", made).replace("$(LWS_LEADER_ADDRESS)", "10.0.0.1")
            spans = parallel_of(json.loads(given))
            assert (spans.nodes, spans.node_rank, spans.gpus_here) == (2, node, 8)
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert "readinessProbe" in leader["containers"][0], "it alone registers and is asked"
    assert not {"readinessProbe", "livenessProbe", "startupProbe", "ports"} & set(follower["containers"][0])
