"""The rules that decide when changed roles may turn back."""

from dataclasses import dataclass, replace
from typing import Final

from libs.policy.pressure import Workload

TURN_NS: Final = 10_000_000_000
"""The time for which roles do not turn back again, unless the work has changed; one reversal may correct a move."""
TURN_HELD_NS: Final = 1_000_000_000
"""The time for which such a correction must have been needed, and the time between two moves the same way."""
MOST_SHARE: Final = 0.5
"""The share of a role's workers that may leave it at first; the load on the rest shows only after these have moved."""
LATER_SHARE: Final = 0.25
"""The share of the remaining workers that may follow within `TURN_NS`, a second apart."""
CALLED_NS: Final = 60_000_000_000
"""The time for which a worker called back by decodes is released only with room to spare."""
OTHER_WORK: Final = 2.0
"""The factor by which prompts or decodes must have changed to justify a further reversal."""
LEAST_WORK: Final = 0.1
"""The minimum amount of prompts, in workers, from which such a factor is computed."""
# A move that is taken back while the work stays the same has brought nothing, whatever was predicted. Either the load
# is level and chance turns roles, or workers already share the capacity that a move would have freed.
BACK_OFF: Final = 4
"""The factor by which each such move lengthens the time for which the next must have been needed."""
MOST_CALLED_NS: Final = 300_000_000_000
"""The bound on that time, and the time after which such moves are forgotten."""
MOST_UNDONE: Final = 8
"""The bound on the number of such moves that are counted."""
MOST_HELD_NS: Final = 60_000_000_000
"""The bound on the time for which another setting of budgets must have been better."""


@dataclass(frozen=True, slots=True)
class RoleTurn:
    """The direction of the last role moves, and the work when they last reversed."""

    to_mixed: bool = False
    moved_ns: int = 0
    """The time of the last moves; 0 before the first."""
    turned_ns: int = 0
    """The time of the last reversal within `TURN_NS` of moves the other way; 0 before the first."""
    prompts: float = 0.0
    decodes: int = 0
    back_since_ns: int = 0
    """The time since which a reversal has been needed; 0 if none is."""
    stepped_ns: int = 0
    """The time of the last moves; 0 before the first, and if one of them failed."""
    last_prompts: float = 0.0
    """The prompts of the work at the last moves."""
    last_decodes: int = 0
    undone: int = 0
    """The number of consecutive moves to prefill that decodes took back within `CALLED_NS`, for the same work."""

    def failed(self) -> "RoleTurn":
        """Return the state after a move failed, so that another one may follow at once."""
        return replace(self, stepped_ns=0)

    def called(self, wanted: int, now_ns: int) -> "RoleTurn":
        """Return the state after a wish to move workers in a direction: below 0 to prefill, above 0 to mixed."""
        if not wanted or self._goes_on(wanted, now_ns):
            return replace(self, back_since_ns=0) if self.back_since_ns else self
        return self if self.back_since_ns else replace(self, back_since_ns=now_ns)

    def allows(self, wanted: int, work: Workload, now_ns: int, *, too_small: bool = False) -> bool:
        """Return whether workers may move in the direction `wanted`; `too_small` means that no split has room for the
        work.
        """
        if self._goes_on(wanted, now_ns):
            return True
        if wanted < 0 and too_small:  # decodes would press again, and prompts press anyway
            return False
        if not self.back_since_ns or now_ns - self.back_since_ns < TURN_HELD_NS:
            return False
        if not self.turned_ns or now_ns - self.turned_ns >= TURN_NS:
            return True
        prompts, decodes = work.prompts / max(self.prompts, LEAST_WORK), work.decodes / max(self.decodes, 1)
        pressing, other = (decodes, prompts) if wanted > 0 else (prompts, decodes)
        return pressing >= OTHER_WORK or other <= 1 / OTHER_WORK

    def called_decodes(self, now_ns: int) -> bool:
        """Return whether the last moves were to decode, not long ago."""
        return self.to_mixed and bool(self.moved_ns) and now_ns - self.moved_ns < CALLED_NS

    def patience_ns(self, work: Workload, now_ns: int) -> int:
        """Return the time for which a move to prefill must have been needed.

        It is 0 unless such moves brought nothing, and once new work requires one.
        """
        if not self.undone or now_ns - self.moved_ns >= MOST_CALLED_NS or self._is_new(-1, work):
            return 0
        return min(TURN_NS * int(BACK_OFF**self.undone), MOST_CALLED_NS)

    def _is_new(self, wanted: int, work: Workload) -> bool:
        """Return whether the work has changed since the last moves in a way that requires moves this way."""
        prompts = max(work.prompts, LEAST_WORK) / max(self.last_prompts, LEAST_WORK)
        decodes = max(work.decodes, 1) / max(self.last_decodes, 1)
        pressing, other = (decodes, prompts) if wanted > 0 else (prompts, decodes)
        return pressing >= OTHER_WORK or other <= 1 / OTHER_WORK

    def _undone_after(self, wanted: int, work: Workload, now_ns: int) -> int:
        """Return the number of consecutive moves to prefill that brought nothing, after moves this way."""
        if not self.moved_ns or now_ns - self.moved_ns >= MOST_CALLED_NS:
            return 0
        if wanted < 0 or self.to_mixed or now_ns - self.moved_ns >= CALLED_NS:
            return self.undone
        return max(self.undone - 1, 0) if self._is_new(wanted, work) else min(self.undone + 1, MOST_UNDONE)

    def bounded(self, wanted: int, workers: int, now_ns: int) -> int:
        """Return how many of the `workers` of a role may leave it now."""
        if self.stepped_ns and (wanted > 0) is self.to_mixed and now_ns - self.stepped_ns < TURN_HELD_NS:
            return 0
        goes_on = self.stepped_ns and (wanted > 0) is self.to_mixed and now_ns - self.moved_ns < TURN_NS
        most = max(int(workers * (LATER_SHARE if goes_on else MOST_SHARE)), 1)
        return max(min(wanted, most), -most)

    def after(self, wanted: int, work: Workload, now_ns: int) -> "RoleTurn":
        """Return the state after moves this way."""
        left = replace(
            self,
            to_mixed=wanted > 0,
            moved_ns=now_ns,
            back_since_ns=0,
            stepped_ns=now_ns,
            last_prompts=work.prompts,
            last_decodes=work.decodes,
            undone=self._undone_after(wanted, work, now_ns),
        )
        if self._goes_on(wanted, now_ns):
            return left
        return replace(left, turned_ns=now_ns, prompts=work.prompts, decodes=work.decodes)

    def _goes_on(self, wanted: int, now_ns: int) -> bool:
        """Return whether moves in the direction `wanted` reverse no move of the last `TURN_NS`."""
        return not self.moved_ns or (wanted > 0) is self.to_mixed or now_ns - self.moved_ns >= TURN_NS


NO_TURN: Final = RoleTurn()


@dataclass(frozen=True, slots=True)
class Apart:
    """True while decodes run without prompts although prompts are overloaded, because more work is done that way."""

    on: bool = False
    since_ns: int = 0
    """The time of the last change; 0 before the first. Changes are at least `TURN_NS` apart."""
    requested_ns: int = 0
    """The time since which the other setting has been better; 0 if it is not."""
    turns: int = 0
    """The number of consecutive changes that followed each other within `MOST_CALLED_NS`."""

    @property
    def held_ns(self) -> int:
        """The time for which the other setting must have been better."""
        return min(TURN_HELD_NS * int(BACK_OFF**self.turns), MOST_HELD_NS)

    def is_new(self, now_ns: int) -> bool:
        """Return whether decodes have run without prompts so briefly that their number may still fall."""
        return self.on and now_ns - self.since_ns < TURN_NS

    def called(self, now_ns: int, *, better: bool) -> "Apart":
        """Return the state given that decodes do better apart, or better together."""
        if better is self.on:
            return replace(self, requested_ns=0) if self.requested_ns else self
        requested_ns = self.requested_ns or now_ns
        if self.since_ns and (now_ns - self.since_ns < TURN_NS or now_ns - requested_ns < self.held_ns):
            return replace(self, requested_ns=requested_ns)
        soon = bool(self.since_ns) and now_ns - self.since_ns < MOST_CALLED_NS
        return Apart(better, now_ns, turns=min(self.turns + 1, MOST_UNDONE) if soon else 0)

    def settled(self, now_ns: int) -> "Apart":
        """Return the state in which the other setting, if it may follow now, has been better for long enough."""
        if not self.requested_ns or now_ns - self.since_ns < TURN_NS:
            return self
        # Roles are about to change. A later change of budgets would undo half of a worker's move.
        return replace(self, requested_ns=now_ns - self.held_ns)

    def lent(self, now_ns: int) -> "Apart":
        """Return the state after decode workers were given budgets, which they keep for at least `TURN_NS`."""
        return replace(self, since_ns=now_ns)

    def ended(self, now_ns: int) -> "Apart":
        return Apart(since_ns=now_ns) if self.on else self


TOGETHER: Final = Apart()
