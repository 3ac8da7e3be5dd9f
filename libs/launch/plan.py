"""The processes of a suite, and the assignment of this machine's GPUs to its workers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from libs.contracts.errors import StartupError
from libs.counters import open_nvml
from libs.engine.config import parallel_of
from libs.launch.options import SuiteOptions
from libs.launch.processes.port import ChildSpec
from libs.launch.profile import (
    POOL,
    ROLES,
    SPARE,
    DeploymentProfile,
    ProfileWorker,
    load_profile,
    role_settings,
    service_of,
)
from libs.model.fetch import Model

DEVICES_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
SHARE_ARGUMENT: Final = "gpu_memory_utilization"
REDIS_SOCKET: Final = "redis.sock"


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that may be used, by their names in CUDA_VISIBLE_DEVICES; empty without NVIDIA's driver."""
    if (named := environ.get(DEVICES_VARIABLE)) is not None:
        return tuple(name for part in named.split(",") if (name := part.strip()) and name != "-1")
    counters = open_nvml()
    if counters is None:
        return ()
    try:
        return tuple(str(gpu.index) for gpu in counters.gpus)
    finally:
        counters.close()


def deal(
    gpus: Sequence[str], workers: int, *, engine: str, device: str, arguments: Mapping[str, Any]
) -> list[Mapping[str, str]]:
    """Return the settings by which each of `workers` uses only its own GPUs; empty settings without GPUs. Pure.

    Workers share GPUs if there are too few. Workers of vLLM do so only if `gpu_memory_utilization` is among the
    `arguments`. Raise StartupError if the workers do not fit.
    """
    if engine == "sim" or not gpus or device not in ("auto", "cuda"):
        return [{}] * workers
    width = _width(arguments) if engine == "vllm" else 1
    groups = [gpus[start : start + width] for start in range(0, len(gpus) - width + 1, width)]
    if not groups:
        raise StartupError(
            f"a worker computes on {width} GPUs, there are {len(gpus)}: see FULCRUM_WORKER_VLLM_ARGUMENTS"
        )
    if engine == "vllm" and len(groups) < workers and SHARE_ARGUMENT not in arguments:
        raise StartupError(
            f"{workers} workers of {width} need {workers * width} GPUs, there are {len(gpus)}: ask for fewer, e.g."
            f" --prefill 0 --decode 0 --mixed 1, let them share by {SHARE_ARGUMENT} in FULCRUM_WORKER_VLLM_ARGUMENTS,"
            " or set FULCRUM_WORKER_DEVICE=cpu for vLLM's build for CPUs"
        )
    return [{DEVICES_VARIABLE: ",".join(groups[number % len(groups)])} for number in range(workers)]


def _width(arguments: Mapping[str, Any]) -> int:
    try:
        found = parallel_of(arguments)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if found.nodes > 1 or found.data > 1:
        raise StartupError(
            "`fulcrum up` starts workers of one node and one data-parallel rank, all with the same"
            " FULCRUM_WORKER_VLLM_ARGUMENTS: start others by themselves (docs/deploy-vllm.md)"
        )
    return found.gpus


_REDIS_READY = "eady to accept connections"


@dataclass(frozen=True, slots=True)
class SuiteLocation:
    """The folder, stores, ports and GPUs of the machine on which a suite runs."""

    folder: Path
    """The folder of the embedded stores, deleted with the suite."""
    broker: tuple[str, ...]
    """The command of the embedded broker; empty for an external broker."""
    kafka: str
    """The HOST:PORT of the embedded broker; empty for an external broker."""
    redis_server: str
    """The program of the embedded Redis; empty for an external Redis."""
    planner_port: int
    metrics_port: int
    worker_threads: int
    worker_drain_s: float
    gateway_drain_s: int
    token: str
    cluster: str
    spares_url: str = ""
    """The launcher's URL, to which the planner sends requests for spare workers."""
    batch_topics: str = ""
    """The topics that batch jobs may read and write."""
    keys: str = ""
    """The location of the hashes of API keys."""
    gpus: tuple[str, ...] = ()
    """The GPUs of this machine that workers may use."""
    worker_device: str = "auto"
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    names_by_role: bool = False
    """True to name workers by their first role, such as prefill-1. Otherwise they are gpu-0, gpu-1, ..., which suit any
    role.
    """


@dataclass(frozen=True, slots=True)
class PoolModel:
    """One of the models that share a pool."""

    name: str
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """The processes of a suite by kind. Stores start first and stop last to avoid log messages; any order works."""

    stores: tuple[ChildSpec, ...]
    gateways: tuple[ChildSpec, ...]
    workers: tuple[ChildSpec, ...]
    spares: tuple[ChildSpec, ...]
    """The workers that start when the planner requests them."""
    observers: tuple[ChildSpec, ...]
    kafka: str
    """The broker's address in the services' settings."""
    redis: str
    model: str = ""


def make_plan(options: SuiteOptions, model: Model, place: SuiteLocation, models: Sequence[PoolModel] = ()) -> SuitePlan:
    """Return every process with its name, program and settings. `models` are the pool's, if there is one."""
    kafka = options.kafka or place.kafka
    redis = options.redis or f"unix://{place.folder / REDIS_SOCKET}"
    shared = {
        "FULCRUM_KAFKA": kafka,
        "FULCRUM_REDIS": redis,
        "FULCRUM_TOKEN": place.token,
        "FULCRUM_CLUSTER": place.cluster,
    }
    if options.kafka is None:
        shared["FULCRUM_KAFKA_PROTOCOL"] = "PLAINTEXT"  # the environment's setting belongs to an external broker
    keys = {"FULCRUM_KEYS": place.keys}
    own, kinds = _worker_settings(options, model, place, shared), _kinds(options, place)
    names = _names(kinds, by_role=place.names_by_role)
    wishes = {"FULCRUM_PLANNER_ACTUATOR": "process", "FULCRUM_PLANNER_ACTUATOR_URL": place.spares_url}
    for_planner = shared | _catalogue(models) | (wishes if options.spare else {})
    return SuitePlan(
        stores=_stores(options, place),
        gateways=_gateways(options, model, place, shared | keys),
        workers=_workers(options, own, kinds, names),
        spares=tuple(_worker(own, SPARE, [name], each) for name, each in zip(names[SPARE], kinds[SPARE], strict=True)),
        observers=(
            _service("planner", for_planner | keys, "FULCRUM_PLANNER_PORT", place.planner_port),
            _service("metrics", shared | keys | _metrics(options, place), "FULCRUM_METRICS_PORT", place.metrics_port),
        ),
        kafka=kafka,
        redis=redis,
        model=model.name,
    )


def _metrics(options: SuiteOptions, place: SuiteLocation) -> dict[str, str]:
    """Return the metrics service's own settings.

    Its page contains the planner's address, unless the planner picks its port.
    """
    planner = f"http://127.0.0.1:{place.planner_port}" if place.planner_port else ""
    history = str(options.history) if options.history else ""
    own = {"FULCRUM_METRICS_PLANNER_URL": planner, "FULCRUM_METRICS_HISTORY_FILE": history}
    return {name: value for name, value in own.items() if value}


def _stores(options: SuiteOptions, place: SuiteLocation) -> tuple[ChildSpec, ...]:
    specs = []
    if options.kafka is None:
        specs.append(ChildSpec("kafka", place.broker, {}))
    if options.redis is None:
        # The socket is in the launcher's own folder, so no port can collide and no other user has access.
        settings = {"port": "0", "unixsocket": str(place.folder / REDIS_SOCKET), "unixsocketperm": "700"}
        settings |= {"dir": str(place.folder), "save": "", "appendonly": "no", "daemonize": "no"}
        words = [word for key, value in settings.items() for word in (f"--{key}", value)]
        specs.append(ChildSpec("redis", (place.redis_server, *words), {}, ready_text=_REDIS_READY))
    return tuple(specs)


def _gateways(
    options: SuiteOptions, model: Model, place: SuiteLocation, shared: Mapping[str, str]
) -> tuple[ChildSpec, ...]:
    """Return the gateways. The first has the requested port, the others any."""
    own = {
        **shared,
        "FULCRUM_GATEWAY_DRAIN_S": str(place.gateway_drain_s),
        "FULCRUM_GATEWAY_BATCH_TOPICS": place.batch_topics,
    }
    if options.chat_template is not None:
        own["FULCRUM_GATEWAY_CHAT_TEMPLATES"] = json.dumps({"*": str(options.chat_template)})
    if options.tool_format is not None:
        own["FULCRUM_GATEWAY_TOOL_FORMATS"] = json.dumps({"*": options.tool_format})
    specs = []
    for number in range(1, options.gateways + 1):
        port = options.gateway_port if number == 1 else 0
        env = {**own, "FULCRUM_GATEWAY_ID": f"gateway-{number}"}
        env["FULCRUM_GATEWAY_MODELS"] = json.dumps({} if options.pool else {model.name: model.path})
        if options.pool:
            env["FULCRUM_GATEWAY_MODEL_CATALOGUE"] = "1"
        specs.append(_service("gateway", env, "FULCRUM_GATEWAY_PORT", port, name=f"gateway-{number}"))
    return tuple(specs)


def _catalogue(models: Sequence[PoolModel]) -> dict[str, str]:
    """Return the planner's settings for a pool's models."""
    if not models:
        return {}
    entries = [{"name": each.name, "source": each.path, "size_bytes": each.size_bytes} for each in models]
    return {"FULCRUM_PLANNER_MODEL_CATALOGUE": "1", "FULCRUM_PLANNER_MODELS": json.dumps(entries)}


def _service(service: str, env: Mapping[str, str], variable: str, port: int, *, name: str = "") -> ChildSpec:
    command = ("python", "-m", f"services.{service}")
    return ChildSpec(name or service, command, {**env, variable: str(port)}, port_variable=variable)


def _worker_settings(
    options: SuiteOptions, model: Model, place: SuiteLocation, shared: Mapping[str, str]
) -> Mapping[str, str]:
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
    if options.engine_args:
        own["FULCRUM_WORKER_VLLM_ARGUMENTS"] = json.dumps(place.vllm_arguments)
    return own


def _names(kinds: Mapping[str, Sequence[Mapping[str, str]]], *, by_role: bool) -> dict[str, list[str]]:
    """Return the workers' names by role. Spare workers come last."""
    numbers = count()
    return {
        role: [f"{role}-{number}" for number in range(1, len(kind) + 1)]
        if by_role or role == POOL
        else [f"gpu-{next(numbers)}" for _ in kind]
        for role, kind in sorted(kinds.items(), key=lambda each: each[0] == SPARE)
    }


def _workers(
    options: SuiteOptions,
    own: Mapping[str, str],
    kinds: Mapping[str, Sequence[Mapping[str, str]]],
    names: Mapping[str, Sequence[str]],
) -> tuple[ChildSpec, ...]:
    # Workers that take turns on one simulated GPU share a process.
    each = options.workers_per_gpu if options.workers_per_gpu > 1 and options.engine == "sim" else 1
    each = max(each, options.workers_per_process)
    return tuple(
        _worker(own, role, names[role][first : first + each], kind[first])
        for role, kind in kinds.items()
        if role != SPARE
        for first in range(0, len(kind), each)
    )


def _worker(own: Mapping[str, str], role: str, names: Sequence[str], settings: Mapping[str, str]) -> ChildSpec:
    """Return a process with one worker, or with several that have the same settings."""
    first, *others = names
    companions = {"FULCRUM_WORKER_COMPANIONS": json.dumps(others)} if others else {}
    env = {**own, **role_settings(role), **settings, **companions, "FULCRUM_WORKER_ID": first}
    return ChildSpec(first, ("python", "-m", f"services.{service_of(role)}"), env)


def _profiled(profile: DeploymentProfile, worker: ProfileWorker, options: SuiteOptions) -> Mapping[str, str]:
    """Return the settings of a deployment profile's worker, or of a simulated worker in its place."""
    if options.engine == "sim":
        return worker.rehearsed(profile.rehearsal)
    return worker.settings(options.engine_arguments)


def _kinds(options: SuiteOptions, place: SuiteLocation) -> dict[str, Sequence[Mapping[str, str]]]:
    """Return, by role, the settings in which workers differ. Raise StartupError if there are too few GPUs."""
    if options.profile is not None:
        profile = load_profile(options.profile)
        return {
            SPARE: [],
            **{role: [_profiled(profile, worker, options) for worker in profile.of(role)] for role in ROLES},
        }
    dealt = deal(
        place.gpus,
        options.workers + options.spare,
        engine=options.engine,
        device=place.worker_device,
        arguments=place.vllm_arguments,
    )
    if options.pool:
        pool = _sharing(dealt, options) if options.workers_per_gpu > 1 else dealt[: options.pool]
        return {POOL: pool, SPARE: dealt[options.pool :]}
    decode, mixed = options.prefill, options.prefill + options.decode
    spare = options.workers
    return {
        "prefill": dealt[:decode],
        "decode": dealt[decode:mixed],
        "mixed": dealt[mixed:spare],
        SPARE: dealt[spare:],
    }


def _sharing(dealt: Sequence[Mapping[str, str]], options: SuiteOptions) -> Sequence[Mapping[str, str]]:
    """Return the settings of a pool's workers that share GPUs."""
    each = options.workers_per_gpu
    share = {"FULCRUM_WORKER_GPU_SHARE": f"{1 / each:.6f}"}
    found = []
    for number in range(options.pool):
        own = dealt[number // each]
        name = own.get(DEVICES_VARIABLE, f"{options.engine}-{number // each}")
        found.append({**own, **share, "FULCRUM_WORKER_GPU_UUIDS": json.dumps([name])})
    return found
