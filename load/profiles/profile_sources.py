"""What the shipped profiles need to know of models and GPUs beside step times: published shapes and memory."""

from dataclasses import dataclass
from typing import Final

AIC_VERSION: Final = "0.12.0"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's published shape, in bfloat16."""

    name: str
    parameters_billion: float
    layers: int
    kv_heads: int
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    @property
    def weight_bytes(self) -> float:
        """Of all parameters."""
        return self.parameters_billion * 2e9


MODELS: Final = {
    "baichuan2_13b_chat": ModelFacts("baichuan2-13b", 13.9, 40, 40),
    "baichuan_7b": ModelFacts("baichuan-7b", 7.0, 32, 32),
    "internlm2_5_7b_chat": ModelFacts("internlm2.5-7b", 7.74, 32, 8),
    "llama2_13b_chat": ModelFacts("llama2-13b", 13.0, 40, 40),
    "llama2_7b": ModelFacts("llama2-7b", 6.74, 32, 32),
    "llava1_5_13b": ModelFacts("llava1.5-13b", 13.35, 40, 40),
    "qwen1_5_14b_chat": ModelFacts("qwen1.5-14b", 14.17, 40, 40),
    "qwen1_5_moe_a2_7b_chat": ModelFacts("qwen1.5-moe-a2.7b", 14.3, 24, 16),
    "qwen2_5_7b": ModelFacts("qwen2.5-7b", 7.62, 28, 4),
    "qwen_14b_chat": ModelFacts("qwen-14b-chat", 14.17, 40, 40),
    "qwen_7b": ModelFacts("qwen-7b", 7.72, 32, 32),
    "qwen_7b_chat": ModelFacts("qwen-7b-chat", 7.72, 32, 32),
    "yi1_5_6b_chat": ModelFacts("yi1.5-6b", 6.06, 32, 4),
    "yi1_5_9b_chat": ModelFacts("yi1.5-9b", 8.83, 48, 4),
    "meta-llama/Meta-Llama-3.1-8B": ModelFacts("llama3.1-8b", 8.03, 32, 8),
    "meta-llama/Meta-Llama-3.1-70B": ModelFacts("llama3.1-70b", 70.6, 80, 8),
    "Qwen/Qwen3-8B": ModelFacts("qwen3-8b", 8.19, 36, 8),
    "Qwen/Qwen3-32B": ModelFacts("qwen3-32b", 32.8, 64, 8),
}

GPU_MEMORY_GB: Final = {
    "A10": 24,
    "A100": 80,
    "H20": 96,
    "H100": 80,
    "H800": 80,
    "H200": 141,
    "B200": 180,
    "B300": 268,
    "GB200": 186,
    "L40S": 48,
    "RTX-PRO-6000": 96,
}

_SYSTEMS: Final = {
    "a100_sxm": "A100",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000",
}
AIC_PAIRS: Final = tuple(
    (model, system, device) for model in MODELS if "/" in model for system, device in _SYSTEMS.items()
)
"""(model, aiconfigurator's name of the system, device)."""


def gpu_count(facts: ModelFacts, device: str) -> int:
    """The smallest power of two that leaves at least 45 % of the memory to KV."""
    gpus = 1
    while facts.weight_bytes > 0.55 * GPU_MEMORY_GB[device] * 1e9 * gpus:
        gpus *= 2
    return gpus
