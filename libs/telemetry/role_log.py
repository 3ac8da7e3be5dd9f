"""Which role a worker had when: a short list of changes."""

from bisect import bisect_right
from typing import Final

MAX_CHANGES: Final = 256
"""Of one worker; the oldest go."""


class RoleLog:
    """Changes of role by the time from which they held, entered in any order."""

    def __init__(self) -> None:
        self._from_ns: list[int] = []
        self._roles: list[str] = []

    def add(self, from_ns: int, role: str) -> None:
        """It had `role` at `from_ns`, and until something else is known."""
        after = bisect_right(self._from_ns, from_ns)
        if after and self._roles[after - 1] == role:
            return
        if after < len(self._roles) and self._roles[after] == role:
            self._from_ns[after] = from_ns
            return
        if after and self._from_ns[after - 1] == from_ns:
            self._roles[after - 1] = role
            return
        self._from_ns.insert(after, from_ns)
        self._roles.insert(after, role)
        if len(self._roles) > MAX_CHANGES:
            del self._from_ns[0], self._roles[0]

    def forget_from(self, from_ns: int) -> None:
        """Drop what was said of `from_ns` and later."""
        kept = bisect_right(self._from_ns, from_ns - 1)
        del self._from_ns[kept:], self._roles[kept:]

    def at(self, at_ns: int) -> str:
        """The role at a moment: the first one known for earlier ones, empty when none is."""
        if not self._roles:
            return ""
        return self._roles[max(bisect_right(self._from_ns, at_ns) - 1, 0)]
