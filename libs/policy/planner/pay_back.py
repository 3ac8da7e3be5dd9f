"""How long a worker keeps a role that it was moved to: until what is known shows the move, and the move has paid. Pure.

A move costs the time from its decision until the worker serves its new role, as measured of earlier moves, and costs it
again on the way back. It brings the share of the pressure that it relieves: what it cost has come back once the worker
has had it for the one over the other. What is known is old: a move is judged by what dates from after its pay-back.
"""

from dataclasses import dataclass, replace
from typing import Final

LEAST_EFFECT_NS: Final = 20_000_000
"""Of a move that took no time at all: its KV and prefixes cost something."""
LEAST_PAY_BACK_NS: Final = 3 * LEAST_EFFECT_NS
"""No move pays back sooner."""
FIRST_EFFECT_NS: Final = 100_000_000.0
"""Assumed before any move was measured."""
WEIGHT: Final = 0.2
"""Of the newest move in the mean."""
LEAST_RELIEF: Final = 0.1
"""Of a move that relieves less: limits asked for it."""
MOST_NS: Final = 10_000_000_000
"""Bound on a pay-back, and on an age: what is older says nothing at all."""


@dataclass(frozen=True, slots=True)
class MoveEvidence:
    """What is known of moves as a decision is made."""

    age_ns: int = 0
    """Of what is known of workers."""
    effect_ns: float = FIRST_EFFECT_NS
    """From a decision until its worker has changed: the mean of those measured."""

    def measured(self, effect_ns: int) -> "MoveEvidence":
        """With one more move, which took so long."""
        bounded = min(max(effect_ns, 0), MOST_NS)
        return replace(self, effect_ns=self.effect_ns + WEIGHT * (bounded - self.effect_ns))

    def aged(self, age_ns: int) -> "MoveEvidence":
        """As what is known of workers is so old."""
        return replace(self, age_ns=min(max(age_ns, 0), MOST_NS))

    def pay_back_ns(self, relieved: float) -> int:
        """From a decision until its moves have brought what they cost, there and back; `relieved`: share of the
        pressure that they take away, 0..1."""
        effect_ns = max(self.effect_ns, LEAST_EFFECT_NS)
        return min(round(effect_ns + 2 * effect_ns / min(max(relieved, LEAST_RELIEF), 1.0)), MOST_NS)


UNMEASURED: Final = MoveEvidence()
