"""`python -m deploy.chart`: write the parts of the Helm chart that are generated.

These are the values schema from the settings classes, a values file for each launch profile, and copies of the
Prometheus rules and Grafana dashboards.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deploy.settings_page import docstrings
from libs.launch.profile import DeploymentProfile, ProfileWorker, load_profile, profile_names
from libs.runtime.http.settings import HttpSettings
from libs.runtime.settings import CommonSettings, variable_of
from libs.worker.settings import WorkerSettings
from services.gateway.settings import GatewaySettings
from services.metrics.settings import MetricsSettings
from services.planner.settings import PlannerSettings

DEPLOY: Final = Path(__file__).resolve().parent
CHART: Final = DEPLOY / "helm" / "fulcrum"
Json = dict[str, Any]

OWN: Final = frozenset({
    "FULCRUM_CLUSTER", "FULCRUM_KAFKA", "FULCRUM_REDIS", "FULCRUM_TOKEN", "FULCRUM_TOKEN_FILE", "FULCRUM_HOST",
    "FULCRUM_NODE", "FULCRUM_ALLOW_PLAINTEXT_TOKEN", "FULCRUM_TLS_CERT", "FULCRUM_TLS_KEY", "FULCRUM_TLS_CA",
    "FULCRUM_GATEWAY_ID", "FULCRUM_GATEWAY_PORT", "FULCRUM_GATEWAY_DRAIN_S", "FULCRUM_GATEWAY_FILES_FOLDER",
    "FULCRUM_PLANNER_PORT", "FULCRUM_PLANNER_ACTUATOR", "FULCRUM_PLANNER_ACTUATOR_URL",
    "FULCRUM_PLANNER_ACTUATOR_SERVICE", "FULCRUM_PLANNER_ACTUATOR_MOST", "FULCRUM_METRICS_PORT",
    "FULCRUM_METRICS_HISTORY_FILE", "FULCRUM_METRICS_PLANNER_URL",
    "FULCRUM_WORKER_ID", "FULCRUM_WORKER_PORT", "FULCRUM_WORKER_ADVERTISE", "FULCRUM_WORKER_ROLE",
    "FULCRUM_WORKER_DRAIN_S", "FULCRUM_WORKER_ENGINE", "FULCRUM_WORKER_MODEL", "FULCRUM_WORKER_MODEL_PATH",
    "FULCRUM_WORKER_COMPANIONS",
})  # fmt: skip
"""The variables that the chart sets from other values."""
OTHERS: Final = "^(CUDA|HF|HTTP|HTTPS|NCCL|NO|NVIDIA|OMP|PYTORCH|TORCH|UCX|VLLM)_[A-Z0-9_]+$"
"""A pattern of the variables of libraries, which the chart passes on."""
NAME: Final[Json] = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"}
TEXT: Final[Json] = {"type": "string"}
SWITCH: Final[Json] = {"type": "boolean"}
ANY: Final[Json] = {"type": "object"}
COUNT: Final[Json] = {"type": "integer", "minimum": 0}
AMOUNT: Final[Json] = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([KMGT]i?)?$"}
SCALARS: Final = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern", "enum")


def closed(properties: Json, **more: Any) -> Json:
    """Return the schema of an object with these properties and no others, so that a misspelt value is refused."""
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


def variables(*classes: type[CommonSettings]) -> Json:
    """Return the schema of an `env` with the variables of these settings classes."""
    found: Json = {}
    for cls in classes:
        said, fields = docstrings(cls), cls.model_json_schema(by_alias=False)["properties"]
        for name, field in fields.items():
            variable = variable_of(cls, name)
            if variable in OWN or name not in said:
                continue
            known = (
                field.get("type") in ("integer", "number", "boolean", "string") and field.get("format") != "password"
            )
            rules = {key: field[key] for key in SCALARS if key in field} if known else TEXT
            found[variable] = {**rules, "description": " ".join(said[name].split())}
    return closed(dict(sorted(found.items())), patternProperties={OTHERS: TEXT})


def schema() -> Json:
    """Return the JSON schema of the chart's values.yaml."""
    placed = {"resources": ANY, "nodeSelector": ANY, "tolerations": {"type": "array", "items": ANY}}
    worker = {
        "env": variables(CommonSettings, WorkerSettings), "gpus": COUNT, "gpuResource": TEXT, "sharedMemory": AMOUNT,
        "cache": ANY, "drainSeconds": COUNT, "startSeconds": {"type": "integer", "minimum": 5},
        "runtimeClassName": TEXT, "priorityClassName": TEXT, "nodes": {"type": "integer", "minimum": 1}, **placed,
    }  # fmt: skip
    role = {"enum": ["prefill", "decode", "mixed", "standby"]}
    pool = closed({"role": role, "replicas": COUNT, "model": TEXT, **worker}, required=["role", "replicas"])
    peers = {"type": "array", "items": ANY}
    builtin = {"image": TEXT, "resources": ANY}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart; made by `make chart`",
        **closed({
            "image": closed({
                "repository": TEXT, "tag": TEXT, "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
                "pullSecrets": {"type": "array", "items": TEXT},
            }),
            "cluster": {"type": "string", "pattern": "^([a-z0-9][a-z0-9-]{0,31})?$"},
            "engine": {"enum": ["sim", "torch", "vllm"]},
            "model": closed({"name": {"type": "string", "minLength": 1}, "volume": ANY, "hubTokenSecret": TEXT}),
            "env": variables(CommonSettings),
            "token": closed({"existingSecret": TEXT}),
            "tls": closed({"existingSecret": TEXT}),
            "kafka": closed({"address": TEXT, "builtin": closed({**builtin, "storage": TEXT})}),
            "redis": closed({"address": TEXT, "existingSecret": TEXT, "builtin": closed(builtin)}),
            "gateway": closed({
                "replicas": COUNT, "env": variables(CommonSettings, HttpSettings, GatewaySettings),
                "drainSeconds": COUNT,
                "service": closed({
                    "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
                    "port": {"type": "integer", "minimum": 1, "maximum": 65535}, "annotations": ANY,
                }),
                "files": ANY, **placed,
            }),
            "planner": closed({
                "env": variables(CommonSettings, HttpSettings, PlannerSettings),
                "scales": {"anyOf": [TEXT, {"type": "array", "items": NAME, "uniqueItems": True}]},
                "most": {**COUNT, "maximum": 1000}, **placed,
            }),
            "metrics": closed({
                "env": variables(CommonSettings, HttpSettings, MetricsSettings), "history": ANY, **placed,
            }),
            "worker": closed(worker),
            "pools": {"type": "object", "propertyNames": {**NAME, "maxLength": 20}, "additionalProperties": pool},
            "topologySpread": {"type": "array", "items": TEXT},
            "podDisruptionBudget": closed({"enabled": SWITCH}),
            "networkPolicy": closed({"enabled": SWITCH, "gatewayFrom": peers, "planeFrom": peers}),
            "serviceMonitor": closed({"enabled": SWITCH, "interval": TEXT, "labels": ANY}),
            "prometheusRule": closed({"enabled": SWITCH, "labels": ANY}),
            "grafanaDashboards": closed({"enabled": SWITCH, "datasource": TEXT, "labels": ANY}),
            "global": ANY,
        }),
    }  # fmt: skip


def profile_values(name: str, profile: DeploymentProfile) -> str:
    """Return a values file as YAML: a pool for each role, and an empty pool of spare workers for the planner."""
    roles = sorted({worker.role for worker in profile.workers}, reverse=True)
    pools = {role: _pool(role, profile.of(role)) for role in roles}
    spare = {**_pool("standby", profile.of(roles[-1])), "replicas": 0}
    first = profile.workers[0]
    worker = {
        "gpus": first.gpus,
        "sharedMemory": "16Gi",
        "resources": {
            "requests": {"cpu": str(4 * first.gpus), "memory": f"{32 * first.gpus}Gi"},
            "limits": {"memory": f"{64 * first.gpus}Gi"},
        },
    }
    lines = [
        f"# Profile {name}: {profile.machine}. Made by `make chart` from the launch profile.",
        f"# {profile.not_run}",
        "# Give model.volume a claim, or every pod fetches the weights; CPU and memory are guesses.",
        "engine: vllm",
        f"model: {_flow({'name': profile.model})}",
        f"worker: {_flow(worker)}",
        "planner: {most: 2}",
        "pools:",
        *(f"  {key}: {_flow(value)}" for key, value in {**pools, "spare": spare}.items()),
    ]
    return "\n".join(lines) + "\n"


def _pool(role: str, workers: list[ProfileWorker]) -> Json:
    environment = _environment(workers[0])
    assert all(_environment(each) == environment for each in workers), "one pool, one kind of worker"
    return {"role": role, "replicas": len(workers), "gpus": workers[0].gpus, "env": environment}


def _environment(worker: ProfileWorker) -> Mapping[str, str | int]:
    """Return the worker's environment without the variables of the chart and those of a pod's own GPUs."""
    left_out = {*OWN, "CUDA_VISIBLE_DEVICES", "FULCRUM_WORKER_GPUS", "FULCRUM_WORKER_BUDGET_TOKENS"}
    return {
        name: int(value) if value.isdigit() else value
        for name, value in worker.settings().items()
        if name not in left_out
    }


def _flow(value: Any) -> str:
    return json.dumps(value)  # JSON is also YAML


def made() -> dict[Path, str]:
    """Return the text of each generated file, by path."""
    files = {CHART / "values.schema.json": json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"}
    for given in (DEPLOY / "prometheus" / "rules.yml", *sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))):
        kept = CHART / "monitoring" / ("dashboards" if given.suffix == ".json" else "") / given.name
        files[kept] = given.read_text()  # a copy: Helm reads nothing outside a chart, and archives drop links
    for name in profile_names():
        files[CHART / "profiles" / f"{name}.yaml"] = profile_values(name, load_profile(name))
    return files


if __name__ == "__main__":
    for path, text in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path, file=sys.stderr)
