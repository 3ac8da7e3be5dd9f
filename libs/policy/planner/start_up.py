"""The measured time from the request of a worker until it serves.

A worker waits for a machine with room, then starts on it. An autoscaling cluster has room at once for some workers
and takes minutes for the next one. So the wait is learned separately, and counts as long as the last worker that
came had to wait for its machine.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

SECOND_NS: Final = 1_000_000_000
AT_ONCE_NS: Final = 5 * SECOND_NS
"""The wait up to which a machine counts as having been there before."""


@dataclass(slots=True)
class StartUp:
    """The start-up times of one actuator's workers."""

    start_ns: int
    """The time from machine to registration: the slowest of the last starts, initially as configured."""
    machine_ns: int = 0
    """The wait for a machine while machines are scarce: the longest of the last waits, initially as configured."""
    scarce: bool = False
    """Whether the last worker had to wait for its machine, so that the next one will too."""
    # By worker not registered yet, the time the actuator first named it.
    _asked_ns: dict[str, int] = field(default_factory=dict)
    # By worker not registered yet, the time it had a machine.
    _placed_ns: dict[str, int] = field(default_factory=dict)

    @property
    def ahead_ns(self) -> int:
        """The expected start-up time of a worker requested now."""
        return self.start_ns + (self.machine_ns if self.scarce else 0)

    def note(
        self, names: Sequence[str], *, without_machine: Collection[str], there: Collection[str], now_ns: int
    ) -> None:
        """Record the progress of workers: `names` are those of the actuator, `there` those that are registered."""
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
