from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

DEFAULT_CHUNK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """A worker's settings for its engine. The defaults suit a laptop; with 0 the engine decides."""

    model_path: Path | None
    """Folder with config.json, safetensors and tokenizer.json; None selects the sim engine's built-in model."""
    model_name: str
    device: str = "auto"
    dtype: str = "auto"
    """Type of weights and KV: float32, bfloat16 or auto. Auto selects bfloat16 on GPUs that compute in it, else
    float32.
    """
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
    """How long the blocks of a prefilled sequence are held for their receiver."""
    kv_shared_dir: Path | None = None
    """In-memory folder in which the KV pool is a file that other workers of the host can copy from. None keeps it
    private.
    """
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """LoRA adapters by name: folders in PEFT's layout."""
    max_adapters: int = 8
    """Upper bound of adapters with weights on the device."""
    vllm_connector: str = "NixlConnector"
    """vLLM's name of the connector that moves KV between vllm engines."""
    vllm_connector_config: Mapping[str, Any] = field(default_factory=dict)
    """Extra configuration of that connector, under the connector's own names."""
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Extra engine arguments of vLLM, under vLLM's names."""
    vllm_start_limit_s: float = 1800.0
    """Upper bound of vLLM's start, from its import to a serving EngineCore."""
    vllm_sleeps: bool = False
    """Whether to start vLLM so that it can sleep, if device and connector allow it."""
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
