"""How long a worker takes from when it is asked for until it serves, as it was seen. Pure.

A worker waits for a machine with room, then starts on it. A cluster that adds machines by itself has room at once for
some workers, and takes minutes for the next one: the wait is learned apart, and counts as long as the last worker that
came had to wait for its machine.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

SECOND_NS: Final = 1_000_000_000
AT_ONCE_NS: Final = 5 * SECOND_NS
"""A machine that is found within this time was there before."""


@dataclass(slots=True)
class StartUp:
    """Of one actuator's workers."""

    start_ns: int
    """From its machine on, until a worker is registered: the slowest of the last starts. At first as set."""
    machine_ns: int = 0
    """Until there is a machine for it, where it has to wait: the longest of the last waits. At first as set."""
    scarce: bool = False
    """Whether the last worker had to wait for its machine, so that the next one will too."""
    _asked_ns: dict[str, int] = field(default_factory=dict)
    """Of workers that are not registered yet, since when the actuator names them."""
    _placed_ns: dict[str, int] = field(default_factory=dict)
    """Of those that have a machine, since when."""

    @property
    def ahead_ns(self) -> int:
        """What a worker that is asked for now is expected to take."""
        return self.start_ns + (self.machine_ns if self.scarce else 0)

    def note(
        self, names: Sequence[str], *, without_machine: Collection[str], there: Collection[str], now_ns: int
    ) -> None:
        """See how far workers have come. `names`: those that the actuator has; `there`: those that are registered."""
        for name in names:
            if name in there:
                self._note_registered(name, now_ns)
                continue
            asked_ns = self._asked_ns.setdefault(name, now_ns)
            waited_ns = now_ns - asked_ns
            if name in without_machine:
                if waited_ns > AT_ONCE_NS:
                    self.scarce = True
                    self.machine_ns = max(self.machine_ns, waited_ns)
            elif name not in self._placed_ns:
                self._placed_ns[name] = now_ns
                self._note_placed(waited_ns)
        self._asked_ns = {name: at_ns for name, at_ns in self._asked_ns.items() if name in names}
        self._placed_ns = {name: at_ns for name, at_ns in self._placed_ns.items() if name in names}

    def _note_placed(self, waited_ns: int) -> None:
        self.scarce = waited_ns > AT_ONCE_NS
        if self.scarce:
            self.machine_ns = max(waited_ns, (self.machine_ns + waited_ns) // 2)

    def _note_registered(self, name: str, now_ns: int) -> None:
        asked_ns = self._asked_ns.pop(name, None)
        placed_ns = self._placed_ns.pop(name, asked_ns)
        if placed_ns is not None:
            took_ns = now_ns - placed_ns
            self.start_ns = max(took_ns, (self.start_ns + took_ns) // 2)
