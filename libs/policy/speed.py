"""How fast one worker is, as far as a router needs to know: prompts, decode steps, KV on its way. Pure."""

from dataclasses import dataclass
from math import inf
from typing import Final

from libs.policy.step_time import MATRIX_ROWS, StepTimeModel

HAND_OVER_S: Final = 0.1
"""From the end of a prompt until the gateway's next one is at the worker: 1 ms, but tens where cores are busy. What
comes too late for a step is missing in it, and a worker that runs half-empty steps has less than its plateau. Ample,
since prompts differ in length: a mean's worth of them often holds less."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A worker's step times and its KV link."""

    step_time: StepTimeModel
    chunk_tokens: int
    """Prompt tokens that one step computes at most."""
    kv_token_ns: float = 0.0
    """To receive the KV of one token; 0: not known."""
    measured: bool = False
    """From steps of the worker's own; else a guess."""
    paced_step_ns: float = 0.0
    """What a step with decodes in it takes at most, for their TPOT; 0: without a bound."""

    def prompt_ns(self, tokens: float, squares: float, decode_ns: float = 0.0) -> float:
        """Computing `tokens` prompt tokens in chunks, each step beside decodes that alone take `decode_ns`.

        `squares`: of each prompt, its length squared less the square of what has its KV already, summed.
        """
        if tokens <= 0:
            return 0.0
        model = self.step_time
        steps = -(-tokens // self.chunk_tokens)
        prefill = max(
            steps * model.prefill_floor_ns,
            steps * model.prefill_fixed_ns + tokens * model.prefill_token_ns + squares * model.prefill_token_squared_ns,
        )
        if not decode_ns:
            return prefill
        reading_ns = min(decode_ns, model.reading_ns(MATRIX_ROWS))
        whole_ns = prefill + steps * decode_ns - (1 - model.interference) * min(prefill, steps * reading_ns)
        if not self.paced_step_ns or whole_ns <= steps * self.paced_step_ns:
            return whole_ns
        beside_ns = max(model.most_prefill_ns(self.paced_step_ns, decode_ns, reading_ns) - model.prefill_fixed_ns, 0.0)
        work_ns = prefill - steps * model.prefill_fixed_ns
        return max(whole_ns, work_ns / max(beside_ns, LEAST_BESIDE * self.paced_step_ns) * self.paced_step_ns)

    def filled_tokens(self) -> float:
        """Prompt tokens that keep it busy until the next prompt is there: a step, and what it computes meanwhile."""
        chunk = self.chunk_tokens
        step_ns = self.prompt_ns(chunk, chunk * chunk)
        return chunk * (1 + HAND_OVER_S * 1e9 / step_ns) if step_ns else inf

    def decode_ns(self, sequences: float, kv_tokens: float) -> float:
        """One decode step over `sequences` that read `kv_tokens` of KV; 0 without any."""
        model = self.step_time
        if sequences <= 0:
            return 0.0
        return model.reading_ns(sequences) + sequences * model.decode_sequence_ns + kv_tokens * model.decode_kv_token_ns


LEAST_BESIDE: Final = 0.1
"""Of a step that decodes fill, what prompts get all the same in the long run."""
UNKNOWN_SPEED: Final = Speed(StepTimeModel(*[0.0] * 7), chunk_tokens=1)
"""Nothing can be predicted of it: everything takes no time, so that only load and turns decide."""
