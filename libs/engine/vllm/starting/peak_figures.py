"""Inputs for computing utilisation, from vLLM's own figures of a model. Imports vLLM: for the thread that starts
it.
"""

from dataclasses import replace

import torch
from vllm.config import VllmConfig
from vllm.v1.metrics.perf import ExecutionContext, ModelMetrics

from libs.engine.config import EngineConfig
from libs.engine.torch.peaks import device_peaks
from libs.perfmodel.kv_shape import KvShape
from libs.perfmodel.utilisation import Compute

LAYER_PARTS = ("attn.qkv_proj", "attn.out_proj", "ffn.dense_ffn")
HEAD = "unembed.unembed"
FLOPS_A_PARAMETER = 2


def compute_of(config: EngineConfig, vllm_config: VllmConfig) -> Compute | None:
    """Return the compute of a dense model without quantisation; None for others.

    Tokens of a mixture of experts use only part of the weights, and quantised weights are narrower than the
    arithmetic. KV is left out, since it is known only once EngineCore serves (`with_kv`).
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.quantization is not None or model.is_moe:
        return None
    flops = ModelMetrics(vllm_config).get_num_flops_breakdown(
        ExecutionContext.from_single_request(num_tokens=1, context_len=1, is_prefill=True), per_gpu=False
    )
    if not flops.keys() >= {*LAYER_PARTS, HEAD}:
        return None
    layers, heads = model.get_total_num_hidden_layers(), model.get_num_attention_heads(parallel)
    width = layers * heads * model.get_head_size() * parallel.tensor_parallel_size
    device = torch.device(vllm_config.device_config.device_type)
    if device.type == "cpu":  # measure with as many threads as EngineCore will use
        torch.set_num_threads(config.threads or 1)
    flops_per_s, bytes_per_s = device_peaks(device, model.dtype)
    return Compute(
        layer_parameters=sum(flops[part] for part in LAYER_PARTS) // FLOPS_A_PARAMETER,
        head_parameters=flops[HEAD] // FLOPS_A_PARAMETER,
        parameter_bytes=model.dtype.itemsize,
        attention_width=width,
        kv_token_bytes=0,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=bytes_per_s,
    )


def with_kv(compute: Compute, kv: KvShape) -> Compute:
    """Return a copy with the bytes of KV that steps read."""
    return replace(
        compute,
        kv_token_bytes=kv.token_bytes,
        kv_window_token_bytes=kv.window_token_bytes,
        kv_window_tokens=kv.window_tokens,
        kv_state_bytes=kv.state_bytes,
    )
