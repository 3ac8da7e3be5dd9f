"""Whether a transferred sequence decodes beside those that run at once, or waits until one of them has ended. Pure."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.slack import MAX_HOLD_NS, TokenLine

KEPT_LENGTHS: Final = 128
"""Answers of a kind whose length is remembered."""
MOST_KINDS: Final = 256
"""Kinds that are remembered; the one that ended no answer for longest is forgotten."""
ENOUGH_LENGTHS: Final = 16
"""Answers of its own kind by which a sequence is judged; with fewer, by those of all kinds."""
EVERY_KIND: Final = ""
LIKELY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Decoding:
    """A running sequence, as far as a newcomer concerns it."""

    tokens: int
    """Output tokens so far."""
    most_left: int
    """Output tokens to come, at most."""
    tpot_ns: int = 0
    """Its TPOT target; 0: none."""
    line: TokenLine | None = None
    """When its tokens are due; None without a target, or before its first token here."""
    kind: str = EVERY_KIND
    """Whose answers it is expected to resemble: tenant and class."""

    def keeps(self, step_ns: float, now_ns: int) -> bool:
        """Whether its last token, were it to use all that it may, comes in time where every step takes so long."""
        if not self.tpot_ns:
            return True
        line = self.line or TokenLine(now_ns, self.tpot_ns, 0)
        last_due_ns = line.anchor_ns + line.tpot_ns * (line.tokens + self.most_left)
        return now_ns + self.most_left * step_ns <= last_due_ns


class AnswerLengths:
    """How long the latest answers of each kind were: what is known of when a running one will end."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[int]] = {}
        """By kind, the one that ended an answer last at the end; and under `EVERY_KIND` of all."""
        self._sorted: dict[str, list[int]] = {}

    def __len__(self) -> int:
        """Kinds that are known, all together being one."""
        return len(self._latest)

    def ended(self, tokens: int, kind: str = EVERY_KIND) -> None:
        """Record an answer of a kind that ended after `tokens` output tokens."""
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
        """Whether one of these has likely ended after `steps` steps; before any answer has ended, one step suffices."""
        if any(each.most_left <= steps for each in running):
            return True
        if not self._latest:
            return steps >= 1
        none_ends = 1.0
        for each in running:
            # Of the answers that grew longer than this one is by now, those that had ended by then.
            lengths = self._of(each.kind)
            longer = len(lengths) - bisect_right(lengths, each.tokens)
            beyond = len(lengths) - bisect_right(lengths, each.tokens + steps)
            none_ends *= beyond / longer if longer else 1.0
        return none_ends <= 1 - LIKELY

    def _of(self, kind: str) -> list[int]:
        """Lengths to judge that kind by, in order."""
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
    """Whether a transferred sequence of `kv_tokens` may decode beside `running`, whose work is `decodes`.

    It waits where it would make somebody miss a target who keeps it without the newcomer, and where waiting is of use:
    one of them has likely ended before it was held for MAX_HOLD_NS, and in time for its own first token, due at
    `due_ns` (0: it is out). A newcomer that is late for that already may wait as long as any.
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
    """The decodes with one more."""
    return StepWork(
        decode_sequences=decodes.decode_sequences + 1, decode_kv_tokens=decodes.decode_kv_tokens + kv_tokens
    )
