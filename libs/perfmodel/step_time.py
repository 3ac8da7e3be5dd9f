"""The step-time model: what a step costs by its prefill and decode work, and the share of each. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one engine step does; the same figures that step telemetry carries."""

    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_sequences: int = 0
    prefill_context_tokens: int = 0
    """Tokens that the prompt chunks attend to, themselves included, summed over sequences."""
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    """Tokens read for decode, summed over sequences."""


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Prefill a + b·L + c·L² with cached context, decode a + b·batch + c·kv_tokens, and what the two cost together."""

    prefill_fixed_ns: float
    prefill_token_ns: float
    prefill_token_squared_ns: float
    decode_fixed_ns: float
    decode_sequence_ns: float
    decode_kv_token_ns: float
    interference: float
    """Share of the cheaper part that adds to the dearer one in a mixed step: 0 overlaps wholly, 1 is the sum."""

    def prefill_ns(self, work: StepWork) -> float:
        """The prompt chunks alone. Exact for one chunk and for equal ones; 0 without any."""
        if not work.prefill_tokens:
            return 0.0
        tokens, context = work.prefill_tokens, work.prefill_context_tokens
        # A chunk of n tokens that ends at position m adds m² - (m - n)² = n·(2m - n) to the square of its prompt.
        squared = tokens * (2 * context - tokens) / max(work.prefill_sequences, 1)
        return (
            self.prefill_fixed_ns + self.prefill_token_ns * tokens + self.prefill_token_squared_ns * max(squared, 0.0)
        )

    def decode_ns(self, work: StepWork) -> float:
        """The decodes alone; 0 without any."""
        if not work.decode_sequences:
            return 0.0
        return (
            self.decode_fixed_ns
            + self.decode_sequence_ns * work.decode_sequences
            + self.decode_kv_token_ns * work.decode_kv_tokens
        )

    def step_ns(self, work: StepWork) -> float:
        """The whole step: the dearer part, and `interference` of the other."""
        prefill, decode = self.prefill_ns(work), self.decode_ns(work)
        return max(prefill, decode) + self.interference * min(prefill, decode)


def split_step_ns(model: StepTimeModel, work: StepWork, duration_ns: int) -> tuple[int, int]:
    """(prefill, decode) parts of a step's duration, in proportion to what each would cost alone; they add exactly.

    A model that calls both free splits by tokens; a step without prompt tokens is all decode.
    """
    prefill, decode = model.prefill_ns(work), model.decode_ns(work)
    if prefill + decode <= 0:
        prefill, decode = float(work.prefill_tokens), float(work.decode_sequences)
    if prefill <= 0:
        return 0, duration_ns
    prefill_ns = min(round(duration_ns * (prefill / (prefill + decode))), duration_ns)
    return prefill_ns, duration_ns - prefill_ns
