"""The step-time model: what a step costs by its prefill and decode work, and the share of each. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

MATRIX_ROWS: Final = 4
"""From this many rows on, libraries for CPUs multiply weights with a matrix; fewer rows they take as vectors."""


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
    prefill_squared_tokens: int = 0
    """What the chunks add to the squares of their prompts' lengths (see `squared_tokens`); 0: unknown."""

    @property
    def squared(self) -> float:
        """`prefill_squared_tokens`; where it is unknown, as if all chunks were alike."""
        tokens, context = self.prefill_tokens, self.prefill_context_tokens
        alike = tokens * (2 * context - tokens) / max(self.prefill_sequences, 1)
        return float(self.prefill_squared_tokens or max(alike, 0.0))


def squared_tokens(chunks: Iterable[tuple[int, int]]) -> int:
    """Σ end² − start² over prompt chunks [start, end): L² for a whole prompt of L tokens, however it is cut.

    It is twice the sum of tokens x (context before them + tokens / 2): the pairs that attention computes.
    """
    return sum(end * end - start * start for start, end in chunks)


def chunks_work(chunks: Iterable[tuple[int, int]], decode: StepWork | None = None) -> StepWork:
    """Prompt chunks [start, end) beside the decodes of `decode`."""
    spans = [(start, end) for start, end in chunks if end > start]
    return StepWork(
        prefill_tokens=sum([end - start for start, end in spans]),
        prefill_sequences=len(spans),
        prefill_context_tokens=sum([end for _, end in spans]),
        decode_sequences=decode.decode_sequences if decode is not None else 0,
        decode_kv_tokens=decode.decode_kv_tokens if decode is not None else 0,
        prefill_squared_tokens=squared_tokens(spans),
    )


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Prefill a + b·L + c·L² but at least its floor, decode a + b·batch + c·kv_tokens, and what the two cost together.

    Decode's a is more by `decode_matrix_ns` from `MATRIX_ROWS` sequences on.

    All are nanoseconds and none is negative. The floor is what a device needs to read the weights once, however few
    tokens use them; below it more tokens are free.
    """

    prefill_fixed_ns: float
    prefill_token_ns: float
    prefill_token_squared_ns: float
    decode_fixed_ns: float
    decode_sequence_ns: float
    decode_kv_token_ns: float
    interference: float
    """In a mixed step a prompt chunk can hide in the time in which decode reads the weights, `reading_ns`, or the
    reading in the chunk if that is shorter. 0: all of it hides; 1: none, the parts add. Decode's KV always adds."""
    prefill_floor_ns: float = 0.0
    decode_matrix_ns: float = 0.0

    def prefill_ns(self, work: StepWork) -> float:
        """The prompt chunks alone; 0 without any."""
        return self.chunks_ns(work.prefill_tokens, work.squared) if work.prefill_tokens else 0.0

    def chunks_ns(self, tokens: int, squared: float) -> float:
        """Chunks of these prompt tokens, at least one, alone; squared: see `squared_tokens`."""
        linear = self.prefill_fixed_ns + self.prefill_token_ns * tokens
        return max(self.prefill_floor_ns, linear + self.prefill_token_squared_ns * squared)

    def reading_ns(self, sequences: float) -> float:
        """Decode's fixed part for this many sequences, in which the weights are read; 0 without any."""
        if sequences <= 0:
            return 0.0
        return self.decode_fixed_ns + (self.decode_matrix_ns if sequences >= MATRIX_ROWS else 0.0)

    def decode_ns(self, work: StepWork) -> float:
        """The decodes alone; 0 without any."""
        return (
            self.reading_ns(work.decode_sequences)
            + self.decode_sequence_ns * work.decode_sequences
            + self.decode_kv_token_ns * work.decode_kv_tokens
        )

    def step_ns(self, work: StepWork) -> float:
        """The whole step: both parts, less what rides along."""
        return self.mixed_ns(self.prefill_ns(work), self.decode_ns(work), self.reading_ns(work.decode_sequences))

    def mixed_ns(self, prefill_ns: float, decode_ns: float, reading_ns: float) -> float:
        """The same by what its parts take alone; reading_ns: of the decodes."""
        return prefill_ns + decode_ns - (1 - self.interference) * min(prefill_ns, reading_ns)

    def most_prefill_ns(self, step_ns: float, decode_ns: float, reading_ns: float) -> float:
        """The inverse of `mixed_ns`: prompt chunks that take so long alone make a step of `step_ns`."""
        rest_ns = max(step_ns - decode_ns, 0.0)
        if rest_ns < self.interference * reading_ns:
            return rest_ns / self.interference
        return rest_ns + (1 - self.interference) * reading_ns

    def hidden_ns(self, work: StepWork) -> float:
        """What a mixed step saves against its two parts run one after the other; 0 for a pure one."""
        return (1 - self.interference) * min(self.prefill_ns(work), self.reading_ns(work.decode_sequences))

    def scaled(self, factor: float) -> "StepTimeModel":
        """Model of a device on which everything takes `factor` times as long."""
        times = {field.name: getattr(self, field.name) * factor for field in fields(self)}
        return replace(self, **(times | {"interference": self.interference}))


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
