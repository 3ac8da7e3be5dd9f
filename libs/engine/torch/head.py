"""The output projection for a few rows at a time, on a CPU."""

import torch
from torch.nn import functional

ONEDNN_ROWS = range(4, 33)
"""Where oneDNN is up to twice as fast over a large vocabulary as the BLAS behind torch's linear: it reads the weights
once, in place. For fewer rows BLAS is as fast, for more the product is bound by arithmetic."""


class FewRowsHead(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A linear layer over the same weights, computed by oneDNN where that is faster."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., features]; returns [..., vocab]."""
        if hidden.shape[:-1].numel() in ONEDNN_ROWS:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.weight, self.bias, "none", [], "")
            return result
        return functional.linear(hidden, self.weight, self.bias)


def quicken_head(model: torch.nn.Module) -> None:
    """Replace the output layer of a float32 model on a CPU, where torch was built with oneDNN; else do nothing."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or not torch.backends.mkldnn.is_available():
        return
    if head.weight.device.type == "cpu" and head.weight.dtype == torch.float32:
        model.set_output_embeddings(FewRowsHead(head))
