"""Credits of one kind that a gateway holds from one worker. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class CreditBalance:
    """Granted credits: free ones, ones reserved for a request that is on its way, and how many are asked back."""

    free: int = 0
    reserved: int = 0
    owed: int = 0
    spent: int = 0
    """Recalled credits that were spent already; the worker waits for them until it gets their number."""

    def grant(self, count: int) -> None:
        """The worker gave some."""
        self.free += count

    def recall(self, count: int) -> None:
        """The worker wants some back; reserved ones follow if they come free."""
        self.owed += count
        self._settle_recall()

    def use(self) -> None:
        """A request leaves against a free one."""
        self.free -= 1
        self._settle_recall()

    def reserve(self) -> None:
        """Set one aside."""
        self.free -= 1
        self.reserved += 1

    def release(self) -> None:
        """A reserved one is free again."""
        self.reserved -= 1
        self.free += 1

    def use_reserved(self) -> None:
        """A request leaves against a reserved one."""
        self.reserved -= 1
        self._settle_recall()

    def give_back(self) -> int:
        """How many to return now; they are gone from here."""
        count = min(self.owed, self.free)
        self.free -= count
        self.owed -= count
        return count

    def take_spent(self) -> int:
        """Take the number of spent recalled credits to report."""
        count, self.spent = self.spent, 0
        return count

    def _settle_recall(self) -> None:
        # The worker settles a recall that crosses with a use in the same way, unless it has granted another credit
        # meanwhile: then only this tells it that the recall is answered.
        over = max(self.owed - self.free - self.reserved, 0)
        self.owed -= over
        self.spent += over
