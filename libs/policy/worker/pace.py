"""The pace of an engine: which transferred sequences join the decodes, and how many prompt tokens are computed beside
them.

The same rules apply to the sequences of Fulcrum's engine and of vLLM.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final, Protocol, TypeVar

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.saturation import trial_work

MAX_STEP_NS: Final = 400_000_000
# While a sequence with a TPOT target decodes, prompts make no step longer than MAX_STEP_NS or this multiple of the
# tightest target, however far ahead all sequences are. A joining sequence has to wait for the step. Only prompts that
# have waited for MAX_HOLD_NS may exceed it.
MAX_STEP_TPOTS: Final = 3
# While sequences are in transit to this worker, prompts make no step longer than this multiple of their tightest
# target. The first token of a joining sequence has been sent, and its second one waits for the step.
MAX_JOINED_TPOTS: Final = 1.5
# The share of TPOT that prompts leave to sequences beside them; without it, late sequences never catch up.
IN_HAND: Final = 0.05
MAX_HOLD_NS: Final = 2_000_000_000
"""The longest time for which a transferred sequence is held back, and for which a prompt waits until some of it is
computed.
"""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """The due times of a running sequence's tokens: the first at `anchor_ns`, then one every `tpot_ns`."""

    anchor_ns: int
    tpot_ns: int
    tokens: int
    """The number of tokens since the one at the anchor."""

    @property
    def due_ns(self) -> int:
        return self.anchor_ns + self.tpot_ns * (self.tokens + 1)


def prefill_chunk(
    model: StepTimeModel,
    decodes: StepWork,
    lines: Sequence[TokenLine],
    prompts: Sequence[tuple[int, int]],
    *,
    most_tokens: int,
    waited_ns: int,
    now_ns: int,
    coming_tpot_ns: int = 0,
) -> int:
    """Return the most prompt tokens that the next step may compute beside `decodes` without breaking any line.

    Prompts that have waited for `MAX_HOLD_NS` get as much time as the decodes take. If that is too short for one
    token, they get the tokens that take no longer than one.

    `lines` belong to the running sequences that have a target. `prompts` are (first token to compute, one past the
    last) in serving order. `waited_ns` is the time since one of their tokens was computed. `coming_tpot_ns` is the
    tightest target of sequences whose KV is in transit to this worker; 0 if there is none.
    """
    if (not decodes.decode_sequences and not coming_tpot_ns) or (decodes.decode_sequences and not lines):
        return max(min(most_tokens, sum(end - start for start, end in prompts)), 0)
    if most_tokens <= 0 or not prompts:
        return 0
    decode_ns = model.decode_ns(decodes) if lines else 0.0
    hiding_ns = model.hiding_ns(decodes.decode_sequences) if lines else 0.0
    limit_ns = step_limit_ns(decode_ns, lines, now_ns=now_ns)
    if coming_tpot_ns:
        limit_ns = min(limit_ns, max(MAX_JOINED_TPOTS * coming_tpot_ns, decode_ns))
    if waited_ns >= MAX_HOLD_NS:
        one_ns = model.mixed_ns(model.beside_ns(1, 2 * prompts[0][0] + 1), decode_ns, hiding_ns)
        limit_ns = max(limit_ns, 2 * decode_ns, one_ns)
    return _Step(model, decode_ns, hiding_ns, limit_ns).most_prompt_tokens(prompts, most_tokens)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of at most `limit_ns` that decodes and computes prompts beside the decodes."""

    model: StepTimeModel
    decode_ns: float
    hiding_ns: float
    """The part of the decodes in which prompts can hide (see `StepTimeModel`)."""
    limit_ns: float

    def most_prompt_tokens(self, prompts: Sequence[tuple[int, int]], most_tokens: int) -> int:
        """Return how many tokens fit, at most `most_tokens`, when prompts are served in order."""
        tokens = squared = 0
        for start, end in prompts:
            whole = min(end - start, most_tokens - tokens)
            if not self._fits(tokens + whole, squared + whole * (2 * start + whole)):
                return tokens + self._part(tokens, squared, start, whole)
            tokens += whole
            squared += whole * (2 * start + whole)
            if tokens == most_tokens:
                break
        return tokens

    def _fits(self, tokens: int, squared: int) -> bool:
        prefill_ns = self.model.beside_ns(tokens, squared)
        return self.model.mixed_ns(prefill_ns, self.decode_ns, self.hiding_ns) <= self.limit_ns

    def _part(self, tokens: int, squared: int, start: int, whole: int) -> int:
        """Return how many tokens of the prompt from `start` on, fewer than `whole`, fit beside prompts taken whole.

        The remaining time equals b·t + c·t², which is solved for t in the form without cancellation. A search
        corrects the result where rounding puts it on the wrong side of the limit.
        """

        def fits(more: int) -> bool:
            return self._fits(tokens + more, squared + more * (2 * start + more))

        if whole == 1 or not fits(1):
            return 0
        model = self.model
        most_ns = model.most_prefill_ns(self.limit_ns, self.decode_ns, self.hiding_ns)
        if not model.saturating_sequences:  # below such a floor, more tokens are free
            most_ns = max(most_ns, model.prefill_floor_ns)
        before_ns = model.prefill_fixed_ns + model.prefill_token_ns * tokens + model.prefill_token_squared_ns * squared
        left_ns = max(most_ns - before_ns, 0.0)
        token_ns = model.prefill_token_ns + 2 * model.prefill_token_squared_ns * start
        divisor = token_ns + sqrt(token_ns * token_ns + 4 * model.prefill_token_squared_ns * left_ns)
        more = max(int(min(2 * left_ns / divisor, whole - 1)), 1) if divisor else 1
        if fits(more) and (more + 1 == whole or not fits(more + 1)):
            return more
        return largest(fits, whole - 1)


def step_limit_ns(decode_ns: float, lines: Sequence[TokenLine], *, now_ns: int) -> float:
    """Return the time limit of the next step, given the time that its decodes take alone.

    A sequence with enough slack bounds the step by that slack, less `IN_HAND` where possible. For one with less slack,
    or a late one, half of the difference is used to catch up, if decode can meet its target. Otherwise a late sequence
    sets no bound, since holding prompts back would not help it.
    """
    tightest_ns = min((line.tpot_ns for line in lines if line.tpot_ns >= decode_ns), default=MAX_STEP_NS)
    limit_ns = float(min(MAX_STEP_NS, MAX_STEP_TPOTS * tightest_ns))
    for line in lines:
        slack_ns = line.due_ns - now_ns
        spare_ns = slack_ns - IN_HAND * line.tpot_ns * (line.tokens + 1)
        if slack_ns >= decode_ns:
            limit_ns = min(limit_ns, slack_ns)
        if spare_ns >= decode_ns:
            limit_ns = min(limit_ns, spare_ns)
        elif line.tpot_ns >= decode_ns:
            limit_ns = min(limit_ns, (line.tpot_ns + decode_ns) / 2)
    return limit_ns


def largest_batch(model: StepTimeModel, tpot_ns: float, kv_tokens_each: int, most: int) -> int:
    """Return how many sequences, at most `most`, can decode together within a TPOT target; 0 if one alone cannot."""
    return largest(
        lambda batch: (
            model.decode_ns(StepWork(decode_sequences=batch, decode_kv_tokens=batch * kv_tokens_each)) <= tpot_ns
        ),
        most,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number in 1..most that fits, or 0 if 1 does not; all numbers below it must fit too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


KEPT_LENGTHS: Final = 128
"""The number of recent answers whose lengths are kept for each kind."""
# The kind whose last answer is the oldest is dropped first.
MOST_KINDS: Final = 256
# With fewer answers of its own kind, a sequence is judged by the answers of all kinds.
ENOUGH_LENGTHS: Final = 16
EVERY_KIND: Final = ""
LIKELY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Decoding:
    """The properties of a running sequence that limit which others may join it."""

    tokens: int
    most_left: int
    """The maximum number of output tokens still to come."""
    tpot_ns: int = 0
    """The TPOT target; 0 if there is none."""
    line: TokenLine | None = None
    """The due times of the tokens; None without a target, or before the first token here."""
    kind: str = EVERY_KIND
    """Tenant and class, whose earlier answers predict the length of this one."""

    def keeps(self, step_ns: float, now_ns: int) -> bool:
        """Return whether the last token would be in time if every step took `step_ns` and the full length were used."""
        if not self.tpot_ns:
            return True
        line = self.line or TokenLine(now_ns, self.tpot_ns, 0)
        last_due_ns = line.anchor_ns + line.tpot_ns * (line.tokens + self.most_left)
        return now_ns + self.most_left * step_ns <= last_due_ns


class AnswerLengths:
    """The lengths of the latest answers of each kind, from which the ends of running ones are predicted."""

    def __init__(self) -> None:
        # The kind of the most recent answer comes last; `EVERY_KIND` holds all answers.
        self._latest: dict[str, deque[int]] = {}
        self._sorted: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Return the number of known kinds, counting `EVERY_KIND` as one."""
        return len(self._latest)

    def ended(self, tokens: int, kind: str = EVERY_KIND) -> None:
        """Record an answer of `kind` that ended after `tokens` output tokens."""
        for each in dict.fromkeys((kind, EVERY_KIND)):
            latest = self._latest.pop(each, None) or deque(maxlen=KEPT_LENGTHS)
            latest.append(tokens)
            self._latest[each] = latest
            self._sorted.pop(each, None)
        if len(self._latest) > MOST_KINDS:
            oldest = next(iter(self._latest))
            del self._latest[oldest]
            self._sorted.pop(oldest, None)

    def one_ends(self, running: Sequence[Decoding], steps: float) -> bool:
        """Return whether one of these has likely ended after `steps` steps.

        Before any answer has ended, one step suffices.
        """
        if any(each.most_left <= steps for each in running):
            return True
        if not self._latest:
            return steps >= 1
        none_ends = 1.0
        for each in running:
            # The share of answers longer than this one so far that would still run after `steps`.
            lengths = self._of(each.kind)
            longer = len(lengths) - bisect_right(lengths, each.tokens)
            beyond = len(lengths) - bisect_right(lengths, each.tokens + steps)
            none_ends *= beyond / longer if longer else 1.0
        return none_ends <= 1 - LIKELY

    def _of(self, kind: str) -> list[int]:
        """Return the sorted lengths from which to predict answers of a kind."""
        if len(self._latest.get(kind, ())) < ENOUGH_LENGTHS:
            kind = EVERY_KIND
        found = self._sorted.get(kind)
        if found is None:
            found = self._sorted[kind] = sorted(self._latest[kind])
        return found


def joins(
    model: StepTimeModel,
    decodes: StepWork,
    running: Sequence[Decoding],
    kv_tokens: int,
    lengths: AnswerLengths,
    *,
    held_ns: int,
    due_ns: int,
    now_ns: int,
) -> bool:
    """Return whether a transferred sequence of `kv_tokens` may decode beside `running`, whose work is `decodes`.

    It waits only if it would make a running sequence miss a target that is otherwise met, and if waiting helps. Waiting
    helps if one of them likely ends within MAX_HOLD_NS and before the newcomer's first token is due at `due_ns` (0:
    already sent). A newcomer that is already late for its first token may wait for the full MAX_HOLD_NS.
    """
    most_ns = float(MAX_HOLD_NS - held_ns)
    if most_ns <= 0 or not running:
        return True
    before_ns = model.decode_ns(decodes)
    after_ns = model.decode_ns(beside(decodes, kv_tokens))
    if not any(each.keeps(before_ns, now_ns) and not each.keeps(after_ns, now_ns) for each in running):
        return True
    in_time_ns = due_ns - now_ns - after_ns
    if due_ns and in_time_ns >= 0:
        most_ns = min(most_ns, in_time_ns)
    return not lengths.one_ends(running, most_ns / max(before_ns, 1.0))


def beside(decodes: StepWork, kv_tokens: int) -> StepWork:
    return StepWork(
        decode_sequences=decodes.decode_sequences + 1, decode_kv_tokens=decodes.decode_kv_tokens + kv_tokens
    )


# An interactive request waits for the end of a running step, so yielding prompts get this fraction of a chunk.
YIELDING_PART: Final = 4
# After this long without an interactive prompt, yielding prompts get whole chunks, which are faster to compute.
PEOPLE_STAY_NS: Final = 60_000_000_000


class Paced(Protocol):
    """The properties of a sequence on which pacing depends."""

    joined: bool
    """True if the sequence has decoded here; sequences that have begun are never held back."""
    held_since_ns: int
    """The time at which the sequence could first have decoded here; 0 before that."""

    @property
    def length(self) -> int: ...

    @property
    def computed(self) -> int:
        """The number of tokens that have KV."""
        ...

    @property
    def has_room(self) -> bool:
        """Return whether the sequence's blocks have room for all its tokens so far."""
        ...

    @property
    def transferred(self) -> bool:
        """Return whether the sequence's prompt was computed on another worker."""
        ...

    @property
    def yields(self) -> bool:
        """Return whether the sequence's prompt waits while another one can be computed."""
        ...

    @property
    def tpot_target_ns(self) -> int:
        """The target time per output token; 0 if there is none."""
        ...

    @property
    def line(self) -> TokenLine | None:
        """The due times of the sequence's tokens; None without a target, or before its first token."""
        ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def most_left(self) -> int:
        """The maximum number of tokens that may still be sampled."""
        ...

    @property
    def kind(self) -> str:
        """The kind of answers that predict its length; empty for all kinds."""
        ...

    @property
    def first_token_due_ns(self) -> int:
        """The time at which the sequence's first token is due; 0 if it was sent or has no deadline."""
        ...


SomePaced = TypeVar("SomePaced", bound=Paced)


class Pace:
    """The choice of each step's decodes and prompt tokens within the prompt budget.

    Without a step-time model or targets, the whole budget is used.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        """The maximum number of prompt tokens of a step under any budget (see libs/policy/worker/saturation.py)."""
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

        A prompt that is computed here and does not yield suggests that more will follow.
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
        self, running: Sequence[Paced], prompts: Sequence[Paced], now_ns: int, coming: Iterable[Paced] = ()
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

    def has_time_for_trial(self, tokens: int, running: Sequence[Paced], now_ns: int) -> bool:
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


def _work(running: Sequence[Paced]) -> StepWork:
    return StepWork(decode_sequences=len(running), decode_kv_tokens=sum(sequence.length for sequence in running))
