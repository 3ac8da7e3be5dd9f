"""How much one step takes on: which transferred sequences join the decodes, how many prompt tokens go beside them.

Pure. The rules are in libs/policy/worker/joining.py and slack.py; here they meet the sequences of an engine, ours or
vLLM's.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Final, Protocol, TypeVar

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.joining import AnswerLengths, Decoding, beside, joins
from libs.policy.worker.saturation import trial_work
from libs.policy.worker.slack import TokenLine, prefill_chunk, step_limit_ns

YIELDING_PART: Final = 4
"""Yielding prompts get a chunk divided by this, as a running step keeps a person waiting until its end."""
PEOPLE_STAY_NS: Final = 60_000_000_000
"""After this long without a person's prompt they get whole chunks, which the device computes faster."""


class Paced(Protocol):
    """A sequence, as far as its pace goes."""

    joined: bool
    """It has decoded here: what has begun is not held back."""
    held_since_ns: int
    """When it could first have decoded here; 0: not yet."""

    @property
    def length(self) -> int:
        """Tokens so far."""
        ...

    @property
    def computed(self) -> int:
        """How many of them have KV."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether its blocks hold its tokens so far."""
        ...

    @property
    def transferred(self) -> bool:
        """Its prompt was computed elsewhere."""
        ...

    @property
    def yields(self) -> bool:
        """Its prompt waits while another's can be computed."""
        ...

    @property
    def tpot_target_ns(self) -> int:
        """Time per output token that is wanted; 0: none."""
        ...

    @property
    def line(self) -> TokenLine | None:
        """When its tokens are due; None without a target, or before its first token."""
        ...

    @property
    def output_tokens(self) -> int:
        """Tokens that were sampled so far."""
        ...

    @property
    def most_left(self) -> int:
        """Tokens that may be sampled yet."""
        ...

    @property
    def kind(self) -> str:
        """Whose answers it is expected to resemble; empty: anybody's."""
        ...

    @property
    def first_token_due_ns(self) -> int:
        """When its first token is wanted; 0: it is out, or nobody has said."""
        ...


SomePaced = TypeVar("SomePaced", bound=Paced)


class Pace:
    """Within the prompt budget asked for; without a step-time model, or targets to keep, all of that is used."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        """Prompt tokens that a step computes at most, whatever the budget: see libs/policy/worker/saturation.py."""
        self.budget_tokens = chunk_tokens
        self.step_time: StepTimeModel | None = None
        self._prompts_stand_since_ns = 0
        self._people_until_ns = 0
        self._lengths = AnswerLengths()

    def note_end(self, output_tokens: int, kind: str) -> None:
        """An answer has come to its end; one of a single token is a prompt that was computed for others."""
        if output_tokens > 1:
            self._lengths.ended(output_tokens, kind)

    def note_prompt(self, sequence: Paced, now_ns: int) -> None:
        """A sequence has come; one that does not yield and has its prompt computed here is a sign of more to come."""
        if not sequence.yields and not sequence.transferred:
            self._people_until_ns = now_ns + PEOPLE_STAY_NS

    def decodes(self, ready: Iterable[SomePaced], now_ns: int) -> list[SomePaced]:
        """Those that decode in the next step; a transferred one that would break others' pace waits, for a while."""
        running: list[SomePaced] = []
        newcomers: list[SomePaced] = []
        for sequence in ready:
            if sequence.has_room:
                (running if sequence.joined or not sequence.transferred else newcomers).append(sequence)
        if newcomers:
            self._join(running, newcomers, now_ns)
        return running

    def _join(self, running: list[SomePaced], newcomers: list[SomePaced], now_ns: int) -> None:
        """Let newcomers decode beside those that run, first come, first served."""
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
        """Prompt tokens of the next step, beside the decodes of `running`. `coming`: sequences whose KV is on its way
        here, that may join any moment."""
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
        """Whether a step that measures, in which nothing decodes, keeps `running` waiting no longer than a prompt may.

        They wait for the trial and then for their own step.
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
