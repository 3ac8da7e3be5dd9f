"""Utilisation of a device's peaks: FLOPs and bytes of a step from the model's shape. Pure.

A forward pass computes 2 FLOPs per parameter and token (Kaplan et al. 2020, appendix; "model FLOPs utilisation" as
in PaLM, appendix B). Attention adds 4 x heads x head_dim per layer and pair of tokens: Q·Kᵀ and its product with V,
each a multiplication and an addition. The pass moves the weights once for any number of tokens, and each sequence's
KV ("model bandwidth utilisation": bytes of parameters and KV per step, over its time). Neither figure includes what
a kernel reads, writes or computes beyond that. They show how close a step comes to the least that the model needs.
"""

from dataclasses import dataclass

from libs.policy.step_time import StepWork


@dataclass(frozen=True, slots=True)
class Compute:
    """The figures of a model on a device from which utilisation is computed."""

    layer_parameters: int
    """Number of parameters in matrices that every token is multiplied with."""
    head_parameters: int
    """Number of parameters of the output projection, which runs only for the last token of a chunk."""
    parameter_bytes: int
    """Bytes of a single parameter in the model's type."""
    attention_width: int
    """The product of layers, heads per layer and head_dim."""
    kv_token_bytes: int
    """KV bytes of a token, one copy, in layers that keep all tokens."""
    peak_flops_per_s: float
    """Peak of the worker's device in the type that it computes in; 0 if unknown."""
    peak_bytes_per_s: float
    """Peak of the memory that holds weights and KV; 0 if unknown."""
    kv_window_token_bytes: int = 0
    """KV bytes of a token in layers that keep only the last `kv_window_tokens` of a sequence."""
    kv_window_tokens: int = 0
    kv_state_bytes: int = 0
    """KV bytes of a sequence that do not depend on its length."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights, which every step reads once."""
        return (self.layer_parameters + self.head_parameters) * self.parameter_bytes

    @property
    def window_share(self) -> float:
        """Fraction of attention in layers with windows, by the bytes of a token."""
        return self.kv_window_token_bytes / max(self.kv_token_bytes + self.kv_window_token_bytes, 1)

    def attended(self, tokens: float, within: float) -> float:
        """Return how many of the preceding `tokens` the mean layer attends to, if windows reach `within` tokens."""
        return tokens - self.window_share * max(tokens - within, 0.0)

    def kv_bytes(self, tokens: float, sequences: float) -> float:
        """Return the KV bytes of `sequences` that have `tokens` tokens in total."""
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

    Each step reads the weights, which is shared between the phases as its time is: `prefill_steps` steps belong to
    prefill, `decode_steps` to decode. Both may be fractions.
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
