"""The speed of one worker as routers need it: prompts, decode steps and KV transfer."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Final

from libs.policy.step_time import MATRIX_ROWS, StepTimeModel

# A sequence that is short of time gives up half of the time between its decodes and its target, and in the long run
# there always is one. In virtual time, prompts got 0.46 to 0.63 of it, with 2 sequences as with 21.
PROMPTS_PART: Final = 0.5
"""The share of the time that TPOT leaves beside decodes which goes to prompts in the long run."""
# After the end of a prompt, the gateway's next one reaches the worker within 1 ms, or within tens of ms if cores are
# busy. A prompt that arrives too late leaves its step half empty, and the worker stays below its plateau. The value is
# generous because prompts differ in length, and many are shorter than the mean.
HAND_OVER_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Speed:
    """A worker's step times and the speed of its KV link."""

    step_time: StepTimeModel
    chunk_tokens: int
    """The maximum number of prompt tokens that one step computes."""
    kv_token_ns: float = 0.0
    """The time to receive the KV of one token; 0 if unknown."""
    measured: bool = False
    """True if the figures come from the worker's own steps; else they are a guess."""
    paced_step_ns: float = 0.0
    """The longest step with decodes that keeps their TPOT; 0 if there is no bound.

    Prompts get `PROMPTS_PART` of the time that decodes leave.
    """

    def prompt_ns(self, tokens: float, squares: float, decode_ns: float = 0.0, sequences: float = 0.0) -> float:
        """Return the time of `tokens` prompt tokens in chunks, beside `sequences` that take `decode_ns` a step.

        `squares` is the sum over prompts of the squared length less the square of the part that already has KV.
        """
        if tokens <= 0:
            return 0.0
        model = self.step_time
        steps = -(-tokens // self.chunk_tokens)
        work_ns = tokens * model.prefill_token_ns + squares * model.prefill_token_squared_ns
        floor_ns, prefill = steps * model.prefill_floor_ns, steps * model.prefill_fixed_ns + work_ns
        if not decode_ns:
            return max(floor_ns, prefill)
        hiding_ns = min(decode_ns, model.hiding_ns(max(sequences, MATRIX_ROWS)))
        if not model.saturating_sequences:
            prefill = max(floor_ns, prefill)
        whole_ns = prefill + steps * decode_ns - (1 - model.interference) * min(prefill, steps * hiding_ns)
        if model.saturating_sequences:
            whole_ns = max(floor_ns, whole_ns)
        step_ns = decode_ns + PROMPTS_PART * max(self.paced_step_ns - decode_ns, 0.0)
        if not self.paced_step_ns or whole_ns <= steps * step_ns:
            return whole_ns
        beside_ns = max(model.most_prefill_ns(step_ns, decode_ns, hiding_ns) - model.prefill_fixed_ns, 0.0)
        work_ns = prefill - steps * model.prefill_fixed_ns
        return max(whole_ns, work_ns / max(beside_ns, LEAST_BESIDE * step_ns) * step_ns)

    def filled_tokens(self) -> float:
        """Return the prompt tokens that keep the worker busy until the next prompt arrives.

        They fill one step and the time of `HAND_OVER_S` after it.
        """
        chunk = self.chunk_tokens
        step_ns = self.prompt_ns(chunk, chunk * chunk)
        return chunk * (1 + HAND_OVER_S * 1e9 / step_ns) if step_ns else inf

    def decode_ns(self, sequences: float, kv_tokens: float) -> float:
        """Return the time of a decode step over `sequences` that read `kv_tokens` of KV; 0 without sequences."""
        model = self.step_time
        if sequences <= 0:
            return 0.0
        return model.reading_ns(sequences) + model.sequences_ns(sequences) + kv_tokens * model.decode_kv_token_ns


def image_ns(counts: Iterable[tuple[int, int]]) -> float:
    """Return the mean time to encode an image of a prompt, where cached images count as 0.

    `counts` holds, for each worker, the images in its prompts and the nanoseconds spent on encoding.
    """
    used = took_ns = 0
    for images, encode_ns in counts:
        used, took_ns = used + images, took_ns + encode_ns
    return took_ns / used if used else 0.0


LEAST_BESIDE: Final = 0.1
"""The share of a paced step that prompts get in the long run even if decodes fill it."""
# Without a prediction every step takes no time, so load and turns alone decide.
UNKNOWN_SPEED: Final = Speed(StepTimeModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), chunk_tokens=1)
