"""What became of each request: times, tokens, and whether its tokens came in time."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from libs.contracts.errors import FulcrumError
from libs.dispatch.generation import ApiFinishReason
from libs.engine.reports import Logprob
from libs.lab.cluster.cost import Coast
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.traces.request import TraceRequest

GRACE_NS: Final = 200_000_000
"""A token is late when it comes so long after t_first + TPOT·k, or later."""


class LabOutcome(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """Refused, or it waited for longer than the gateway's patience."""
    ABORTED = "aborted"
    """It had begun."""
    UNFINISHED = "unfinished"
    """The run ended before it did."""


@dataclass(eq=False, slots=True)
class LabAnswer:
    """One request's, as its client sees it. Implements the dispatcher's `Sink`."""

    request: TraceRequest
    time: VirtualTime
    arrival_ps: int
    ttft_limit_ns: int
    tpot_limit_ns: int
    most_output_tokens: int = 0
    """That its client allows, and all that the cluster knows of its length."""
    first_ps: int = 0
    last_ps: int = 0
    tokens: int = 0
    late: int = 0
    """Tokens that came too late."""
    outcome: LabOutcome = LabOutcome.UNFINISHED
    predicted_ttft_ns: int = 0
    """As the gateway expected when it bound the request; 0: it never did, or a policy named the worker."""
    likely_ttft_ns: tuple[int, ...] = ()
    """TTFT that it would stay below with the chances of `libs.policy.ratios.LEVELS`, as of then."""
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    """Where it was last; empty where it never was."""
    on_end: Callable[[], None] | None = None
    """Called once it has ended, however it did."""

    def token(self, token_id: int, logprob: Logprob | None) -> bool:
        """One has come."""
        self.at(self.time.now_ps)
        return False

    def at(self, now_ps: int) -> None:
        """One has come at that time."""
        if not self.tokens:
            self.first_ps = now_ps
        elif now_ps >= self._due_ps(self.tokens):
            self.late += 1
        self.tokens += 1
        self.last_ps = now_ps

    def coasted(self, coast: Coast, steps: int, delay_ps: int) -> None:
        """Enter `steps` tokens, each of which came `delay_ps` after its step ended.

        How late a token is grows ever faster along a coast, as its steps grow: late ones are at its ends.
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
        """When the token is due at that place after the first."""
        return self.first_ps + (self.tpot_limit_ns * place + GRACE_NS) * PS_PER_NS

    def finish(self, reason: ApiFinishReason) -> None:
        """All have come."""
        self.outcome = LabOutcome.COMPLETED
        if self.on_end is not None:
            self.on_end()

    def fail(self, error: FulcrumError) -> None:
        """No more will come."""
        self.outcome = LabOutcome.ABORTED if self.tokens else LabOutcome.REJECTED
        if self.on_end is not None:
            self.on_end()

    # ------------------------------------------------------------ figures

    @property
    def ttft_ns(self) -> int:
        """Arrival to first token; 0 where none came."""
        return (self.first_ps - self.arrival_ps) // PS_PER_NS if self.tokens else 0

    @property
    def tpot_ns(self) -> float:
        """Mean time per token after the first; 0 with a single one."""
        return (self.last_ps - self.first_ps) / PS_PER_NS / (self.tokens - 1) if self.tokens > 1 else 0.0


def _count_at_ends(late: Callable[[int], bool], coast: Coast, each_ps: int, steps: int) -> int:
    """Late steps of 1..steps, where how late one is is convex in its number."""
    # The least late step is where a step takes as long as the limit allows.
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
