from dataclasses import dataclass


@dataclass(slots=True)
class CreditBalance:
    """The credits of one kind that a gateway holds from one worker.

    `free` credits can be used, `reserved` ones belong to a request on its way, and `owed` ones have been recalled.
    """

    free: int = 0
    reserved: int = 0
    owed: int = 0
    spent: int = 0
    """The recalled credits that were already used; the worker waits for them until this number is reported."""

    def grant(self, count: int) -> None:
        self.free += count

    def recall(self, count: int) -> None:
        """Record that the worker recalls credits; reserved ones are returned only if they become free."""
        self.owed += count
        self._settle_recall()

    def use(self) -> None:
        self.free -= 1
        self._settle_recall()

    def reserve(self) -> None:
        self.free -= 1
        self.reserved += 1

    def release(self) -> None:
        self.reserved -= 1
        self.free += 1

    def use_reserved(self) -> None:
        self.reserved -= 1
        self._settle_recall()

    def give_back(self) -> int:
        """Remove the credits to return to the worker now, and return their number."""
        count = min(self.owed, self.free)
        self.free -= count
        self.owed -= count
        return count

    def take_spent(self) -> int:
        """Return the number of spent recalled credits to report, and reset it."""
        count, self.spent = self.spent, 0
        return count

    def _settle_recall(self) -> None:
        # The worker settles a recall that crosses with a use in the same way, unless it has granted another credit
        # meanwhile. Then only the reported `spent` answers the recall.
        over = max(self.owed - self.free - self.reserved, 0)
        self.owed -= over
        self.spent += over
