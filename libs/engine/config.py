"""A worker's settings for its engine, and the parallelism that vLLM's engine arguments ask for. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

DEFAULT_CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A worker's settings for its engine. The defaults suit a laptop. A 0 lets the engine choose."""

    model_path: Path | None
    """The folder with config.json, safetensors and tokenizer.json; None selects the sim engine's built-in model."""
    model_name: str
    device: str = "auto"
    dtype: str = "auto"
    """The type of weights and KV: float32, bfloat16 or auto. With auto, GPUs that support bfloat16 use it."""
    gpu_share: float = 1.0
    """The fraction of the GPUs' memory that this engine may use."""
    threads: int = 0
    block_size_tokens: int = 16
    kv_memory_mb: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    """The upper bound of the engine's own queue. Credits limit the queue to far fewer sequences."""
    prefill_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    kv_lease_ms: int = 30_000
    """The time for which a prefill worker holds a sequence's blocks for the receiver."""
    kv_shared_dir: Path | None = None
    """The in-memory folder for the file of the KV pool, which other workers of the host can map. None selects private
    memory.
    """
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """The folders of LoRA adapters in PEFT's layout, by adapter name."""
    max_adapters: int = 8
    """The upper bound of adapters with weights on the device."""
    image_cache_mb: int = 256
    """The upper bound of memory for cached image embeddings. The latest embedding is cached whatever its size."""
    vllm_connector: str = "NixlConnector"
    """vLLM's name of the connector that moves KV between vllm engines."""
    vllm_connector_config: Mapping[str, Any] = field(default_factory=dict)
    """Extra configuration of the connector, under the connector's own names."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Extra engine arguments of vLLM, under vLLM's names."""
    vllm_start_limit_s: float = 1800.0
    """The upper bound of vLLM's start, from its import to a serving EngineCore."""
    vllm_sleeps: bool = False
    """True to start vLLM so that it can sleep, if device and connector allow it."""
    vllm_asleep_mb: int = 0
    """The memory of each GPU reserved for engines that sleep on it."""
    sim_profile: str = "llama-8b-h100"
    """The name of the sim engine's step-time model."""
    sim_speedup: float = 1.0
    """The speed of the sim engine relative to the modelled device."""
    sim_kv_memory_mb: int = 0
    """The modelled KV memory; 0 selects that of the profile."""
    sim_weights_bytes: int = 0
    """The modelled size of the model's weights. With 0, loading takes no time."""
    sim_memory_bytes: int = 80_000_000_000
    """The modelled memory of the device. Larger weights fail to load."""
    sim_load_gb_per_s: float = 4.0
    """The modelled speed of loading weights. The default is that of sequential reads from one NVMe drive."""
    sim_wake_gb_per_s: float = 25.0
    """The modelled speed of copies from host memory to the device. The default is that of PCIe 4.0 x16 with pinned
    memory.
    """
    sim_load_overhead_s: float = 0.5
    """The modelled fixed cost of each load, added to the time that the weights take."""
    sim_link_gbps: float = 100.0
    """The modelled bandwidth of the KV link, in gigabits per second."""
    sim_faults: Path | None = None
    """The file with the faults of simulated devices, by worker; None for no faults."""


SETTING: Final = "FULCRUM_WORKER_VLLM_ARGUMENTS"
PORT: Final = "data_parallel_rpc_port"
# vLLM's default.
RENDEZVOUS_PORT: Final = 29_550


@dataclass(frozen=True, slots=True)
class Parallel:
    """The degrees of parallelism of one engine, under vLLM's names.

    A worker is one replica: a tensor and pipeline parallel group with its own scheduler and KV. vLLM runs a
    mixture-of-experts model as a data-parallel group of replicas that step together. Each rank of the group is a
    process that registers as a worker under the group's name. The planner treats a group as one worker.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """The number of ranks in the engine's data-parallel group."""
    data_rank: int = 0
    nodes: int = 1
    node_rank: int = 0
    group: str = ""
    """The name of the data-parallel group, which is the unique address at which its ranks meet. Empty without a group.
    """

    @property
    def gpus(self) -> int:
        """The number of GPUs on all nodes together."""
        return self.tensor * self.pipeline

    @property
    def gpus_here(self) -> int:
        """The number of GPUs on each node."""
        return self.gpus // self.nodes


def parallel_of(arguments: Mapping[str, Any], node: str = "") -> Parallel:
    """Read the degrees of parallelism from vLLM's engine arguments. `node` is the name of the worker's node.

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
    """Return the port at which the ranks of a data-parallel group reach rank 0, which assigns the other ports."""
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
