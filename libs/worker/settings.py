import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from libs.engine.config import DEFAULT_CHUNK_TOKENS, EngineConfig, Parallel, parallel_of
from libs.engine.vllm.arguments import check_arguments
from libs.model.info import BUILTIN_SIM
from libs.runtime.settings import CommonSettings, MemberName, own_name

WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - compared against, never bound

BLOCK_SIZE_TOKENS: Final[Mapping[str, int]] = MappingProxyType({"torch": 16, "sim": 16, "vllm": 32})
# The number of renewals of the registration and the index of KV blocks in the time of one lease.
RENEWALS_PER_LEASE: Final = 3


class WorkerSettings(CommonSettings):
    """Settings of a worker in any first role, read from the environment as FULCRUM_WORKER_<FIELD>."""

    model_config = SettingsConfigDict(env_prefix="FULCRUM_WORKER_")
    tls_role: ClassVar[str] = "worker"

    id: MemberName = Field(default_factory=lambda: own_name("worker"))
    """Name of this worker, stable over restarts and unique in the cluster."""
    companions: tuple[MemberName, ...] = ()
    """Engine sim: names of further workers that this process runs, each as it would alone."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the gRPC server; 0 picks a free one."""
    advertise: str = ""
    """host[:port] at which others reach this worker; empty means the address it listens on."""
    role: Literal["prefill", "decode", "mixed", "standby"] = "standby"
    """The first role; later ones come from the planner."""
    budget_tokens: int = Field(0, ge=0)
    """Role mixed: prompt tokens that one engine step may compute beside decodes."""
    gpus: int = Field(0, ge=0)
    """Weight in cluster figures; 0 counts the GPUs that the engine computes on, and a CPU worker as 1."""
    gpu_uuids: tuple[str, ...] = ()
    """GPUs that the worker computes on, under any names that are unique on its node. Workers that name the same GPU
    share it. Empty: unknown, and not shared.
    """
    gpu_share: float = Field(1.0, gt=0, le=1)
    """The worker's share of its GPU's memory, if workers of a pool share the GPU. Under engine sim, the workers of one
    process take turns on it.
    """

    lease_ms: int = Field(3000, ge=300)
    """Time after its last renewal at which a worker's registration expires."""
    kv_index_lease_ms: int = Field(10_000, ge=300)
    """Time after their last renewal at which a worker's entries in the KV index expire."""
    drain_s: float = Field(20.0, ge=0)
    """Time that running sequences have to finish after SIGTERM."""
    telemetry_ms: int = Field(100, ge=10)
    """Time that one telemetry batch covers. A batch of a worker at rest covers three times as long, but at most 300 ms
    unless this is longer.
    """

    engine: Literal["torch", "sim", "vllm"] = "torch"
    """The engine: torch on CPU or CUDA, a simulation of a GPU's step times, or vLLM."""
    model_path: str = BUILTIN_SIM
    """Folder of a Hugging Face model, or builtin:sim (sim engine only)."""
    model: str = ""
    """Name that requests use; empty means the folder's own."""
    device: str = "auto"
    """Torch device, e.g. cpu or cuda:0; auto takes CUDA if there is any."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and KV on torch and vllm; auto is bfloat16 on a GPU that computes in it, float32 elsewhere."""
    threads: int = Field(0, ge=0)
    """Threads of the engine; 0 leaves the number to the engine."""
    block_size_tokens: int = Field(0, ge=0)
    """The tokens of one KV block; 0 stands for 32 with vllm and for 16 with other engines."""
    kv_memory_mb: int = Field(512, ge=1)
    """Size of the KV pool, allocated at start; vllm takes what it finds on a GPU, see vllm_arguments."""
    max_sequences: int = Field(64, ge=1)
    """Sequences in the running batch, and so the decode credits of this worker."""
    max_waiting: int = Field(1024, ge=1)
    """Bound of the engine's own queue, which credits keep short."""
    prefill_chunk_tokens: int = Field(0, ge=0)
    """Maximum number of prompt tokens in one step; 0 is the smallest number that saturates the device, measured by the
    first worker of its kind that starts in role prefill, and 512 until then.
    """
    kv_lease_ms: int = Field(30_000, ge=1)
    """Time for which KV blocks of a prefilled sequence are held for their receiver."""
    kv_shared_dir: Path | None = Path("/dev/shm")  # noqa: S108 - the host's shared memory
    """Folder in memory that the workers of a host share, to copy KV blocks from one another; empty switches it off."""
    adapters: dict[str, Path] = Field(default_factory=dict)
    """JSON object of LoRA adapters by name -> folder in PEFT's layout; gateways need their names too. Engines torch
    and vllm; engine sim reads no folder.
    """
    image_cache_mb: int = Field(256, ge=0)
    """Bound on the memory for images' embeddings that engine torch keeps for later prompts; 0 keeps one."""
    max_adapters: int = Field(8, ge=1)
    """Adapters whose weights are kept on the device; the least recently used one makes room."""
    vllm_connector: str = "NixlConnector"
    """Engine vllm: its KV connector, by vLLM's name."""
    vllm_connector_config: dict[str, Any] = Field(default_factory=dict)
    """Engine vllm: configuration of its KV connector, as JSON, e.g. {"backends": ["UCX"]}."""
    vllm_arguments: dict[str, Any] = Field(default_factory=dict)
    """Engine vllm: further arguments of its engine as JSON, e.g. {"tensor_parallel_size": 4}."""
    vllm_start_limit_s: float = Field(1800.0, gt=0)
    """Engine vllm: time limit of its start, including weights, compilation and CUDA graphs. After it the processes are
    ended, and the worker exits with a message that shows how far they got.
    """
    pool: bool = False
    """Start without a model; the planner then assigns models in turn. The first role and model are ignored, and the
    worker does both prefill and decode for the model it holds.
    """
    pool_drain_s: float = Field(10.0, ge=0)
    """Pool: time that answers have to finish before the worker switches models; unfinished ones continue on other
    workers.
    """
    host_memory_mb: int = Field(65_536, ge=0)
    """Pool: host memory for sleeping models; with 0, none sleeps."""
    asleep_gpu_memory_mb: int = Field(6144, ge=0)
    """Pool of vllm workers: memory of each GPU that processes of sleeping models may keep there and that serving
    models leave free; with 0, none sleeps.
    """
    sim_profile: str = "llama-8b-h100"
    """Sim engine: the profile whose step times it simulates."""
    sim_speedup: float = Field(1.0, gt=0)
    """Sim engine: how much faster than the profile it runs."""
    sim_kv_memory_mb: int = Field(0, ge=0)
    """Sim engine: KV memory; 0 is the profile's."""
    sim_memory_gb: float = Field(80.0, gt=0)
    """Sim engine: memory of its device, which the weights of a pool's models have to fit."""
    sim_load_gb_per_s: float = Field(4.0, gt=0)
    """Sim engine: speed of a pool's models from their source to the device, as one NVMe drive reads."""
    sim_wake_gb_per_s: float = Field(25.0, gt=0)
    """Sim engine: speed of a pool's models from host memory to the device and back, as over PCIe 4.0 x16."""
    sim_load_overhead_s: float = Field(0.5, ge=0)
    """Sim engine: overhead of each model load, beyond the time for its bytes."""
    sim_link_gbps: float = Field(100.0, gt=0)
    """Sim engine: speed of the link that KV blocks travel, in Gbit/s."""
    sim_faults: str = ""
    """Sim engine: a JSON file of slow GPUs and links by worker, as {"decode-1": {"slow": 2.5, "link_gbps": 0.5}},
    which may change while workers run. Empty: none.
    """

    @field_validator("kv_shared_dir", mode="before")
    @classmethod
    def _empty_is_off(cls, value: object) -> object:
        return value or None

    @model_validator(mode="after")
    def _fits(self) -> "WorkerSettings":
        if self.role == "mixed" and self.budget_tokens < 1:
            raise ValueError("role mixed needs FULCRUM_WORKER_BUDGET_TOKENS of at least 1")
        if self.engine != "sim" and self.model_path == BUILTIN_SIM and not self.pool:
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
        """The GPUs and ranks that the engine spans. Raises ValueError for unsupported vLLM arguments."""
        return parallel_of(self.vllm_arguments, self.node) if self.engine == "vllm" else Parallel()

    def engine_config(self, model_name: str, *, weights_bytes: int = 0) -> EngineConfig:
        """Return the engine's part of these settings. A pool passes the `weights_bytes` of the model that it loads."""
        return EngineConfig(
            model_path=None if self.model_path == BUILTIN_SIM else Path(self.model_path),
            model_name=model_name,
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            gpu_share=self.gpu_share,
            block_size_tokens=self.block_size_tokens or BLOCK_SIZE_TOKENS[self.engine],
            kv_memory_mb=self.kv_memory_mb,
            max_sequences=self.max_sequences,
            max_waiting=self.max_waiting,
            prefill_chunk_tokens=self.prefill_chunk_tokens or DEFAULT_CHUNK_TOKENS,
            kv_lease_ms=self.kv_lease_ms,
            kv_shared_dir=self.kv_shared_dir,
            adapters=self.adapters,
            max_adapters=self.max_adapters,
            image_cache_mb=self.image_cache_mb,
            vllm_connector=self.vllm_connector,
            vllm_connector_config=self.vllm_connector_config,
            vllm_arguments=self.vllm_arguments,
            vllm_start_limit_s=self.vllm_start_limit_s,
            vllm_sleeps=self.pool and bool(self.host_memory_mb and self.asleep_gpu_memory_mb),
            vllm_asleep_mb=self.asleep_gpu_memory_mb,
            sim_profile=self.sim_profile,
            sim_speedup=self.sim_speedup,
            sim_kv_memory_mb=self.sim_kv_memory_mb,
            sim_link_gbps=self.sim_link_gbps,
            sim_faults=Path(self.sim_faults) if self.sim_faults else None,
            sim_weights_bytes=weights_bytes,
            sim_memory_bytes=round(self.sim_memory_gb * 1e9 * self.gpu_share),
            sim_load_gb_per_s=self.sim_load_gb_per_s,
            sim_wake_gb_per_s=self.sim_wake_gb_per_s,
            sim_load_overhead_s=self.sim_load_overhead_s,
        )

    def listen_address(self) -> str:
        return _join(self.host or "0.0.0.0", self.port)  # noqa: S104 - what an empty FULCRUM_HOST asks for

    def advertised_address(self, port: int) -> str:
        """Return the address of a server bound to `port`, for other processes. The host's name replaces a wildcard."""
        if self.advertise:
            has_port = ":" in self.advertise.rpartition("]")[2]
            return self.advertise if has_port else f"{self.advertise}:{port}"
        return _join(socket.gethostname() if self.host in WILDCARD_HOSTS else self.host, port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
