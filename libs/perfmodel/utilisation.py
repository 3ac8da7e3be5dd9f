"""How much of a device's peaks its steps use: FLOPs and bytes of a step from the model's shape. Pure.

A forward pass computes 2 FLOPs a parameter and token (Kaplan et al. 2020, appendix; "model FLOPs utilisation" as in
PaLM, appendix B), and attention 4 x heads x head_dim a layer and pair of tokens (Q·Kᵀ and its product with V, each a
multiplication and an addition). It moves the weights once, however many tokens use them, and each sequence's KV
("model bandwidth utilisation": bytes of parameters and KV a step, over its time). Both leave out what a kernel reads,
writes or computes beyond that: they say how near a step comes to the least that the model needs.
"""

from dataclasses import dataclass

from libs.policy.step_time import StepWork


@dataclass(frozen=True, slots=True)
class Compute:
    """What must be known of a model on a device."""

    layer_parameters: int
    """Of matrices that every token is multiplied with."""
    head_parameters: int
    """Of the output projection, which runs for the last token of a chunk only."""
    parameter_bytes: int
    """Of one parameter."""
    attention_width: int
    """Layers x heads x head_dim."""
    kv_token_bytes: int
    """Of one copy, in layers that keep all tokens."""
    peak_flops_per_s: float
    """Of the worker's device in the type that it computes in; 0: unknown."""
    peak_bytes_per_s: float
    """Of the memory that holds weights and KV; 0: unknown."""
    kv_window_token_bytes: int = 0
    """In layers that keep the last `kv_window_tokens` of a sequence alone."""
    kv_window_tokens: int = 0
    kv_state_bytes: int = 0
    """A sequence's, however long it is."""

    @property
    def weight_bytes(self) -> int:
        """What every step reads."""
        return (self.layer_parameters + self.head_parameters) * self.parameter_bytes

    @property
    def window_share(self) -> float:
        """Share of attention whose layers have windows, by the bytes of a token."""
        return self.kv_window_token_bytes / max(self.kv_token_bytes + self.kv_window_token_bytes, 1)

    def attended(self, tokens: float, within: float) -> float:
        """How many of `tokens` that precede others the mean layer attends to, where windows reach `within`."""
        return tokens - self.window_share * max(tokens - within, 0.0)

    def kv_bytes(self, tokens: float, sequences: float) -> float:
        """Bytes of KV of `sequences` that have `tokens` together."""
        if not self.kv_window_token_bytes and not self.kv_state_bytes:
            return float(self.kv_token_bytes) * tokens
        inside = min(tokens, float(self.kv_window_tokens) * sequences)
        states = float(self.kv_state_bytes) * sequences
        return float(self.kv_token_bytes) * tokens + float(self.kv_window_token_bytes) * inside + states


@dataclass(frozen=True, slots=True)
class Effort:
    """FLOPs and bytes by phase."""

    prefill_flops: float = 0.0
    decode_flops: float = 0.0
    prefill_bytes: float = 0.0
    decode_bytes: float = 0.0


def effort_of(compute: Compute, work: StepWork, *, prefill_steps: float, decode_steps: float) -> Effort:
    """Effort of steps that do `work` together, or parts of them. Each reads the weights, which belongs to the phases as
    its time does: `prefill_steps` of them to prefill, `decode_steps` to decode."""
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
    """Share of a peak that was used in so much GPU time; None where the peak is unknown or no time was spent."""
    return amount / (peak_per_s * gpu_ns / 1e9) if peak_per_s > 0 and gpu_ns > 0 else None
