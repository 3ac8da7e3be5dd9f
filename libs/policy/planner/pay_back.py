"""How long a moved worker keeps its new role: until the reports show the move and it has paid off.

A move costs the measured time from its decision until the worker serves its new role, and the same again on the way
back. Its gain is the share of the pressure that it relieves, so it has paid off after the cost divided by that
share. Reports lag, and a move is judged only by reports from after its pay-back.
"""

from dataclasses import dataclass, replace
from typing import Final

LEAST_EFFECT_NS: Final = 20_000_000
"""The least cost of a move, for its KV and prefixes, even if it took no time at all."""
LEAST_PAY_BACK_NS: Final = 3 * LEAST_EFFECT_NS
"""The least time in which any move pays back."""
FIRST_EFFECT_NS: Final = 100_000_000.0
"""The duration assumed before any move was measured."""
WEIGHT: Final = 0.2
"""The weight of the newest move in the mean."""
LEAST_RELIEF: Final = 0.1
"""The relief assumed of a move that relieves less, because limits required it."""
MOST_NS: Final = 10_000_000_000
"""The bound on a pay-back and on the age of reports; older reports carry no information."""


@dataclass(frozen=True, slots=True)
class MoveEvidence:
    """The knowledge about moves at the time of a decision."""

    age_ns: int = 0
    """The age of what is known of the workers."""
    effect_ns: float = FIRST_EFFECT_NS
    """The mean measured time from a decision until its worker has changed."""

    def measured(self, effect_ns: int) -> "MoveEvidence":
        """Return the evidence updated by the duration of one more move."""
        bounded = min(max(effect_ns, 0), MOST_NS)
        return replace(self, effect_ns=self.effect_ns + WEIGHT * (bounded - self.effect_ns))

    def aged(self, age_ns: int) -> "MoveEvidence":
        """Return the evidence with another age of what is known of the workers."""
        return replace(self, age_ns=min(max(age_ns, 0), MOST_NS))

    def pay_back_ns(self, relieved: float) -> int:
        """Return the time from a decision until its moves have recovered their cost, there and back.

        `relieved` is the share of the pressure that they take away, 0..1.
        """
        effect_ns = max(self.effect_ns, LEAST_EFFECT_NS)
        return min(round(effect_ns + 2 * effect_ns / min(max(relieved, LEAST_RELIEF), 1.0)), MOST_NS)


UNMEASURED: Final = MoveEvidence()
