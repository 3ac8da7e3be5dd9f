"""The record of each request: its times, its tokens, and their lateness."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason
from libs.engine.reports import Logprob
from libs.lab.cluster.time import PS_PER_NS, Coast, VirtualTime
from libs.lab.traces.request import TraceRequest

GRACE_NS: Final = 200_000_000
"""The tolerance after t_first + TPOT·k, beyond which token k counts as late."""


class LabOutcome(Enum):
    COMPLETED = "completed"
    REJECTED = "rejected"
    """The request was refused, or waited longer than the gateway allows."""
    ABORTED = "aborted"
    """The request failed after it had begun."""
    UNFINISHED = "unfinished"
    """The run ended before the request did."""


@dataclass(eq=False, slots=True)
class LabAnswer:
    """One request's answer as received by its client. Implements the dispatcher's `Sink`."""

    request: TraceRequest
    time: VirtualTime
    arrival_ps: int
    ttft_limit_ns: int
    tpot_limit_ns: int
    most_output_tokens: int = 0
    """The client's output limit. The cluster knows nothing else about the length."""
    first_ps: int = 0
    last_ps: int = 0
    tokens: int = 0
    late: int = 0
    """The number of late tokens."""
    outcome: LabOutcome = LabOutcome.UNFINISHED
    predicted_ttft_ns: int = 0
    """The gateway's prediction at binding; 0 if it never bound the request, or if a rival's policy chose the worker."""
    likely_ttft_ns: tuple[int, ...] = ()
    """Predicted upper bounds of the TTFT for the chances in `libs.policy.ratios.LEVELS`, made at binding."""
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    """The worker that decoded the request last; empty if none did."""
    on_end: Callable[[], None] | None = None
    """The callback for the end of the request, whatever its outcome."""

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        self.at(self.time.now_ps)
        return False

    def at(self, now_ps: int) -> None:
        """Record a token that arrived at `now_ps`."""
        if not self.tokens:
            self.first_ps = now_ps
        elif now_ps >= self._due_ps(self.tokens):
            self.late += 1
        self.tokens += 1
        self.last_ps = now_ps

    def coasted(self, coast: Coast, steps: int, delay_ps: int) -> None:
        """Record `steps` tokens, each arriving `delay_ps` after the end of its step.

        Lateness is convex over a coast, since its steps grow. The late tokens are therefore at its ends.
        """
        due_ps = self._due_ps(self.tokens) - delay_ps
        each_ps = self.tpot_limit_ns * PS_PER_NS

        def late(step: int) -> bool:
            return coast.end_ps(step) >= due_ps + (step - 1) * each_ps

        first, last = late(1), late(steps)
        if first or last:
            self.late += _count_at_ends(late, coast, each_ps, steps)
        self.tokens += steps
        self.last_ps = coast.end_ps(steps) + delay_ps

    def _due_ps(self, place: int) -> int:
        """Return the time at which the token with this index after the first is due."""
        return self.first_ps + (self.tpot_limit_ns * place + GRACE_NS) * PS_PER_NS

    def finish(self, reason: ApiFinishReason) -> None:
        self.outcome = LabOutcome.COMPLETED
        if self.on_end is not None:
            self.on_end()

    def fail(self, error: FulcrumError) -> None:
        self.outcome = LabOutcome.ABORTED if self.tokens else LabOutcome.REJECTED
        if self.on_end is not None:
            self.on_end()

    # ------------------------------------------------------------ figures

    @property
    def ttft_ns(self) -> int:
        """The time from arrival to first token; 0 if no token arrived."""
        return (self.first_ps - self.arrival_ps) // PS_PER_NS if self.tokens else 0

    @property
    def tpot_ns(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.last_ps - self.first_ps) / PS_PER_NS / (self.tokens - 1) if self.tokens > 1 else 0.0


def _count_at_ends(late: Callable[[int], bool], coast: Coast, each_ps: int, steps: int) -> int:
    """Return the number of late steps in 1..steps, where lateness is convex in the step's number."""
    # Lateness is lowest where a step takes exactly as long as the limit allows.
    slack = each_ps - coast.first_ps
    turn = min(max(slack // coast.growth_ps + 1, 1), steps) if coast.growth_ps else (steps if slack > 0 else 1)
    if late(turn):
        return steps
    low, high = 0, turn  # late up to `low`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if late(middle) else (low, middle)
    before = low
    low, high = turn, steps + 1  # late from `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if late(middle) else (middle, high)
    return before + steps + 1 - high
