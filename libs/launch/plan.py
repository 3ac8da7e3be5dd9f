"""Which processes make a suite, and what each is told: a pure function of what was asked for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from libs.launch.gpus import deal
from libs.launch.options import SuiteOptions
from libs.launch.port import ChildSpec
from libs.launch.profile import load_profile
from libs.launch.roles import ROLES, role_settings, service_of
from libs.model.fetch import Model

_REDIS_READY = "eady to accept connections"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the suite runs."""

    folder: Path
    """For the embedded stores; gone with the suite."""
    broker: tuple[str, ...]
    """Command of the embedded broker; empty when one is given."""
    kafka: str
    """HOST:PORT of the embedded broker; empty likewise."""
    redis_server: str
    """Program of the embedded Redis; empty when one is given."""
    planner_port: int
    metrics_port: int
    worker_threads: int
    worker_drain_s: float
    gateway_drain_s: int
    token: str
    cluster: str
    batch_topics: str = ""
    """That batch jobs may read and write."""
    gpus: tuple[str, ...] = ()
    """Of this machine, for workers."""
    worker_device: str = "auto"
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Stores start first and stop last, so that logs stay quiet; services would take any order."""

    stores: tuple[ChildSpec, ...]
    gateways: tuple[ChildSpec, ...]
    workers: tuple[ChildSpec, ...]
    observers: tuple[ChildSpec, ...]
    """Planner and metrics."""
    kafka: str
    """As services are told it."""
    redis: str


def make_plan(options: SuiteOptions, model: Model, place: Place) -> Plan:
    """Every process with its name, program and settings."""
    kafka = options.kafka or place.kafka
    redis = options.redis or f"unix://{place.folder / 'redis.sock'}"
    shared = {
        "FULCRUM_KAFKA": kafka,
        "FULCRUM_REDIS": redis,
        "FULCRUM_TOKEN": place.token,
        "FULCRUM_CLUSTER": place.cluster,
    }
    return Plan(
        stores=_stores(options, place),
        gateways=_gateways(options, model, place, shared),
        workers=_workers(options, model, place, shared),
        observers=(
            _service("planner", shared, "FULCRUM_PLANNER_PORT", place.planner_port),
            _service("metrics", shared, "FULCRUM_METRICS_PORT", place.metrics_port),
        ),
        kafka=kafka,
        redis=redis,
    )


def _stores(options: SuiteOptions, place: Place) -> tuple[ChildSpec, ...]:
    specs = []
    if options.kafka is None:
        specs.append(ChildSpec("kafka", place.broker, {}))
    if options.redis is None:
        # A socket in a folder of our own: no port to collide on, nobody else's business.
        settings = {"port": "0", "unixsocket": str(place.folder / "redis.sock"), "unixsocketperm": "700"}
        settings |= {"dir": str(place.folder), "save": "", "appendonly": "no", "daemonize": "no"}
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        specs.append(ChildSpec("redis", (place.redis_server, *words), {}, ready_text=_REDIS_READY))
    return tuple(specs)


def _gateways(options: SuiteOptions, model: Model, place: Place, shared: Mapping[str, str]) -> tuple[ChildSpec, ...]:
    """The first has the port that was asked for, the others any."""
    own = {
        **shared,
        "FULCRUM_GATEWAY_DRAIN_S": str(place.gateway_drain_s),
        "FULCRUM_GATEWAY_BATCH_TOPICS": place.batch_topics,
    }
    specs = []
    for number in range(1, options.gateways + 1):
        port = options.gateway_port if number == 1 else 0
        env = {**own, "FULCRUM_GATEWAY_ID": f"gateway-{number}"}
        env["FULCRUM_GATEWAY_MODELS"] = json.dumps({model.name: model.path})
        specs.append(_service("gateway", env, "FULCRUM_GATEWAY_PORT", port, name=f"gateway-{number}"))
    return tuple(specs)


def _service(service: str, env: Mapping[str, str], variable: str, port: int, *, name: str = "") -> ChildSpec:
    command = ("python", "-m", f"services.{service}")
    return ChildSpec(name or service, command, {**env, variable: str(port)}, port_variable=variable)


def _workers(options: SuiteOptions, model: Model, place: Place, shared: Mapping[str, str]) -> tuple[ChildSpec, ...]:
    own = {
        **shared,
        "FULCRUM_WORKER_PORT": "0",
        "FULCRUM_WORKER_THREADS": str(place.worker_threads),
        "FULCRUM_WORKER_DRAIN_S": str(place.worker_drain_s),
        "FULCRUM_WORKER_ENGINE": options.engine,
        "FULCRUM_WORKER_MODEL": model.name,
        "FULCRUM_WORKER_MODEL_PATH": model.path,
    }
    if options.sim_profile is not None:
        own["FULCRUM_WORKER_SIM_PROFILE"] = options.sim_profile
    each = options.workers_per_process
    return tuple(
        _worker(own, role, range(first + 1, min(first + each, len(kind)) + 1), kind[first])
        for role, kind in _kinds(options, place).items()
        for first in range(0, len(kind), each)
    )


def _worker(own: Mapping[str, str], role: str, numbers: Sequence[int], settings: Mapping[str, str]) -> ChildSpec:
    """A process with one worker, or with several that have the same settings."""
    first, *others = (f"{role}-{number}" for number in numbers)
    companions = {"FULCRUM_WORKER_COMPANIONS": json.dumps(others)} if others else {}
    env = {**own, **role_settings(role), **settings, **companions, "FULCRUM_WORKER_ID": first}
    return ChildSpec(first, ("python", "-m", f"services.{service_of(role)}"), env)


def _kinds(options: SuiteOptions, place: Place) -> dict[str, Sequence[Mapping[str, str]]]:
    """By role, the settings of each worker that not all have. Raises StartupError where GPUs do not go round."""
    if options.profile is not None:
        profile = load_profile(options.profile)
        return {role: [worker.settings() for worker in profile.of(role)] for role in ROLES}
    dealt = deal(
        place.gpus,
        options.workers,
        engine=options.engine,
        device=place.worker_device,
        arguments=place.vllm_arguments,
    )
    decode, mixed = options.prefill, options.prefill + options.decode
    return {"prefill": dealt[:decode], "decode": dealt[decode:mixed], "mixed": dealt[mixed:]}
