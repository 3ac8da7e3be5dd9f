"""A worker's settings for its engine, and the GPUs and nodes that a vLLM engine spans by its arguments. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

DEFAULT_CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A worker's settings for its engine. The defaults suit a laptop; 0 leaves the choice to the engine."""

    model_path: Path | None
    """Folder with config.json, safetensors and tokenizer.json; None selects the sim engine's built-in model."""
    model_name: str
    device: str = "auto"
    dtype: str = "auto"
    """Type of weights and KV: float32, bfloat16 or auto, which is bfloat16 on GPUs that compute in it."""
    gpu_share: float = 1.0
    """Fraction of its GPUs' memory that this engine may use."""
    threads: int = 0
    block_size_tokens: int = 16
    kv_memory_mb: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    """Upper bound of the engine's own queue. Credits keep it far shorter."""
    prefill_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    kv_lease_ms: int = 30_000
    """The time for which the blocks of a prefilled sequence are held for their receiver."""
    kv_shared_dir: Path | None = None
    """In-memory folder for a file with the KV pool, from which other workers of the host can copy; None for private
    memory.
    """
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters by name: folders in PEFT's layout."""
    max_adapters: int = 8
    """Upper bound of adapters with weights on the device."""
    image_cache_mb: int = 256
    """Upper bound of the memory for images' embeddings that are kept for later prompts. The latest is always kept."""
    vllm_connector: str = "NixlConnector"
    """vLLM's name of the connector that moves KV between vllm engines."""
    vllm_connector_config: Mapping[str, Any] = field(default_factory=dict)
    """Extra configuration of that connector, under the connector's own names."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Extra engine arguments of vLLM, under vLLM's names."""
    vllm_start_limit_s: float = 1800.0
    """Upper bound of vLLM's start, from its import to a serving EngineCore."""
    vllm_sleeps: bool = False
    """True to start vLLM so that it can sleep, if device and connector allow it."""
    vllm_asleep_mb: int = 0
    """Memory of each GPU reserved for engines that sleep on it."""
    sim_profile: str = "llama-8b-h100"
    """Name of the sim engine's step-time model."""
    sim_speedup: float = 1.0
    """Speed of the sim engine relative to the modelled device."""
    sim_kv_memory_mb: int = 0
    """Modelled KV memory; 0 selects that of the profile."""
    sim_weights_bytes: int = 0
    """Modelled size of the model's weights; 0 means that loading takes no time."""
    sim_memory_bytes: int = 80_000_000_000
    """Modelled memory of the device. Larger weights fail to load."""
    sim_load_gb_per_s: float = 4.0
    """Modelled speed of loading weights: sequential reads of one NVMe drive."""
    sim_wake_gb_per_s: float = 25.0
    """Modelled speed between host memory and device: PCIe 4.0 x16, pinned."""
    sim_load_overhead_s: float = 0.5
    """Modelled fixed cost of each load, added to the time of the bytes."""
    sim_link_gbps: float = 100.0
    """Modelled bandwidth of the KV link, in gigabits per second."""
    sim_faults: Path | None = None
    """File with the faults of simulated devices, by worker; None for no faults."""


SETTING: Final = "FULCRUM_WORKER_VLLM_ARGUMENTS"
PORT: Final = "data_parallel_rpc_port"
# The default of vLLM.
RENDEZVOUS_PORT: Final = 29_550


@dataclass(frozen=True, slots=True)
class Parallel:
    """The degrees of parallelism of one engine, under vLLM's names.

    A worker is one replica: a tensor and pipeline parallel group with its own scheduler and KV. vLLM has
    data-parallel groups for models with experts. Each of their ranks is a process that registers as a worker under the
    group's name. Their steps are in lockstep, and the planner treats a group as one worker.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """The number of ranks in the engine's data-parallel group."""
    data_rank: int = 0
    nodes: int = 1
    node_rank: int = 0
    group: str = ""
    """Name of the data-parallel group: the unique address at which its ranks meet. Empty without a group."""

    @property
    def gpus(self) -> int:
        """The number of GPUs on all nodes together."""
        return self.tensor * self.pipeline

    @property
    def gpus_here(self) -> int:
        """The number of GPUs on each of its nodes."""
        return self.gpus // self.nodes


def parallel_of(arguments: Mapping[str, Any], node: str = "") -> Parallel:
    """Read the degrees of parallelism from vLLM's engine arguments. `node` is the worker's.

    Raise ValueError for a combination that no worker can have.
    """
    data = _number(arguments, "data_parallel_size", 1)
    found = Parallel(
        tensor=_number(arguments, "tensor_parallel_size", 1),
        pipeline=_number(arguments, "pipeline_parallel_size", 1),
        data=data,
        data_rank=_number(arguments, "data_parallel_rank", 0, least=0),
        nodes=_number(arguments, "nnodes", 1),
        node_rank=_number(arguments, "node_rank", 0, least=0),
        group=_group(arguments, node) if data > 1 else "",
    )
    if found.data > 1:
        _check_data(arguments, found)
    if found.nodes > 1:
        _check_nodes(arguments, found)
    return found


def rendezvous_port(arguments: Mapping[str, Any]) -> int:
    """Return the port at which a data-parallel group's ranks find their first one; they agree on the rest."""
    return _number(arguments, PORT, RENDEZVOUS_PORT)


def _group(arguments: Mapping[str, Any], node: str) -> str:
    # A loopback address is a different place on each node, so the node is part of the name.
    address = str(arguments.get("data_parallel_address", ""))
    meeting = f"{address}:{rendezvous_port(arguments)}"
    return f"{node}/{meeting}" if _is_loopback(address) else meeting


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_data(arguments: Mapping[str, Any], found: Parallel) -> None:
    if "data_parallel_rank" not in arguments or found.data_rank >= found.data:
        raise ValueError(
            f"of data_parallel_size {found.data} a worker is one rank: start a worker for each, with its"
            f" data_parallel_rank, 0 to {found.data - 1}, in {SETTING}"
        )
    if not arguments.get("data_parallel_address"):
        raise ValueError(f"data_parallel_size {found.data} needs data_parallel_address, rank 0's, in {SETTING}")
    if found.nodes > 1:
        raise ValueError(f"data_parallel_size and nnodes do not go together in {SETTING}: a rank has one node")


def _check_nodes(arguments: Mapping[str, Any], found: Parallel) -> None:
    if found.gpus % found.nodes:
        raise ValueError(f"{found.gpus} GPUs do not spread evenly over nnodes {found.nodes}: see {SETTING}")
    if found.node_rank >= found.nodes:
        raise ValueError(f"node_rank {found.node_rank} is none of nnodes {found.nodes}: see {SETTING}")
    if not arguments.get("master_addr"):
        raise ValueError(f"nnodes {found.nodes} needs master_addr, an address of node 0, in {SETTING}")


def _number(arguments: Mapping[str, Any], name: str, default: int, *, least: int = 1) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r} in {SETTING}, not a whole number of at least {least}")
    return value
