"""The pace of an engine: which transferred sequences join the decodes, and how many prompt tokens go beside them.

The rules are in libs/policy/worker/joining.py and slack.py. This module applies them to the sequences of our engine
or of vLLM.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final, Protocol, TypeVar

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.joining import AnswerLengths, Decoding, beside, joins
from libs.policy.worker.saturation import trial_work
from libs.policy.worker.slack import TokenLine, prefill_chunk, step_limit_ns

# A running step keeps a person waiting until its end, so yielding prompts get this fraction of a chunk.
YIELDING_PART: Final = 4
# After this long without a person's prompt, yielding prompts get whole chunks, which are faster to compute.
PEOPLE_STAY_NS: Final = 60_000_000_000


class Paced(Protocol):
    """A sequence, as far as pacing depends on it."""

    joined: bool
    """Whether it has decoded here; sequences that have begun are never held back."""
    held_since_ns: int
    """The time at which it could first have decoded here; 0 before that."""

    @property
    def length(self) -> int: ...

    @property
    def computed(self) -> int:
        """The number of tokens that have KV."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether its blocks hold all its tokens so far."""
        ...

    @property
    def transferred(self) -> bool:
        """Whether its prompt was computed on another worker."""
        ...

    @property
    def yields(self) -> bool:
        """Whether its prompt waits while another one can be computed."""
        ...

    @property
    def tpot_target_ns(self) -> int:
        """The target time per output token; 0 if there is none."""
        ...

    @property
    def line(self) -> TokenLine | None:
        """The due times of its tokens; None without a target, or before its first token."""
        ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def most_left(self) -> int:
        """The most tokens that may still be sampled."""
        ...

    @property
    def kind(self) -> str:
        """The kind whose answers predict its length; empty for all kinds."""
        ...

    @property
    def first_token_due_ns(self) -> int:
        """The time at which its first token is due; 0 if it is out or has no deadline."""
        ...


SomePaced = TypeVar("SomePaced", bound=Paced)


class Pace:
    """The choice of each step's decodes and prompt tokens within the prompt budget.

    Without a step-time model or targets, the whole budget is used.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        """The most prompt tokens of a step under any budget (see libs/policy/worker/saturation.py)."""
        self.budget_tokens = chunk_tokens
        self.step_time: StepTimeModel | None = None
        self._prompts_stand_since_ns = 0
        self._people_until_ns = 0
        self._lengths = AnswerLengths()

    def note_end(self, output_tokens: int, kind: str) -> None:
        """Record the length of an answer that has ended.

        An answer of one token is ignored: its prompt was computed for another worker.
        """
        if output_tokens > 1:
            self._lengths.ended(output_tokens, kind)

    def note_prompt(self, sequence: Paced, now_ns: int) -> None:
        """Record the arrival of a sequence.

        A prompt to compute here that does not yield suggests that more of them follow.
        """
        if not sequence.yields and not sequence.transferred:
            self._people_until_ns = now_ns + PEOPLE_STAY_NS

    def decodes(self, ready: Iterable[SomePaced], now_ns: int) -> list[SomePaced]:
        """Return the sequences that decode in the next step.

        A transferred one that would break the pace of others waits for a bounded time.
        """
        running: list[SomePaced] = []
        newcomers: list[SomePaced] = []
        for sequence in ready:
            if sequence.has_room:
                (running if sequence.joined or not sequence.transferred else newcomers).append(sequence)
        if newcomers:
            self._join(running, newcomers, now_ns)
        return running

    def _join(self, running: list[SomePaced], newcomers: list[SomePaced], now_ns: int) -> None:
        """Add newcomers to the running sequences, first come, first served."""
        model, work = self.step_time, _work(running)
        decoding = [_decoding(sequence) for sequence in running]
        for sequence in newcomers:
            sequence.held_since_ns = sequence.held_since_ns or now_ns
        for sequence in newcomers:
            held_ns, due_ns = now_ns - sequence.held_since_ns, sequence.first_token_due_ns
            if model is not None and not joins(
                model, work, decoding, sequence.length, self._lengths, held_ns=held_ns, due_ns=due_ns, now_ns=now_ns
            ):
                break
            sequence.joined = True
            running.append(sequence)
            work = beside(work, sequence.length)
            decoding.append(_decoding(sequence))

    def prompt_tokens(
        self, running: Items[Paced], prompts: Items[Paced], now_ns: int, coming: Iterable[Paced] = ()
    ) -> int:
        """Return the number of prompt tokens for the next step, beside the decodes of `running`.

        `coming` are sequences whose KV is in transit to this worker; they may join at any moment.
        """
        tokens = min(self.budget_tokens, self.chunk_tokens)
        if now_ns < self._people_until_ns and all(prompt.yields for prompt in prompts):
            tokens = min(tokens, max(self.chunk_tokens // YIELDING_PART, 1))
        model = self.step_time
        spans = [(each.computed, each.length) for each in prompts if each.has_room and each.length > each.computed]
        if model is None or not spans or not tokens:
            self._prompts_stand_since_ns = 0
            return tokens
        lines = [line for sequence in running if (line := sequence.line) is not None]
        since_ns = self._prompts_stand_since_ns or now_ns
        tokens = prefill_chunk(
            model,
            _work(running),
            lines,
            spans,
            most_tokens=tokens,
            waited_ns=now_ns - since_ns,
            now_ns=now_ns,
            coming_tpot_ns=min((each.tpot_target_ns for each in coming if each.tpot_target_ns), default=0),
        )
        self._prompts_stand_since_ns = 0 if tokens else since_ns
        return tokens

    def has_time_for_trial(self, tokens: int, running: Items[Paced], now_ns: int) -> bool:
        """Return whether `running` can wait for a trial step and its own step within its targets.

        Nothing decodes in a trial step.
        """
        if self.step_time is None or not running:
            return True
        decode_ns = self.step_time.decode_ns(_work(running))
        lines = [line for sequence in running if (line := sequence.line) is not None]
        limit_ns = step_limit_ns(decode_ns, lines, now_ns=now_ns)
        return self.step_time.prefill_ns(trial_work(tokens)) + decode_ns <= limit_ns


def _decoding(sequence: Paced) -> Decoding:
    return Decoding(sequence.output_tokens, sequence.most_left, sequence.tpot_target_ns, sequence.line, sequence.kind)


def _work(running: Items[Paced]) -> StepWork:
    return StepWork(decode_sequences=len(running), decode_kv_tokens=sum(sequence.length for sequence in running))
