"""How fast the queue drains, and when a refused client should retry."""

from math import exp

MEMORY_S = 10.0
"""The age at which a departure weighs 1/e of a current one."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Outflow:
    """The rate at which requests leave the queue for workers, measured only while requests wait.

    Amounts are prompt tokens, or nanoseconds of their prefill.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        # Time over which `_amount` was collected; it decays at the same rate.
        self._measured_s = 0.0
        self._seen_ns = 0

    def resume(self, now_ns: int) -> None:
        """Restart the clock once something waits again; an empty queue does not measure the workers' speed."""
        self._seen_ns = now_ns

    def left(self, amount: int, now_ns: int) -> None:
        """Record that an amount has left the queue."""
        amount_before, self._measured_s = self._as_of(now_ns)
        self._amount = amount_before + amount
        self._seen_ns = max(now_ns, self._seen_ns)

    def per_s(self, now_ns: int) -> float | None:
        # Reading must not change the state: how often somebody looks is no fact about the workers.
        amount, measured_s = self._as_of(now_ns)
        return amount / measured_s if measured_s > 0 and amount else None

    def per_ns(self, now_ns: int) -> float | None:
        per_s = self.per_s(now_ns)
        return per_s / 1e9 if per_s else None

    def _as_of(self, now_ns: int) -> tuple[float, float]:
        """Return the departed amount and the time behind it, both decayed to `now_ns`."""
        passed_s = max(now_ns - self._seen_ns, 0) / 1e9
        kept = exp(-passed_s / MEMORY_S)
        return self._amount * kept, self._measured_s * kept + MEMORY_S * (1 - kept)


def retry_after_s(queued_tokens: int, tokens_per_s: float | None) -> float:
    """Return when the queue will have drained at this rate, within bounds; the lower bound if the rate is unknown."""
    if not tokens_per_s:
        return MIN_RETRY_AFTER_S
    return min(max(queued_tokens / tokens_per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
