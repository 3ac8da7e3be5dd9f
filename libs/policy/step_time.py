"""The step-time model: the cost of a step by its prefill and decode work, and the share of each."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

# CPU libraries multiply weights with a matrix from this many rows on, and handle fewer rows as vectors.
MATRIX_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one engine step, in the figures of step telemetry."""

    prefill_tokens: int = 0
    prefill_sequences: int = 0
    prefill_context_tokens: int = 0
    """The tokens that the prompt chunks attend to, including their own, summed over sequences."""
    decode_sequences: int = 0
    decode_kv_tokens: int = 0
    """The tokens read for decode, summed over sequences."""
    prefill_squared_tokens: int = 0
    """The increase of the squares of the prompts' lengths through the chunks (see `squared_tokens`); 0 if unknown."""

    @property
    def squared(self) -> float:
        """`prefill_squared_tokens`, or an estimate from equal chunks if that is unknown."""
        tokens, context = self.prefill_tokens, self.prefill_context_tokens
        alike = tokens * (2 * context - tokens) / max(self.prefill_sequences, 1)
        return float(self.prefill_squared_tokens or max(alike, 0.0))


def squared_tokens(chunks: Iterable[tuple[int, int]]) -> int:
    """Return Σ end² − start² over prompt chunks [start, end): L² for a whole prompt of L tokens, however it is cut.

    It is twice the sum of tokens x (context before them + tokens / 2): the pairs that attention computes.
    """
    return sum(end * end - start * start for start, end in chunks)


def chunks_work(chunks: Iterable[tuple[int, int]], decode: StepWork | None = None) -> StepWork:
    """Return the work of prompt chunks [start, end) beside the decodes of `decode`."""
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
    """A formula for step times with coefficients for prefill, decode and their interference.

    Prefill is a + b·L + c·L² but at least a floor; decode is a + b·batch + c·kv_tokens.

    Decode's a grows by `decode_matrix_ns` from `MATRIX_ROWS` sequences on. All times are nanoseconds, and none is
    negative. The floor is the time that a device needs to read the weights once, however few tokens use them. Below
    it more tokens are free.
    """

    prefill_fixed_ns: float
    prefill_token_ns: float
    prefill_token_squared_ns: float
    decode_fixed_ns: float
    decode_sequence_ns: float
    decode_kv_token_ns: float
    interference: float
    """The share of a prompt chunk that cannot hide in a mixed step while decode reads the weights (`reading_ns`).

    If the chunk is longer, the reading hides in it instead. At 0 all of the shorter one hides; at 1 the parts add.
    The KV part of decode always adds.
    """
    prefill_floor_ns: float = 0.0
    decode_matrix_ns: float = 0.0

    def prefill_ns(self, work: StepWork) -> float:
        """Return the time of the prompt chunks alone; 0 without any."""
        return self.chunks_ns(work.prefill_tokens, work.squared) if work.prefill_tokens else 0.0

    def chunks_ns(self, tokens: int, squared: float) -> float:
        """Return the time of chunks of `tokens` prompt tokens alone.

        There must be at least one token. `squared` is a result of `squared_tokens`.
        """
        linear = self.prefill_fixed_ns + self.prefill_token_ns * tokens
        return max(self.prefill_floor_ns, linear + self.prefill_token_squared_ns * squared)

    def reading_ns(self, sequences: float) -> float:
        """Return decode's fixed time for this many sequences, in which the weights are read; 0 without any."""
        if sequences <= 0:
            return 0.0
        return self.decode_fixed_ns + (self.decode_matrix_ns if sequences >= MATRIX_ROWS else 0.0)

    def decode_ns(self, work: StepWork) -> float:
        """Return the time of the decodes alone; 0 without any."""
        return (
            self.reading_ns(work.decode_sequences)
            + self.decode_sequence_ns * work.decode_sequences
            + self.decode_kv_token_ns * work.decode_kv_tokens
        )

    def step_ns(self, work: StepWork) -> float:
        """Return the time of the whole step: both parts, less what they share."""
        return self.mixed_ns(self.prefill_ns(work), self.decode_ns(work), self.reading_ns(work.decode_sequences))

    def mixed_ns(self, prefill_ns: float, decode_ns: float, reading_ns: float) -> float:
        """Return the time of a step from the times of its parts alone; `reading_ns` is that of the decodes."""
        return prefill_ns + decode_ns - (1 - self.interference) * min(prefill_ns, reading_ns)

    def most_prefill_ns(self, step_ns: float, decode_ns: float, reading_ns: float) -> float:
        """Return the time that prompt chunks may take alone in a step of `step_ns`; the inverse of `mixed_ns`."""
        rest_ns = max(step_ns - decode_ns, 0.0)
        if rest_ns < self.interference * reading_ns:
            return rest_ns / self.interference
        return rest_ns + (1 - self.interference) * reading_ns

    def hidden_ns(self, work: StepWork) -> float:
        """Return what a mixed step saves against running its two parts one after the other; 0 for a pure one."""
        return (1 - self.interference) * min(self.prefill_ns(work), self.reading_ns(work.decode_sequences))

    def scaled(self, factor: float) -> "StepTimeModel":
        """Return the model of a device on which everything takes `factor` times as long."""
        times = {field.name: getattr(self, field.name) * factor for field in fields(self)}
        return replace(self, **(times | {"interference": self.interference}))


def split_step_ns(model: StepTimeModel, work: StepWork, duration_ns: int) -> tuple[int, int]:
    """Split a step's duration into (prefill, decode) in proportion to what each costs alone; the parts add exactly.

    A model that makes both free splits by tokens. A step without prompt tokens is all decode.
    """
    prefill, decode = model.prefill_ns(work), model.decode_ns(work)
    if prefill + decode <= 0:
        prefill, decode = float(work.prefill_tokens), float(work.decode_sequences)
    if prefill <= 0:
        return 0, duration_ns
    prefill_ns = min(round(duration_ns * (prefill / (prefill + decode))), duration_ns)
    return prefill_ns, duration_ns - prefill_ns
