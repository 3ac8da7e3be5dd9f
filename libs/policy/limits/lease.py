"""How several gateways share a tenant's limits: each leases part of the remainder ahead of its use.

Units that lie unused in one gateway are missing in another, so a lease is small and is returned soon.
"""

from dataclasses import dataclass
from typing import Final

AHEAD_PERCENT: Final = 2
"""The part of a limit that a gateway leases ahead; two gateways leave at most 4 % unused."""
IDLE_S: Final = 1.0
"""The idle time after which a gateway returns its unused units."""


@dataclass(slots=True)
class Lease:
    """The units of one limit that a gateway has leased and not used."""

    balance: int = 0
    """The unused units; below 0 after overuse, since the cost of an answer is known only at its end."""
    used_s: float = 0.0

    def need(self, units: int) -> int:
        """Return the least number of units to lease before `units` can be used; 0 or less if the balance suffices."""
        return units - self.balance

    def spend(self, units: int, now_s: float) -> None:
        self.balance -= units
        self.used_s = now_s

    def settle(self, now_s: float) -> int:
        """Zero the balance and return the units to charge beyond the lease, below 0 to give back.

        A positive balance that was used within `IDLE_S` is left as it is.
        """
        if self.balance > 0 and now_s - self.used_s < IDLE_S:
            return 0
        owed, self.balance = -self.balance, 0
        return owed


def ahead(limit: int) -> int:
    """Return the units to lease ahead; 0 for a small limit, where every use is requested."""
    return limit * AHEAD_PERCENT // 100


def local_share(limit: int, gateways: int) -> int:
    """Return the limit each gateway applies while it cannot reach the others: an equal share, at least 1."""
    return max(limit // max(gateways, 1), 1)


def held(limit: int, others: int, running: int, want: int) -> int:
    """Return how many places of a concurrency limit a gateway holds.

    It gets what it wants as far as the other gateways' places leave room, but never fewer than its running
    requests.
    """
    return max(running, min(want, limit - others))


def written_s(wait_s: float) -> str:
    """Format a duration as OpenAI's headers do: 850ms, 12s, 1m0s, 3h20m0s."""
    if wait_s < 1:
        return f"{round(wait_s * 1000)}ms"
    minutes, seconds = divmod(round(wait_s), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
