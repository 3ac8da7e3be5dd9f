"""How fast the queue drains, measured, and when it pays to come back. Pure: time is what callers say it is."""

from math import exp

MEMORY_S = 10.0
"""What left so long ago counts for 1/e of what leaves now."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class Outflow:
    """How much a second leaves the queue for workers, over the time in which something waits: prompt tokens, or
    nanoseconds of their prefill."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._measured_s = 0.0
        """Time behind `_amount`, forgotten at the same pace."""
        self._seen_ns = 0

    def resume(self, now_ns: int) -> None:
        """Something waits again: the time since nothing did says nothing of how fast workers are."""
        self._seen_ns = now_ns

    def left(self, amount: int, now_ns: int) -> None:
        """Note that so much has left."""
        amount_before, self._measured_s = self._as_of(now_ns)
        self._amount = amount_before + amount
        self._seen_ns = max(now_ns, self._seen_ns)

    def per_s(self, now_ns: int) -> float | None:
        """The rate; None as long as there is nothing to tell it by. To ask changes nothing: how often somebody looks
        is no fact about workers."""
        amount, measured_s = self._as_of(now_ns)
        return amount / measured_s if measured_s > 0 and amount else None

    def per_ns(self, now_ns: int) -> float | None:
        """As `per_s`, a nanosecond."""
        per_s = self.per_s(now_ns)
        return per_s / 1e9 if per_s else None

    def _as_of(self, now_ns: int) -> tuple[float, float]:
        """(what has left, the time behind it), both forgotten up to now."""
        passed_s = max(now_ns - self._seen_ns, 0) / 1e9
        kept = exp(-passed_s / MEMORY_S)
        return self._amount * kept, self._measured_s * kept + MEMORY_S * (1 - kept)


def retry_after_s(queued_tokens: int, tokens_per_s: float | None) -> float:
    """When the queue will have drained at this rate, within bounds; the lower one where the rate is not known."""
    if not tokens_per_s:
        return MIN_RETRY_AFTER_S
    return min(max(queued_tokens / tokens_per_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
