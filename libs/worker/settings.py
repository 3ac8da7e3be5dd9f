"""Settings of a worker, whichever role it starts in: the same variables for every worker service."""

import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from libs.engine.config import DEFAULT_CHUNK_TOKENS, EngineConfig
from libs.engine.parallel import Parallel, parallel_of
from libs.engine.vllm.arguments import check_arguments
from libs.model.builtin import BUILTIN_SIM
from libs.runtime.settings import CommonSettings, MemberName, own_name

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared against, never bound

BLOCK_SIZE_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"torch": 16, "sim": 16, "vllm": 32})


class WorkerSettings(CommonSettings):
    """What a worker reads from the environment as FULCRUM_WORKER_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_WORKER_")

    id: MemberName = Field(default_factory=lambda: own_name("worker"))
    """Stable over restarts; unique in the cluster."""
    companions: tuple[MemberName, ...] = ()
    """Engine sim: names of further workers that this process runs, each as it would alone."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the gRPC server; 0 picks one."""
    advertise: str = ""
    """host[:port] that others reach this worker by; empty means what it listens on."""
    role: Literal["prefill", "decode", "mixed", "standby"] = "standby"
    """The first role; later ones come from the planner."""
    budget_tokens: int = Field(0, ge=0)
    """Role mixed: prompt tokens that one engine step may compute beside decodes."""
    gpus: int = Field(0, ge=0)
    """Weight in cluster figures; 0: as many as the engine computes on, a CPU worker counts 1."""

    lease_ms: int = Field(3000, ge=300)
    """A worker that has not renewed its registration for so long is gone."""
    kv_index_lease_ms: int = Field(10_000, ge=300)
    """The same for its entries in the KV index."""
    drain_s: float = Field(20.0, ge=0)
    """How long running sequences may go on after SIGTERM."""
    telemetry_ms: int = Field(100, ge=10)
    """Time that one telemetry batch covers; of a worker at rest three times it, at most 300 ms where that is longer."""

    engine: Literal["torch", "sim", "vllm"] = "torch"
    """What computes: torch on CPU or CUDA, a simulation of a GPU's step times, or vLLM."""
    model_path: str = BUILTIN_SIM
    """Folder of a Hugging Face model, or builtin:sim (sim engine only)."""
    model: str = ""
    """Name that requests use; empty means the folder's own."""
    device: str = "auto"
    """Torch device, e.g. cpu or cuda:0; auto takes CUDA where there is any."""
    threads: int = Field(0, ge=0)
    """Threads of the engine; 0 lets it decide."""
    block_size_tokens: int = Field(0, ge=0)
    """Tokens of one KV block; 0: 32 for vllm, else 16."""
    kv_memory_mb: int = Field(512, ge=1)
    """Size of the KV pool, allocated at start; vllm takes what it finds on a GPU, see vllm_arguments."""
    max_sequences: int = Field(64, ge=1)
    """Sequences in the running batch: the decode credits of this worker."""
    max_waiting: int = Field(1024, ge=1)
    """Bound of the engine's own queue, which credits keep short."""
    prefill_chunk_tokens: int = Field(0, ge=0)
    """Prompt tokens that one step computes at most; 0: the smallest number that saturates the device, measured by the
    first worker of its kind that starts in role prefill, 512 until then."""
    kv_lease_ms: int = Field(30_000, ge=1)
    """How long KV blocks of a prefilled sequence wait for their receiver."""
    kv_shared_dir: Path | None = Path("/dev/shm")  # noqa: S108 - the host's shared memory
    """Folder in memory that the workers of a host share, to copy KV blocks from one another; empty switches it off."""
    vllm_connector: str = "NixlConnector"
    """Engine vllm: its KV connector, by vLLM's name."""
    vllm_connector_config: dict[str, Any] = Field(default_factory=dict)
    """Engine vllm: what its KV connector is told, as JSON, e.g. {"backends": ["UCX"]}."""
    vllm_arguments: dict[str, Any] = Field(default_factory=dict)
    """Engine vllm: further arguments of its engine as JSON, e.g. {"tensor_parallel_size": 4}."""
    sim_profile: str = "llama-8b-h100"
    """Sim engine: whose step times."""
    sim_speedup: float = Field(1.0, gt=0)
    """Sim engine: how much faster than that."""
    sim_kv_memory_mb: int = Field(0, ge=0)
    """KV memory of the sim engine; 0 is the profile's."""
    sim_link_gbps: float = Field(100.0, gt=0)
    """Sim engine: speed of the link that KV blocks travel, in Gbit/s."""

    @field_validator("kv_shared_dir", mode="before")
    @classmethod
    def _empty_is_off(cls, value: object) -> object:
        return value or None

    @model_validator(mode="after")
    def _fits(self) -> "WorkerSettings":
        if self.role == "mixed" and self.budget_tokens < 1:
            raise ValueError("role mixed needs FULCRUM_WORKER_BUDGET_TOKENS of at least 1")
        if self.engine != "sim" and self.model_path == BUILTIN_SIM:
            raise ValueError(f"engine {self.engine} needs a model folder in FULCRUM_WORKER_MODEL_PATH")
        if self.companions and (self.engine != "sim" or self.port):
            raise ValueError("FULCRUM_WORKER_COMPANIONS is for engine sim, and port 0: each takes its own")
        if self.engine == "vllm":
            check_arguments(self.vllm_arguments)
        width = self.parallel.gpus
        if self.engine == "vllm" and self.gpus not in (0, width):
            raise ValueError(
                f"FULCRUM_WORKER_GPUS is {self.gpus}, by FULCRUM_WORKER_VLLM_ARGUMENTS the engine computes on {width}:"
                " leave the first out"
            )
        self.gpus = self.gpus or width
        return self

    @property
    def parallel(self) -> Parallel:
        """What the engine spans. Raises ValueError for arguments of vLLM's that no worker can have."""
        return parallel_of(self.vllm_arguments) if self.engine == "vllm" else Parallel()

    def engine_config(self, model_name: str) -> EngineConfig:
        """The engine's share of these settings."""
        return EngineConfig(
            model_path=None if self.model_path == BUILTIN_SIM else Path(self.model_path),
            model_name=model_name,
            device=self.device,
            threads=self.threads,
            block_size_tokens=self.block_size_tokens or BLOCK_SIZE_TOKENS[self.engine],
            kv_memory_mb=self.kv_memory_mb,
            max_sequences=self.max_sequences,
            max_waiting=self.max_waiting,
            prefill_chunk_tokens=self.prefill_chunk_tokens or DEFAULT_CHUNK_TOKENS,
            kv_lease_ms=self.kv_lease_ms,
            kv_shared_dir=self.kv_shared_dir,
            vllm_connector=self.vllm_connector,
            vllm_connector_config=self.vllm_connector_config,
            vllm_arguments=self.vllm_arguments,
            sim_profile=self.sim_profile,
            sim_speedup=self.sim_speedup,
            sim_kv_memory_mb=self.sim_kv_memory_mb,
            sim_link_gbps=self.sim_link_gbps,
        )

    def listen_address(self) -> str:
        """Where the gRPC server binds."""
        return _join(self.host or "0.0.0.0", self.port)  # noqa: S104 - what an empty FULCRUM_HOST asks for

    def advertised_address(self, port: int) -> str:
        """How others reach a server bound to `port`; on a wildcard address by the host's name."""
        if self.advertise:
            has_port = ":" in self.advertise.rpartition("]")[2]
            return self.advertise if has_port else f"{self.advertise}:{port}"
        return _join(socket.gethostname() if self.host in WILDCARD_HOSTS else self.host, port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
