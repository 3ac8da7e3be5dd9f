"""Whether a sequence leaves its worker sooner by its end, by a hand-over with its KV, or by being computed again
elsewhere. Pure."""

from dataclasses import dataclass
from typing import Final

REMEMBERED = 0.95
"""Weight that an observed hand-over keeps with each later one."""
WEIGHT = 0.2
"""Of the newest observation in a running mean."""
PRIOR_WEIGHT = 0.25
MAX_WAIT_S: Final = 5.0
"""How long a worker that has left decode waits at most for the end of what it could have computed again elsewhere."""
PRIOR = ((0.0, 0.005), (1e9, 1.0))
"""(bytes, seconds) assumed: binding takes two turns of a stream and a step, the link carries a GB a second."""


class HandOverTime:
    """How long a hand-over takes by the bytes it carries: a line through observed ones, on top of an assumption.

    Its height at 0 bytes is binding, its slope the link.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def observe(self, kv_bytes: int, seconds: float) -> None:
        """A hand-over has taken so long, from sealing the blocks until they had arrived."""
        self._sums = _add(_scaled(self._sums, REMEMBERED), kv_bytes, seconds)

    def seconds(self, kv_bytes: int) -> float:
        """Expected time to hand over `kv_bytes`; never below 0, and never less for more bytes."""
        sums = self._sums
        for prior_bytes, prior_s in PRIOR:
            sums = _add(sums, prior_bytes, prior_s, PRIOR_WEIGHT)
        count, x, y, xx, xy = sums
        slope = (count * xy - x * y) / (count * xx - x * x)
        if slope < 0:
            return y / count
        binding_s = (y - slope * x) / count
        if binding_s < 0:  # the best line that binds in no time, not this one cut off at 0
            return xy / xx * kv_bytes
        return binding_s + slope * kv_bytes


@dataclass(frozen=True, slots=True)
class Staying:
    """What a sequence's end costs where it is."""

    tpot_s: float = 0.0
    """Time of a decode step there; 0: none has been seen."""
    mean_output_tokens: float = 0.0
    """OSL of answers that ended there; 0: none has."""

    def stepped(self, step_s: float) -> "Staying":
        """After one more decode step."""
        return Staying(_mean(self.tpot_s, step_s), self.mean_output_tokens)

    def ended(self, output_tokens: int) -> "Staying":
        """After one more answer has ended there by itself."""
        return Staying(self.tpot_s, _mean(self.mean_output_tokens, output_tokens))

    def seconds(self, most_tokens_left: int) -> float:
        """Expected time until a sequence with at most this many tokens left ends; infinite before the first step."""
        tokens = expected_tokens_left(most_tokens_left, self.mean_output_tokens)
        return tokens * self.tpot_s if self.tpot_s else float("inf")


def expected_tokens_left(most: int, mean_output_tokens: float) -> float:
    """Output tokens still to come, of at most `most`.

    How many have come says nothing about how many will: an answer without memory always has a mean before it.
    """
    return min(most, mean_output_tokens) if mean_output_tokens else most


def sooner_handed_over(most_tokens_left: int, kv_bytes: int, staying: Staying, time: HandOverTime) -> bool:
    """Whether a hand-over rids the worker of a sequence before its end would."""
    return time.seconds(kv_bytes) < staying.seconds(most_tokens_left)


def sooner_recomputed(most_tokens_left: int, recompute_s: float, waited_s: float, staying: Staying) -> bool:
    """Whether a sequence that cannot take its KV along is to be computed again elsewhere, which takes `recompute_s`.

    One that is expected to take longer than that goes at once. Answers that last longer than expected are waited for as
    long as computing again takes, MAX_WAIT_S at most: so nobody waits more than twice as long as was necessary. What
    ends before that in any case stays.
    """
    longest_s = most_tokens_left * staying.tpot_s
    if staying.tpot_s and longest_s <= min(recompute_s, MAX_WAIT_S):
        return False
    return staying.seconds(most_tokens_left) > recompute_s or waited_s >= min(recompute_s, MAX_WAIT_S)


_Sums = tuple[float, float, float, float, float]
"""count, x, y, x², x·y"""


def _add(sums: _Sums, x: float, y: float, weight: float = 1.0) -> _Sums:
    count, of_x, of_y, of_xx, of_xy = sums
    return (
        count + weight,
        of_x + weight * x,
        of_y + weight * y,
        of_xx + weight * x * x,
        of_xy + weight * x * y,
    )


def _scaled(sums: _Sums, factor: float) -> _Sums:
    count, of_x, of_y, of_xx, of_xy = sums
    return count * factor, of_x * factor, of_y * factor, of_xx * factor, of_xy * factor


def _mean(mean: float, value: float) -> float:
    return mean + WEIGHT * (value - mean) if mean else value
