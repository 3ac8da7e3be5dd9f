"""The step-time model: the cost of a step by its prefill and decode work, and the share of each."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Final

# CPU libraries multiply weights with a matrix from this many rows on, and handle fewer rows as vectors.
MATRIX_ROWS: Final = 4
# A batch larger than any worker's.
UNREACHED_SEQUENCES: Final = 1 << 30


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
        """The value of `prefill_squared_tokens`, or an estimate from equal chunks if unknown."""
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
    negative. The floor is the time that a device needs to read the weights once, however few tokens use them. Below it,
    more tokens are free.

    The last four fields describe the cost of large batches; they are 0 in models without large batches.
    """

    prefill_fixed_ns: float
    prefill_token_ns: float
    prefill_token_squared_ns: float
    decode_fixed_ns: float
    decode_sequence_ns: float
    decode_kv_token_ns: float
    interference: float
    """The share of a prompt chunk that cannot hide in a mixed step while decode reads the weights (`reading_ns`).

    If the chunk is longer, the reading hides in it instead. At 0 the shorter one hides completely; at 1 the parts add
    up. The KV part of decode always adds.
    """
    prefill_floor_ns: float = 0.0
    decode_matrix_ns: float = 0.0
    saturating_sequences: int = 0
    """The batch that keeps a GPU busy for as long as it reads the weights; 0 if unknown.

    If it is known, decodes and prompt chunks share that time, and the floor applies to the whole step. Outside a CUDA
    graph the floor is what the host needs to launch kernels.
    """
    decode_wide_ns: float = 0.0
    """The further time of each sequence beyond `saturating_sequences`."""
    graph_sequences: int = 0
    """The largest decode batch that runs in a CUDA graph; 0 if unknown or without bound."""
    graph_exit_ns: float = 0.0
    """The further time of a step with more decodes than `graph_sequences`."""

    def prefill_ns(self, work: StepWork) -> float:
        """Return the time of the prompt chunks alone; 0 without chunks."""
        return self.chunks_ns(work.prefill_tokens, work.squared) if work.prefill_tokens else 0.0

    def chunks_ns(self, tokens: int, squared: float) -> float:
        """Return the time of chunks of `tokens` prompt tokens alone.

        There must be at least one token. `squared` is a result of `squared_tokens`.
        """
        return max(self.prefill_floor_ns, self._above_floor_ns(tokens, squared))

    def beside_ns(self, tokens: int, squared: float) -> float:
        """Return the part of `chunks_ns` that counts in a mixed step, for `mixed_ns`."""
        # With known saturation, the floor applies to the whole step in `mixed_ns`.
        return self._above_floor_ns(tokens, squared) if self.saturating_sequences else self.chunks_ns(tokens, squared)

    def _above_floor_ns(self, tokens: int, squared: float) -> float:
        linear = self.prefill_fixed_ns + self.prefill_token_ns * tokens
        return linear + self.prefill_token_squared_ns * squared

    def reading_ns(self, sequences: float) -> float:
        """Return decode's fixed time for this many sequences, in which the weights are read; 0 without sequences."""
        if sequences <= 0:
            return 0.0
        return self.decode_fixed_ns + (self.decode_matrix_ns if sequences >= MATRIX_ROWS else 0.0)

    def hiding_ns(self, sequences: float) -> float:
        """Return the part of `reading_ns` in which a prompt chunk can hide, which is the rest after the decodes."""
        reading_ns = self.reading_ns(sequences)
        if not self.saturating_sequences:
            return reading_ns
        return reading_ns * max(1 - sequences / self.saturating_sequences, 0.0)

    def sequences_ns(self, sequences: float) -> float:
        """Return the part of a decode step that depends on the number of sequences but not on their KV."""
        own_ns = self.decode_sequence_ns * sequences
        if self.saturating_sequences and sequences > self.saturating_sequences:
            own_ns += self.decode_wide_ns * (sequences - self.saturating_sequences)
        if self.graph_sequences and sequences > self.graph_sequences:
            own_ns += self.graph_exit_ns
        return own_ns

    def decode_ns(self, work: StepWork) -> float:
        """Return the time of the decodes alone; 0 without decodes."""
        return (
            self.reading_ns(work.decode_sequences)
            + self.sequences_ns(work.decode_sequences)
            + self.decode_kv_token_ns * work.decode_kv_tokens
        )

    def step_ns(self, work: StepWork) -> float:
        """Return the time of the whole step: both parts, less what they share."""
        decode_ns = self.decode_ns(work)
        if not work.prefill_tokens:
            return decode_ns
        prefill_ns = self.beside_ns(work.prefill_tokens, work.squared)
        return self.mixed_ns(prefill_ns, decode_ns, self.hiding_ns(work.decode_sequences))

    def mixed_ns(self, prefill_ns: float, decode_ns: float, hiding_ns: float) -> float:
        """Return the time of a step with prompt chunks from `beside_ns`, `decode_ns` and `hiding_ns` of its work."""
        whole_ns = prefill_ns + decode_ns - (1 - self.interference) * min(prefill_ns, hiding_ns)
        return max(whole_ns, self.prefill_floor_ns) if self.saturating_sequences else whole_ns

    def most_prefill_ns(self, step_ns: float, decode_ns: float, hiding_ns: float) -> float:
        """Return the maximum of `beside_ns` in a step of `step_ns`; the inverse of `mixed_ns`."""
        if self.saturating_sequences and step_ns < self.prefill_floor_ns:
            return 0.0
        rest_ns = max(step_ns - decode_ns, 0.0)
        if rest_ns < self.interference * hiding_ns:
            return rest_ns / self.interference
        return rest_ns + (1 - self.interference) * hiding_ns

    def hidden_ns(self, work: StepWork) -> float:
        """Return the time that a mixed step saves over running its two parts one after the other; 0 for a pure step."""
        return self.prefill_ns(work) + self.decode_ns(work) - self.step_ns(work)

    def scaled(self, factor: float) -> "StepTimeModel":
        """Return the model of a device on which everything takes `factor` times as long."""
        times = {each.name: getattr(self, each.name) * factor for each in fields(self) if each.name.endswith("_ns")}
        return replace(self, **times)

    def without_large_batches(self) -> "StepTimeModel":
        """Return the model of a device on which a sequence costs the same in any batch.

        `combine` prefers it to the models of other workers, unlike a model with batches of 0, which are unknown.
        """
        return replace(
            self,
            saturating_sequences=UNREACHED_SEQUENCES,
            decode_wide_ns=0.0,
            graph_sequences=UNREACHED_SEQUENCES,
            graph_exit_ns=0.0,
        )


def split_step_ns(model: StepTimeModel, work: StepWork, duration_ns: int) -> tuple[int, int]:
    """Split a step's duration into (prefill, decode) in proportion to the cost of each alone; the parts add exactly.

    If the model makes both free, the split is by tokens. A step without prompt tokens is all decode.
    """
    prefill, decode = model.prefill_ns(work), model.decode_ns(work)
    if prefill + decode <= 0:
        prefill, decode = float(work.prefill_tokens), float(work.decode_sequences)
    if prefill <= 0:
        return 0, duration_ns
    prefill_ns = min(round(duration_ns * (prefill / (prefill + decode))), duration_ns)
    return prefill_ns, duration_ns - prefill_ns
