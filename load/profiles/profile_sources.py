"""What the shipped profiles need to know of models and GPUs beside step times: published shapes and memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

AIC_VERSION: Final = "0.12.0"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's published shape, in bfloat16 where nothing else is said."""

    name: str
    parameters_billion: float
    layers: int
    """That keep the KV of the whole context."""
    kv_heads: int
    head_dim: int = 128
    weight_bytes_per_parameter: float = 2.0
    kv_item_bytes: int = 2
    latent_items: int = 0
    """Numbers that one layer keeps of a token in place of keys and values (MLA); 0: it keeps those."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return self.layers * (self.latent_items or 2 * self.kv_heads * self.head_dim) * self.kv_item_bytes

    @property
    def weight_bytes(self) -> float:
        """Of all parameters."""
        return self.parameters_billion * 1e9 * self.weight_bytes_per_parameter


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


@dataclass(frozen=True, slots=True)
class Setup:
    """A model in the types and at the width in which people serve it, as aiconfigurator is asked for it."""

    model: str
    facts: ModelFacts
    system: str
    gpus: int
    options: Mapping[str, str | int]
    types: str
    least_tokens: int = 16
    """Prompt tokens of a step from which on it counts for the fit: fewer read but some of a model's experts, and a
    line through both would miss the large steps that prefill runs."""

    @property
    def device(self) -> str:
        """Of `GPU_MEMORY_GB`."""
        return _SYSTEMS[self.system]


# A half of gpt-oss's 36 layers keeps 128 tokens alone, which is left out. MXFP4 is 4.25 bits an expert's weight.
_GPT_OSS: Final = ModelFacts("gpt-oss-120b", 116.8, 18, 8, head_dim=64, weight_bytes_per_parameter=0.55)
_LLAMA_70B: Final = "meta-llama/Meta-Llama-3.1-70B"
"""Llama 3.3 has its shape."""
_LLAMA_FP8: Final = ModelFacts("llama3.3-70b-fp8", 70.6, 80, 8, weight_bytes_per_parameter=1.03, kv_item_bytes=1)
_LLAMA_NVFP4: Final = ModelFacts("llama3.3-70b-nvfp4", 70.6, 80, 8, weight_bytes_per_parameter=0.6, kv_item_bytes=1)
_LLAMA_BF16: Final = ModelFacts("llama3.3-70b", 70.6, 80, 8)
# 512 numbers of the latent and 64 of the rotated key; weights in FP8 blocks.
_DEEPSEEK: Final = ModelFacts("deepseek-v3", 671.0, 61, 1, weight_bytes_per_parameter=1.02, latent_items=576)
_FP8: Final = MappingProxyType({"gemm_quant_mode": "fp8", "kvcache_quant_mode": "fp8"})
_NVFP4: Final = MappingProxyType({"gemm_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"})


_MANY: Final = 512


def _experts(width: int) -> Mapping[str, int]:
    return {"moe_tp_size": width, "moe_ep_size": 1}


SETUPS: Final = {
    "gpt-oss-120b-h100-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "h100_sxm", 1, _experts(1), "MXFP4", _MANY),
    "gpt-oss-120b-h100-tp2-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "h100_sxm", 2, _experts(2), "MXFP4", _MANY),
    "gpt-oss-120b-h100-tp4-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "h100_sxm", 4, _experts(4), "MXFP4", _MANY),
    "gpt-oss-120b-b200-aic": Setup("openai/gpt-oss-120b", _GPT_OSS, "b200_sxm", 1, _experts(1), "MXFP4", _MANY),
    "llama3.3-70b-fp8-h100-tp2-aic": Setup(_LLAMA_70B, _LLAMA_FP8, "h100_sxm", 2, _FP8, "FP8, KV FP8"),
    "llama3.3-70b-fp8-h100-tp4-aic": Setup(_LLAMA_70B, _LLAMA_FP8, "h100_sxm", 4, _FP8, "FP8, KV FP8"),
    "llama3.3-70b-h100-tp4-aic": Setup(_LLAMA_70B, _LLAMA_BF16, "h100_sxm", 4, {}, "bfloat16"),
    "llama3.3-70b-h100-tp8-aic": Setup(_LLAMA_70B, _LLAMA_BF16, "h100_sxm", 8, {}, "bfloat16"),
    "llama3.3-70b-nvfp4-b200-aic": Setup(_LLAMA_70B, _LLAMA_NVFP4, "b200_sxm", 1, _NVFP4, "NVFP4, KV FP8"),
    "deepseek-v3-h200-tp8-aic": Setup(
        "deepseek-ai/DeepSeek-V3", _DEEPSEEK, "h200_sxm", 8, _experts(8), "FP8 blocks", _MANY
    ),
}
"""By name of the step-time profile."""


def gpu_count(facts: ModelFacts, device: str) -> int:
    """The smallest power of two that leaves at least 45 % of the memory to KV."""
    gpus = 1
    while facts.weight_bytes > 0.55 * GPU_MEMORY_GB[device] * 1e9 * gpus:
        gpus *= 2
    return gpus
