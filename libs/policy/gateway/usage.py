"""The accounting of tenants' limits: sliding windows of use, leases shared by several gateways, and GPU time.

A steadily refilling bucket would admit twice its limit in the minute after a pause. A window enforces the limit in
every minute, whichever second it begins with. Times are in seconds of any clock that does not run backwards.

Gateways share a tenant's limits by leasing part of the remainder ahead of its use. Units that lie unused in one gateway
are missing in another, so a lease is small and is returned soon.

The GPU time of a choice is estimated from the step times of the workers that served it. A prompt is charged the time of
its chunks, less the cached part. A token is charged its share of a decode step, which it divides with the other
sequences in the batch.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from libs.policy.speed import Speed

WINDOW_S: Final = 60
# Whole seconds that count, including the current one; the oldest may have begun up to a second before the window.
SLOTS: Final = WINDOW_S + 1
AHEAD_PERCENT: Final = 2
"""The part of a limit that a gateway leases ahead; two gateways leave at most 4 % unused."""
IDLE_S: Final = 1.0
"""The idle time after which a gateway returns its unused units."""


class WindowSlots(NamedTuple):
    """The division of a limit's window into slots."""

    slot_s: int
    slots: int
    """The slots that count, including the current one: one more than the window has, since the oldest began before
    it.
    """

    @property
    def all_s(self) -> int:
        """The time after which a use no longer counts."""
        return self.slot_s * self.slots


MINUTE: Final = WindowSlots(1, SLOTS)
DAY: Final = WindowSlots(3600, 25)


class MinuteWindow:
    """The units used per slot, such as a whole second; never more entries than the span has slots."""

    def __init__(self, span: WindowSlots = MINUTE) -> None:
        self._span = span
        # Units by slot number, in chronological order.
        self._used: dict[int, int] = {}
        self._total = 0

    def _slot(self, now_s: float) -> int:
        return int(now_s) // self._span.slot_s

    def used(self, now_s: float) -> int:
        oldest = self._slot(now_s) - self._span.slots
        while self._used and (first := next(iter(self._used))) <= oldest:
            self._total -= self._used.pop(first)
        return self._total

    def take(self, limit: int, want: int, least: int, now_s: float) -> int:
        """Use up to `want` units within the limit and return their number; if fewer than `least` fit, use none and
        return 0.
        """
        granted = min(want, limit - self.used(now_s))
        if granted < max(least, 1):
            return 0
        self.add(granted, now_s)
        return granted

    def add(self, units: int, now_s: float) -> None:
        """Count units regardless of the limit. Negative units return the latest ones that were taken but not used."""
        if units >= 0:
            slot = self._slot(now_s)
            self._used[slot] = self._used.get(slot, 0) + units
            self._total += units
            return
        for second in reversed(self._used):
            back = min(-units, self._used[second])
            self._used[second] -= back
            self._total -= back
            units += back

    def wait_s(self, limit: int, need: int, now_s: float) -> float:
        """Return the seconds until `need` units fit if nobody uses any; the whole span if they exceed the limit."""
        short = self.used(now_s) + need - limit
        if short <= 0:
            return 0.0
        for second, units in self._used.items():
            short -= units
            if short <= 0:
                return max((second + self._span.slots) * self._span.slot_s - now_s, 0.0)
        return float(self._span.all_s)


@dataclass(slots=True)
class Lease:
    """The units of one limit that a gateway has leased but not used."""

    balance: int = 0
    """The unused units; below 0 after overuse, since the cost of an answer is known only at its end."""
    used_s: float = 0.0

    def need(self, units: int) -> int:
        """Return the number of units to lease before `units` can be used; 0 or less if the balance suffices."""
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
    """Return the number of units to lease ahead; 0 for a limit so small that every use is leased by itself."""
    return limit * AHEAD_PERCENT // 100


def local_share(limit: int, gateways: int) -> int:
    """Return the limit each gateway applies while it cannot reach the others: an equal share, at least 1."""
    return max(limit // max(gateways, 1), 1)


def held(limit: int, others: int, running: int, want: int) -> int:
    """Return the number of places of a concurrency limit that a gateway holds.

    It gets `want` as far as the other gateways' places leave room, but never fewer than its running requests.
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


def prompt_gpu_ns(speed: Speed, gpus: int, prompt_tokens: int, cached_tokens: int) -> float:
    """Return the GPU nanoseconds of computing a prompt whose first `cached_tokens` were cached."""
    computed = max(prompt_tokens - cached_tokens, 0)
    return gpus * speed.prompt_ns(computed, prompt_tokens**2 - cached_tokens**2)


def decode_gpu_ns(speed: Speed, gpus: int, output_tokens: int, sequences: int, kv_tokens: int) -> float:
    """Return the GPU nanoseconds of tokens decoded in steps over `sequences` that together read `kv_tokens`."""
    beside = max(sequences, 1)
    return gpus * output_tokens * speed.decode_ns(beside, kv_tokens) / beside
