"""How several gateways share one tenant's limits: each takes some of what is left ahead of its use. Pure.

What lies unused in one gateway is missing in another, so it is little, and is given back soon.
"""

from dataclasses import dataclass
from typing import Final

AHEAD_PERCENT: Final = 2
"""Of a limit that a gateway takes ahead of its use: two of them leave at most 4 % unused."""
IDLE_S: Final = 1.0
"""After this long without use it gives them back."""


@dataclass(slots=True)
class Lease:
    """Units of one limit that one gateway has taken and not used."""

    balance: int = 0
    """Below 0: it has used more than it had taken, since what an answer takes is known at its end."""
    used_s: float = 0.0

    def need(self, units: int) -> int:
        """Units to take at least before `units` can be used; 0 or less where there are enough."""
        return units - self.balance

    def spend(self, units: int, now_s: float) -> None:
        """Use them."""
        self.balance -= units
        self.used_s = now_s

    def settle(self, now_s: float) -> int:
        """Units to count as used beyond what was taken, or below 0 to give back; the balance is even then."""
        if self.balance > 0 and now_s - self.used_s < IDLE_S:
            return 0
        owed, self.balance = -self.balance, 0
        return owed


def ahead(limit: int) -> int:
    """Units to take ahead of use: none of a small limit, where each use asks."""
    return limit * AHEAD_PERCENT // 100


def local_share(limit: int, gateways: int) -> int:
    """What each gateway allows by itself while none of them knows of the others: together the limit, and one at
    least."""
    return max(limit // max(gateways, 1), 1)


def held(limit: int, others: int, running: int, want: int) -> int:
    """Places that a gateway holds of a bound on requests at once: what it wants as far as there is room beside what
    others hold, and those of its requests that run in any case."""
    return max(running, min(want, limit - others))


def written_s(wait_s: float) -> str:
    """A time as OpenAI's headers have it: 850ms, 12s, 1m0s, 3h20m0s."""
    if wait_s < 1:
        return f"{round(wait_s * 1000)}ms"
    minutes, seconds = divmod(round(wait_s), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
