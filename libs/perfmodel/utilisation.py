"""The utilisation of a device's peaks: FLOPs and bytes of a step from the model's shape. Pure.

A forward pass computes 2 FLOPs per parameter and token (Kaplan et al. 2020, appendix; "model FLOPs utilisation" as in
PaLM, appendix B). Attention adds 4 x heads x head_dim per layer and pair of tokens: Q·Kᵀ and its product with V, each a
multiplication and an addition. The pass reads the weights once for any number of tokens, and the KV of each sequence
once ("model bandwidth utilisation": bytes of parameters and KV per step, over the step's time). Neither figure includes
further work of the kernels. The figures show how close a step comes to the minimum that the model needs.
"""

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from libs.policy.step_time import StepWork


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers whose blocks are allocated and freed together."""

    block_tokens: int
    block_bytes: int
    """The bytes of one block in all layers of the group."""
    window_tokens: int = 0
    """The number of tokens at the end of a sequence whose blocks are kept; 0 for all tokens."""

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks of a sequence of `tokens` tokens.

        A window that starts inside a block needs one block more.
        """
        blocks = -(-tokens // self.block_tokens)
        return min(blocks, -(-self.window_tokens // self.block_tokens) + 1) if self.window_tokens else blocks


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of all layers of a model."""

    groups: tuple[KvGroup, ...]
    state_bytes: int = 0
    """The bytes of states, which do not grow with the sequence."""

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` tokens in whole blocks, which a hand-over transfers."""
        return sum(group.blocks(tokens) * group.block_bytes for group in self.groups) + self.state_bytes

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes that `block_tokens` further tokens add to a long sequence.

        In a model with windows only, they would add nothing, so the result is for a short sequence.
        """
        return round(block_tokens * (self._bytes(windows=False) or self._bytes(windows=True)))

    def kept_tokens(self, tokens: int) -> int:
        """Return how many of a sequence's `tokens` the layers with the longest reach keep."""
        return max((min(tokens, group.window_tokens or tokens) for group in self.groups), default=0)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token in layers that keep all tokens."""
        return round(self._bytes(windows=False))

    @property
    def window_token_bytes(self) -> int:
        """The bytes of a token in layers with a window."""
        return round(self._bytes(windows=True))

    @property
    def window_tokens(self) -> int:
        """The length of the windows. For windows of different lengths, the one length that needs the same bytes."""
        whole = sum(group.window_tokens * group.block_bytes / group.block_tokens for group in self.groups)
        return round(whole / self.window_token_bytes) if self.window_token_bytes else 0

    def _bytes(self, *, windows: bool) -> float:
        return sum(each.block_bytes / each.block_tokens for each in self.groups if bool(each.window_tokens) == windows)


# Dense tensor-core bfloat16 (else float16) and memory bandwidth, from NVIDIA's data sheet of each product. If a sheet
# only has figures with sparsity, these are halves of them.
PEAKS: Final = MappingProxyType(
    {
        # words that the device's name must contain: (TFLOP/s, TB/s). The entry with the most words applies.
        ("B200",): (2250.0, 8.0),
        ("GB200",): (2500.0, 8.0),
        ("GH200",): (989.4, 4.0),
        ("H200",): (989.4, 4.8),
        ("H200", "NVL"): (835.5, 4.8),
        ("H100",): (989.4, 3.35),
        ("H100", "PCIE"): (756.0, 2.0),
        ("H100", "NVL"): (835.5, 3.9),
        ("H800",): (989.4, 3.35),
        ("H20",): (148.0, 4.0),
        ("A100", "80GB"): (312.0, 2.039),
        ("A100", "80GB", "PCIE"): (312.0, 1.935),
        ("A100",): (312.0, 1.555),
        ("A800",): (312.0, 2.039),
        ("A10",): (125.0, 0.6),
        ("A10G",): (70.0, 0.6),
        ("A30",): (165.0, 0.933),
        ("A40",): (149.7, 0.696),
        ("L4",): (121.0, 0.3),
        ("L40",): (181.0, 0.864),
        ("L40S",): (362.0, 0.864),
        ("V100",): (125.0, 0.9),
        ("T4",): (65.0, 0.32),
    }
)


def gpu_peaks(name: str) -> tuple[float, float]:
    """Return (FLOP/s, bytes/s) of a GPU by the name that its driver reports; zeros if it is unknown."""
    words = set(re.split(r"[\s\-_]+", name.upper()))
    known = [key for key in PEAKS if words.issuperset(key)]
    if not known:
        return 0.0, 0.0
    tera_flops, tera_bytes = PEAKS[max(known, key=len)]
    return tera_flops * 1e12, tera_bytes * 1e12


@dataclass(frozen=True, slots=True)
class Compute:
    """The figures of a model on a device from which utilisation is computed."""

    layer_parameters: int
    """The number of parameters in matrices by which every token is multiplied."""
    head_parameters: int
    """The number of parameters of the output projection, which runs only for the last token of a chunk."""
    parameter_bytes: int
    """The bytes of one parameter in the model's type."""
    attention_width: int
    """The product of layers, heads per layer and head_dim."""
    kv_token_bytes: int
    """The KV bytes of a token, one copy, in layers that keep all tokens."""
    peak_flops_per_s: float
    """The peak of the worker's device in the type that it computes in; 0 if unknown."""
    peak_bytes_per_s: float
    """The peak of the memory that holds weights and KV; 0 if unknown."""
    kv_window_token_bytes: int = 0
    """The KV bytes of a token in layers that keep only the last `kv_window_tokens` of a sequence."""
    kv_window_tokens: int = 0
    kv_state_bytes: int = 0
    """The KV bytes of a sequence that do not depend on its length."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights, which every step reads once."""
        return (self.layer_parameters + self.head_parameters) * self.parameter_bytes

    @property
    def window_share(self) -> float:
        """The fraction of attention that is in layers with windows, by the bytes of a token."""
        return self.kv_window_token_bytes / max(self.kv_token_bytes + self.kv_window_token_bytes, 1)

    def attended(self, tokens: float, within: float) -> float:
        """Return the number of the preceding `tokens` that a layer attends to on average.

        Windows reach `within` tokens.
        """
        return tokens - self.window_share * max(tokens - within, 0.0)

    def kv_bytes(self, tokens: float, sequences: float) -> float:
        """Return the KV bytes of `sequences` sequences that have `tokens` tokens in total."""
        if not self.kv_window_token_bytes and not self.kv_state_bytes:
            return float(self.kv_token_bytes) * tokens
        inside = min(tokens, float(self.kv_window_tokens) * sequences)
        states = float(self.kv_state_bytes) * sequences
        return float(self.kv_token_bytes) * tokens + float(self.kv_window_token_bytes) * inside + states


@dataclass(frozen=True, slots=True)
class Effort:
    """The FLOPs and bytes of steps, by phase."""

    prefill_flops: float = 0.0
    decode_flops: float = 0.0
    prefill_bytes: float = 0.0
    decode_bytes: float = 0.0


def effort_of(compute: Compute, work: StepWork, *, prefill_steps: float, decode_steps: float) -> Effort:
    """Return the effort of steps that do `work` in total.

    Each step reads the weights once. `prefill_steps` of the steps count for prefill and `decode_steps` for decode; both
    may be fractions.
    """
    squared = work.squared if work.prefill_tokens else 0.0
    window = float(compute.kv_window_tokens)
    pairs = compute.attended(squared / 2, window * work.prefill_tokens)
    attended = compute.attended(work.decode_kv_tokens, window * work.decode_sequences)
    prefill_kv_tokens = work.prefill_context_tokens + work.prefill_tokens
    decode_kv_tokens = work.decode_kv_tokens + work.decode_sequences
    return Effort(
        prefill_flops=2.0 * compute.layer_parameters * work.prefill_tokens
        + 2.0 * compute.head_parameters * work.prefill_sequences
        + 4.0 * compute.attention_width * pairs,  # pairs are half of the squares
        decode_flops=2.0 * (compute.layer_parameters + compute.head_parameters) * work.decode_sequences
        + 4.0 * compute.attention_width * attended,
        prefill_bytes=compute.weight_bytes * prefill_steps
        + compute.kv_bytes(prefill_kv_tokens, work.prefill_sequences),
        decode_bytes=compute.weight_bytes * decode_steps + compute.kv_bytes(decode_kv_tokens, work.decode_sequences),
    )


def utilisation(amount: float, peak_per_s: float, gpu_ns: int) -> float | None:
    """Return the fraction of a peak used in `gpu_ns` of GPU time; None if the peak is unknown or the time is 0."""
    return amount / (peak_per_s * gpu_ns / 1e9) if peak_per_s > 0 and gpu_ns > 0 else None
