"""What utilisation is reckoned from: the loaded model's shape, and its device's peaks."""

from typing import Any, Final

import torch

from libs.engine.torch.kv_pool import KvShape
from libs.engine.torch.peaks import device_peaks
from libs.perfmodel.utilisation import Compute

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


def compute_of(model: Any, shape: KvShape, device: torch.device) -> Compute | None:
    """Of a dense model; None for a mixture of experts, whose tokens use a part of it."""
    config = model.config.get_text_config()
    if any((getattr(config, name, None) or 0) > 1 for name in EXPERTS):
        return None
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    apart = {id(table.weight), id(head.weight)}
    layers = sum(each.numel() for each in model.parameters() if each.dim() > 1 and id(each) not in apart)
    flops_per_s, bytes_per_s = device_peaks(device, model.dtype)
    return Compute(
        layer_parameters=layers,
        head_parameters=head.weight.numel(),
        parameter_bytes=model.dtype.itemsize,
        attention_width=shape.layers * config.num_attention_heads * shape.head_dim,
        kv_token_bytes=shape.block_bytes // shape.block_size,
        peak_flops_per_s=flops_per_s,
        peak_bytes_per_s=bytes_per_s,
    )
