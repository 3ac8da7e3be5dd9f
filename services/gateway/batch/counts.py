"""How many lines of a job are answered, share by share, in memory for the shares that are out. Pure."""

from dataclasses import dataclass, field

from libs.contracts.pb.fulcrum.batch.v1.batch_pb2 import Progress


@dataclass(slots=True)
class Counts:
    """Counts of a share only grow: an older one, read late or twice, takes nothing back."""

    completed: int = 0
    failed: int = 0
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Lines completed and failed of each share that is not whole yet."""
    whole_below: int = 0
    """Every share before this one is whole."""
    whole_above: set[int] = field(default_factory=set)
    """Others that are."""

    def add(self, progress: Progress) -> bool:
        """Whether it says more of its share than was known."""
        share = progress.share
        if share < self.whole_below or share in self.whole_above:
            return False
        completed, failed = self.open.get(share, (0, 0))
        if progress.completed + progress.failed <= completed + failed:
            return False
        self.completed += progress.completed - completed
        self.failed += progress.failed - failed
        if not progress.whole:
            self.open[share] = (progress.completed, progress.failed)
            return True
        self.open.pop(share, None)
        self.whole_above.add(share)
        while self.whole_below in self.whole_above:
            self.whole_above.remove(self.whole_below)
            self.whole_below += 1
        return True
