"""The options of `fulcrum up` and its environment, which the services inherit."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from libs.contracts.errors import StartupError
from libs.engine.vllm.arguments import parse_arguments
from libs.launch.profile import load_profile
from libs.model.tokenizer import read_template
from libs.perfmodel.profiles import profile
from libs.runtime.net.access import is_loopback
from libs.runtime.settings import CommonSettings

EngineName = Literal["torch", "sim", "vllm"]


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """The options of `fulcrum up` that concern the suite."""

    engine: EngineName = "torch"
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    spare: int = 0
    """The number of workers on standby, which the planner may start."""
    pool: int = 0
    """The number of workers that load models on demand, instead of the workers above; 0 for none."""
    workers_per_gpu: int = 1
    """The number of a pool's workers that share a GPU. Each has an equal part of its memory, and its own model."""
    models: tuple[str, ...] = ()
    """The models of the pool, as `--model` names them."""
    workers_per_process: int = 1
    """The number of workers of one role that share a process, with the engine sim."""
    gateways: int = 1
    # 0 picks a free port.
    gateway_port: int = 8000
    kafka: str | None = None
    """The bootstrap servers as HOST:PORT[,HOST:PORT...]; None starts the embedded broker."""
    redis: str | None = None
    """The URL of a Redis; None starts the embedded one."""
    sim_profile: str | None = None
    """The step-time profile of the sim engine's workers; None leaves the choice to their settings."""
    profile: str | None = None
    """The deployment profile (libs/launch/profile.py) that defines the workers; None if their numbers do."""
    engine_args: tuple[str, ...] = ()
    """The arguments of vLLM's engine, as KEY=VALUE. They override those of settings and profiles."""
    chat_template: Path | None = None
    """The file of a chat template that replaces every model's own; None leaves the choice to the gateways' settings."""
    tool_format: str | None = None
    """The format in which every model calls tools; None leaves the choice to the gateways' settings."""
    restart: bool = True
    history: Path | None = None
    """The folder in which occupancy and demand outlive restarts of the metrics service; None keeps them in memory."""
    json_ready: Path | None = None

    @property
    def workers(self) -> int:
        """The number of workers of all roles, without spare ones."""
        if self.profile is not None:
            return len(load_profile(self.profile).workers)
        if self.pool:
            return self.pool
        return self.prefill + self.decode + self.mixed

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's engine. Raises StartupError for a malformed or reserved one."""
        try:
            return parse_arguments(self.engine_args)
        except ValueError as error:
            raise StartupError(str(error)) from None

    def _check_shared(self) -> None:
        if self.workers_per_gpu > 1 and not self.pool:
            raise StartupError("--workers-per-gpu is for --pool: other workers have GPUs of their own")
        if self.workers_per_gpu > 1 and self.engine == "vllm":
            raise StartupError("--workers-per-gpu is for --engine sim and torch: vLLM's EngineCore has a GPU to itself")
        if self.workers_per_gpu > 1 and self.workers_per_process > 1:
            raise StartupError("--workers-per-gpu puts the workers of a GPU into one process: no --workers-per-process")

    def check(self) -> None:
        """Raise StartupError if no suite can have these options."""
        if self.engine_arguments and self.engine != "vllm":
            raise StartupError("--engine-arg is for --engine vllm")
        self._check_shared()
        if self.chat_template is not None:
            read_template(str(self.chat_template))
        if self.workers_per_process > 1 and self.engine != "sim":
            raise StartupError("--workers-per-process is for --engine sim: other engines have one worker per process")
        if self.sim_profile is not None:
            if self.engine != "sim":
                raise StartupError("--sim-profile is for --engine sim")
            profile(self.sim_profile)
        if self.profile is not None:
            self._check_profile(self.profile)
            return
        if self.pool:
            return
        if self.prefill + self.mixed < 1:
            raise StartupError("nothing would compute prompts: use at least --prefill 1 or --mixed 1")
        if self.decode + self.mixed < 1:
            raise StartupError("nothing would generate tokens: use at least --decode 1 or --mixed 1")

    def _check_profile(self, name: str) -> None:
        if self.spare:
            raise StartupError("--spare is for suites without --profile, which says which worker has which GPUs")
        if self.engine not in {"vllm", "sim"}:
            raise StartupError("--profile is for --engine vllm, and for --engine sim, which rehearses it")
        if self.sim_profile is not None:
            raise StartupError("--profile says how long steps take: leave --sim-profile out")
        nodes = load_profile(name).nodes
        if nodes > 1 and self.engine == "vllm":
            raise StartupError(
                f"profile {name} takes {nodes} machines: start its workers on each, with the settings that"
                f" `fulcrum profile {name}` prints (docs/deploy-vllm.md)"
            )


LOOPBACK_BATCH_TOPICS = "batch.*"


class LaunchSettings(CommonSettings):
    worker_threads: int = Field(0, ge=0, validation_alias="FULCRUM_WORKER_THREADS")
    """Threads of each worker's engine; 0 divides the machine's cores."""
    worker_drain_s: float = Field(1.5, ge=0, validation_alias="FULCRUM_WORKER_DRAIN_S")
    """The time for which sequences may continue when the suite stops."""
    gateway_drain_s: int = Field(2, ge=0, validation_alias="FULCRUM_GATEWAY_DRAIN_S")
    """The same for gateways, which stop first."""

    worker_device: str = Field("auto", validation_alias="FULCRUM_WORKER_DEVICE")
    """Device of the workers. GPUs are distributed among them unless it names one, or none."""
    vllm_arguments: dict[str, Any] = Field(default_factory=dict, validation_alias="FULCRUM_WORKER_VLLM_ARGUMENTS")
    """Arguments of vLLM's engine, which determine the number of GPUs per worker."""

    worker_names: Literal["gpu", "role"] = Field("gpu", validation_alias="FULCRUM_WORKER_NAMES")
    """gpu-0, gpu-1, ..., which remain valid after a change of role; or names by the first role: prefill-1, decode-1."""

    batch_topics: str | None = Field(None, validation_alias="FULCRUM_GATEWAY_BATCH_TOPICS")
    """Topics that batch jobs may read and write; by default LOOPBACK_BATCH_TOPICS on loopback and none beyond."""

    keys: str = Field("", validation_alias="FULCRUM_KEYS")
    """Store of the hashes of API keys: `redis`, or the path of a file; empty means a file in the cache folder, by
    cluster."""

    def batch_topics_allowed(self) -> str:
        """Return the topics that batch jobs may use, in the form of the gateways' setting."""
        if self.batch_topics is not None:
            return self.batch_topics
        return LOOPBACK_BATCH_TOPICS if is_loopback(f"{self.host}:0") else ""

    def threads_of(self, workers: int) -> int:
        """Return the number of threads of each worker: its share of the cores, unless the setting gives one."""
        return self.worker_threads or max(1, len(os.sched_getaffinity(0)) // workers)

    def cluster_of(self, gateway_port: int, *, own_stores: bool) -> str:
        """Return the name in topics and keys. Suites that share a broker have the same name only if it is set."""
        return self.cluster if own_stores or "cluster" in self.model_fields_set else f"{self.cluster}-{gateway_port}"
