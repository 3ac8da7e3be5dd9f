"""How much one step takes on: which transferred sequences join the decodes, how many prompt tokens go beside them.

Pure. The rules are in libs/perfmodel/slack.py; here they meet the sequences of an engine.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final

from libs.engine.port import EngineRequest
from libs.engine.sequence import Sequence
from libs.perfmodel import StepTimeModel, StepWork
from libs.perfmodel.slack import TokenLine, beside, joins, prefill_chunk

YIELDING_PART: Final = 4
"""Prompts that yield get one part of so many of a chunk, as a step that has begun keeps a person waiting to its end."""
PEOPLE_STAY_NS: Final = 60_000_000_000
"""Once nobody's prompt has come for so long, they get whole chunks, which the device computes faster."""


class Pace:
    """Within the prompt budget asked for; without a step-time model, or targets to keep, all of that is used."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        """Prompt tokens that a step computes at most, whatever the budget: see libs/perfmodel/saturation.py."""
        self.budget_tokens = chunk_tokens
        self.step_time: StepTimeModel | None = None
        self._prompts_stand_since_ns = 0
        self._people_until_ns = 0

    def note_prompt(self, request: EngineRequest, now_ns: int) -> None:
        """A request has come; one that does not yield and has its prompt computed here is a sign of more to come."""
        if not request.yields and request.kv is None:
            self._people_until_ns = now_ns + PEOPLE_STAY_NS

    def decodes(self, ready: Iterable[Sequence], now_ns: int) -> list[Sequence]:
        """Those that decode in the next step; a transferred one that would break others' pace waits, for a while."""
        running: list[Sequence] = []
        newcomers: list[Sequence] = []
        for sequence in ready:
            if sequence.has_room:
                (running if sequence.joined or not sequence.request.kv else newcomers).append(sequence)
        if newcomers:
            self._join(running, newcomers, now_ns)
        return running

    def _join(self, running: list[Sequence], newcomers: list[Sequence], now_ns: int) -> None:
        """Let newcomers decode beside those that run, first come, first served."""
        model, work = self.step_time, _work(running)
        targets = [sequence.request.tpot_target_ns for sequence in running if sequence.request.tpot_target_ns]
        for sequence in newcomers:
            sequence.held_since_ns = sequence.held_since_ns or now_ns
        for sequence in newcomers:
            held_ns = now_ns - sequence.held_since_ns
            if model is not None and not joins(model, work, targets, sequence.length, held_ns=held_ns):
                break
            sequence.joined = True
            running.append(sequence)
            work = beside(work, sequence.length)
            if sequence.request.tpot_target_ns:
                targets.append(sequence.request.tpot_target_ns)

    def prompt_tokens(self, running: Items[Sequence], prompts: Items[Sequence], now_ns: int) -> int:
        """Prompt tokens of the next step, beside the decodes of `running`."""
        tokens = min(self.budget_tokens, self.chunk_tokens)
        if now_ns < self._people_until_ns and all(prompt.request.yields for prompt in prompts):
            tokens = min(tokens, max(self.chunk_tokens // YIELDING_PART, 1))
        model = self.step_time
        spans = [(prompt.computed, prompt.length) for prompt in prompts if prompt.has_room and prompt.pending]
        if model is None or not spans or not tokens:
            self._prompts_stand_since_ns = 0
            return tokens
        lines = [line for sequence in running if (line := _line(sequence)) is not None]
        since_ns = self._prompts_stand_since_ns or now_ns
        tokens = prefill_chunk(
            model, _work(running), lines, spans, most_tokens=tokens, waited_ns=now_ns - since_ns, now_ns=now_ns
        )
        self._prompts_stand_since_ns = 0 if tokens else since_ns
        return tokens


def _work(running: Items[Sequence]) -> StepWork:
    return StepWork(decode_sequences=len(running), decode_kv_tokens=sum(sequence.length for sequence in running))


def _line(sequence: Sequence) -> TokenLine | None:
    target_ns = sequence.request.tpot_target_ns
    if not target_ns or not sequence.line_from_ns:
        return None
    return TokenLine(sequence.line_from_ns, target_ns, sequence.length - sequence.line_from_length)
