"""What a worker's settings say about its engine, without the environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

DEFAULT_CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Defaults suit a laptop; `0` means the engine decides."""

    model_path: Path | None
    """Folder with config.json, safetensors and tokenizer.json; None: the sim engine's built-in model."""
    model_name: str
    device: str = "auto"
    dtype: str = "auto"
    """The type of weights and KV: float32, bfloat16, or auto: bfloat16 on a GPU that computes in it, float32
    elsewhere."""
    gpu_share: float = 1.0
    """Part of its GPUs' memory that this engine has."""
    threads: int = 0
    block_size_tokens: int = 16
    kv_memory_mb: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    """Bound of the engine's own queue; credits keep it far below."""
    prefill_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    kv_lease_ms: int = 30_000
    """How long blocks of a prefilled sequence wait for their receiver."""
    kv_shared_dir: Path | None = None
    """Folder in memory where the KV pool lies as a file, for other workers of the host to copy from; None: private."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters by name: folders in PEFT's layout."""
    max_adapters: int = 8
    """Adapters whose weights are kept on the device."""
    vllm_connector: str = "NixlConnector"
    """What moves KV between vllm engines, by vLLM's name."""
    vllm_connector_config: Mapping[str, Any] = field(default_factory=dict)
    """Further configuration of that connector, by its own names."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments of vLLM's, by its names."""
    vllm_start_limit_s: float = 1800.0
    """How long vLLM's start may take, from its import to a serving EngineCore."""
    vllm_sleeps: bool = False
    """Whether vLLM is to be started so that it can sleep, where device and connector allow."""
    vllm_asleep_mb: int = 0
    """Memory of each GPU that is left to engines that sleep there."""
    sim_profile: str = "llama-8b-h100"
    """Step-time model of the sim engine, by name."""
    sim_speedup: float = 1.0
    """How much faster than the modelled device the sim engine runs."""
    sim_kv_memory_mb: int = 0
    """Modelled KV memory; 0 is the profile's."""
    sim_weights_bytes: int = 0
    """Modelled size of the model's weights; 0: they are there at once."""
    sim_memory_bytes: int = 80_000_000_000
    """Modelled memory of the device: larger weights cannot be loaded."""
    sim_load_gb_per_s: float = 4.0
    """Modelled speed of weights from their source to the device: sequential reads of one NVMe drive."""
    sim_wake_gb_per_s: float = 25.0
    """The same from host memory and back: PCIe 4.0 x16, pinned."""
    sim_load_overhead_s: float = 0.5
    """Beside the bytes, each time that weights come to the device."""
    sim_link_gbps: float = 100.0
    """Modelled KV link, gigabits a second."""
    sim_faults: Path | None = None
    """File of faults that simulated devices have, by worker; None: none has any."""
