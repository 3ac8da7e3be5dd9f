"""Retry-After times that hold: every refused client gets its own time, and room is reserved for it then.

While promises are outstanding, newcomers fill the queue to `NEWCOMERS` of its bound. The rest is reserved for
clients that return at their promised time. Promised times are spaced a little wider than requests leave the queue,
so that returning clients find room and newcomers take the remainder.
"""

from math import ceil
from typing import Final

NEWCOMERS: Final = 0.5
"""The share of the queue that newcomers may fill while promises are outstanding."""
PACE: Final = 0.9
"""The share of the measured outflow that is promised; the outflow varies and promises must hold."""
# A client may return this much too early or too late.
EARLY_NS: Final = 1_000_000_000
GRACE_NS: Final = 5_000_000_000
MAX_PROMISES: Final = 16_384
HORIZON_S: Final = 600.0
"""The furthest time ahead that is promised to anybody."""
SECOND_NS: Final = 1_000_000_000


class Promises:
    """The return times promised to refused requests, by a key that is the same when a request is resent."""

    def __init__(self) -> None:
        # In the order they were made, which is nearly the order in which they are due.
        self._due_ns: dict[bytes, int] = {}
        # Earliest time of the next promise.
        self._next_ns = 0

    def __bool__(self) -> bool:
        return bool(self._due_ns)

    def forget(self, now_ns: int) -> None:
        """Drop the promises whose clients have not returned in time."""
        while self._due_ns:
            key, due_ns = next(iter(self._due_ns.items()))
            if due_ns + GRACE_NS >= now_ns:
                return
            del self._due_ns[key]

    def holds(self, key: bytes, now_ns: int) -> bool:
        """Return whether the request returns at its promised time."""
        due_ns = self._due_ns.get(key)
        return due_ns is not None and due_ns - EARLY_NS <= now_ns <= due_ns + GRACE_NS

    def kept(self, key: bytes) -> None:
        """Drop the promise of a request that has been admitted."""
        self._due_ns.pop(key, None)

    def make(self, key: bytes, count: int, *, room_in_s: float, per_s: float, now_ns: int) -> float | None:
        """Return the whole seconds after which to retry, or None if nothing can be promised.

        `count` is the number of choices of the request, `room_in_s` the time until newcomers find room, and `per_s`
        the choices per second that leave the queue.
        """
        self.forget(now_ns)
        known_ns = self._due_ns.get(key, 0)
        if known_ns > now_ns + EARLY_NS:  # it is early, and its promised time stands
            return float(ceil((known_ns - now_ns) / SECOND_NS))
        if not key or per_s <= 0 or len(self._due_ns) >= MAX_PROMISES:
            return None
        slot_ns = max(self._next_ns, now_ns + round(room_in_s * SECOND_NS))
        wait_s = max(ceil((slot_ns - now_ns) / SECOND_NS), 1)
        if wait_s > HORIZON_S:
            return None
        self._next_ns = slot_ns + round(count / (PACE * per_s) * SECOND_NS)
        self._due_ns.pop(key, None)
        self._due_ns[key] = now_ns + wait_s * SECOND_NS
        return float(wait_s)
