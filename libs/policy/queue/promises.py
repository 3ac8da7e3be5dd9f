"""Retry-After that holds: whoever is refused gets a time of its own, and room is kept for it then. Pure.

While promises are outstanding newcomers fill the queue to `NEWCOMERS` of its bound, and the rest is for clients that
come back when they were asked to. Times follow each other a little slower than requests leave the queue, so that
those who keep them find room, and newcomers take what is left.
"""

from math import ceil
from typing import Final

NEWCOMERS: Final = 0.5
"""Share of the queue that newcomers may fill while clients are expected back."""
PACE: Final = 0.9
"""Share of the queue's outflow that is promised: it varies, and a promise is to hold."""
EARLY_NS: Final = 1_000_000_000
GRACE_NS: Final = 5_000_000_000
"""A client may be so much too early or too late."""
MAX_PROMISES: Final = 16_384
HORIZON_S: Final = 600.0
"""Nobody is promised anything beyond."""
SECOND_NS: Final = 1_000_000_000


class Promises:
    """By request, when it may come back; a request is known by a key that is the same when it is sent again."""

    def __init__(self) -> None:
        self._due_ns: dict[bytes, int] = {}
        """In the order in which they were made, which is nearly that in which they are due."""
        self._next_ns = 0
        """When the next one is due at the soonest."""

    def __bool__(self) -> bool:
        return bool(self._due_ns)

    def forget(self, now_ns: int) -> None:
        """Those that nobody has come for."""
        while self._due_ns:
            key, due_ns = next(iter(self._due_ns.items()))
            if due_ns + GRACE_NS >= now_ns:
                return
            del self._due_ns[key]

    def holds(self, key: bytes, now_ns: int) -> bool:
        """Whether this request comes when it was asked to."""
        due_ns = self._due_ns.get(key)
        return due_ns is not None and due_ns - EARLY_NS <= now_ns <= due_ns + GRACE_NS

    def kept(self, key: bytes) -> None:
        """It was let in."""
        self._due_ns.pop(key, None)

    def make(self, key: bytes, count: int, *, room_in_s: float, per_s: float, now_ns: int) -> float | None:
        """In how many whole seconds to come back; None where nothing can be promised. `count`: choices of the request;
        `room_in_s`: until newcomers find room; `per_s`: choices a second that leave the queue."""
        self.forget(now_ns)
        known_ns = self._due_ns.get(key, 0)
        if known_ns > now_ns + EARLY_NS:  # it is early: the time that it was given stands
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
