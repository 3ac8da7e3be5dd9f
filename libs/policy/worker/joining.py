"""The decision whether a transferred sequence joins the running decodes at once or waits for one of them to end."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.slack import MAX_HOLD_NS, TokenLine

KEPT_LENGTHS: Final = 128
"""The number of recent answers whose lengths are kept for each kind."""
# The kind whose last answer ended longest ago is dropped first.
MOST_KINDS: Final = 256
# With fewer answers of its own kind, a sequence is judged by the answers of all kinds.
ENOUGH_LENGTHS: Final = 16
EVERY_KIND: Final = ""
LIKELY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Decoding:
    """A running sequence, reduced to what decides whether another may join it."""

    tokens: int
    most_left: int
    """The most output tokens still to come."""
    tpot_ns: int = 0
    """The TPOT target; 0 if there is none."""
    line: TokenLine | None = None
    """The due times of its tokens; None without a target, or before its first token here."""
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
        # The kind that ended an answer last comes last; `EVERY_KIND` holds all answers.
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
            # The share of answers longer than this one is now that would still run after `steps`.
            lengths = self._of(each.kind)
            longer = len(lengths) - bisect_right(lengths, each.tokens)
            beyond = len(lengths) - bisect_right(lengths, each.tokens + steps)
            none_ends *= beyond / longer if longer else 1.0
        return none_ends <= 1 - LIKELY

    def _of(self, kind: str) -> list[int]:
        """Return the sorted lengths by which to judge a kind."""
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

    It waits only if it would make a running sequence miss a target that is otherwise kept, and if waiting helps.
    Waiting helps if one of them likely ends within MAX_HOLD_NS and before the newcomer's first token is due at
    `due_ns` (0: already out). A newcomer that is already late for its first token may wait for the full
    MAX_HOLD_NS.
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
    """Return the work of the decodes with one more sequence."""
    return StepWork(
        decode_sequences=decodes.decode_sequences + 1, decode_kv_tokens=decodes.decode_kv_tokens + kv_tokens
    )
