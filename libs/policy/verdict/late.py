"""The cause for answers that miss their targets although no phase is short of workers."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from libs.policy.newest import put_newest
from libs.policy.verdict.causes import Cause, CauseCode, figure
from libs.policy.verdict.state import Grade, ModelState, Threshold

LATE: Final = Threshold(0.05, 0.03)
"""The share of requests over a target. Above the first value, the 95th percentile is over the target."""
LEAST_LATE: Final = 3
"""The number of late requests below which a share may be chance, unless one of them is still waiting."""
OVERDUE_NS: Final = 500_000_000
"""The time for which some request must have been overdue for a few late ones to count."""
# After all causes that explain why requests are late.
RANK: Final = 5


@dataclass(frozen=True, slots=True)
class Punctuality:
    """The recent requests with a target, and those that missed it."""

    requests: int
    late: int
    waits: bool = False
    """True if some request has been overdue throughout the last `OVERDUE_NS`, and still waits."""

    @property
    def grade(self) -> Grade:
        share = self.late / self.requests if self.requests else 0.0
        if self.late >= LEAST_LATE:
            return LATE.grade(share)
        # One late request of thirty would otherwise keep the cause alive while it waits.
        if share <= LATE.fire:
            return Grade.CLEAR
        return Grade.FIRE if self.waits else Grade.HOLD


LATE_NS: Final = 3_000_000_000
"""The span whose first tokens are judged."""
MAX_ANSWERED: Final = 64
"""The bound on evaluations with late first tokens that are kept per model."""
MAX_MODELS: Final = 256
"""The bound on the models whose late first tokens are kept; later ones replace the oldest."""


@dataclass(slots=True)
class _Overdue:
    """One model's requests whose first token is overdue, and the evaluations at which such tokens had arrived."""

    waiting: int = 0
    seen_ns: int = 0
    """The time of the last evaluation."""
    since_ns: int | None = None
    """The time since which some request has been overdue; None if none is."""
    answered: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_ANSWERED))
    """Pairs of a time and the number of overdue first tokens since the evaluation before."""


class FirstTokens:
    """The first tokens of interactive requests, late or in time, over the last `LATE_NS`.

    A request is reported at its end, which may be long after its first token. Until then a late request is known only
    from gateways, which counted it as overdue while it waited.
    """

    def __init__(self) -> None:
        self._overdue: OrderedDict[str, _Overdue] = OrderedDict()

    def look(
        self, model: str, reported: Punctuality, *, ended: int, waiting: int, overdue: int, now_ns: int
    ) -> Punctuality:
        """Return the requests with a first token in the span or without one yet, and the number of late ones.

        - reported: those that have ended and had their first token in the span
        - ended: all requests that ended in the span, about as many as had a first token
        - waiting, overdue: requests without a first token, and those of them that are late
        """
        own = self._overdue.get(model) or _Overdue()
        put_newest(self._overdue, model, own, MAX_MODELS)
        if overdue < own.waiting:
            own.answered.append((now_ns, own.waiting - overdue))
        own.waiting = overdue
        if not overdue:
            own.since_ns = None
        elif own.since_ns is None or now_ns - own.seen_ns > OVERDUE_NS:
            own.since_ns = now_ns  # it is unknown whether the same request was overdue all the time
        own.seen_ns = now_ns
        waits = own.since_ns is not None and now_ns - own.since_ns >= OVERDUE_NS
        late = max(sum(count for at_ns, count in own.answered if at_ns > now_ns - LATE_NS), reported.late)
        answered = max(ended, reported.requests + late - reported.late)
        return Punctuality(answered + waiting, late + overdue, waits)


def late_causes(state: ModelState, first: Punctuality, tokens: Punctuality) -> Iterator[Cause]:
    """Yield the cause if it holds or is between its thresholds.

    `first` counts requests by TTFT, including those that still wait for a first token; `tokens` counts answers by TPOT.
    """
    grade = max(first.grade, tokens.grade)
    if grade is Grade.CLEAR:
        return
    prefill, decode = figure(state.pressures.prefill), figure(state.pressures.decode)
    although = f"although prefill pressure is {prefill} and decode pressure {decode}"
    where = "`fulcrum request --slowest` shows where their time goes."
    if first.grade is grade:
        # Workers compute prompts that can still meet their target before those that cannot (ADR 49). Without a backlog
        # this explains nothing: a single prompt may wait for time beside a worker's decodes.
        order = "Late prompts wait behind those that can still be in time: " if state.has_backlog else ""
        sentence = (
            f"Late: {first.late:,} of {first.requests:,} requests {_are(first.late)} over their TTFT target of"
            f" {state.ttft_ns / 1e9:g} s, {although}. {order}{where}"
        )
    else:
        # KV in transit to a decode worker counts too: the client waits for it between two tokens.
        sentence = (
            f"Late: {tokens.late:,} of {tokens.requests:,} answers {_are(tokens.late)} over their TPOT target of"
            f" {state.work.tpot_ns / 1e6:g} ms, {although}: {where}"
        )
    yield Cause(CauseCode.LATE, state.model, sentence, grade=grade, rank=RANK)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
