"""Missing replicas of partitions at brokers, and unreachable brokers. Time is passed in."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

# A broker that is cut off from the others still reports outdated facts. Any of several answers may be one of these, so
# the worst recent one counts.
RECENT_NS: Final = 5 * 10**9
MAX_ANSWERS: Final = 64
NO_LEADER: Final = -1


class PartitionCopies(NamedTuple):
    """The node ids of the brokers that hold copies of one partition."""

    leader: int
    assigned: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LostCopies:
    """The replicas that are out of sync. The object is false if there are none."""

    behind: tuple[tuple[int, int, int], ...] = ()
    """Node id, replicas out of sync, and number of replicas of each broker that is behind."""
    fewest: int = 0
    """The smallest number of replicas in sync among partitions that lack some."""
    wanted: int = 0
    """The number of replicas assigned to that partition."""
    stopped: int = 0
    """The partitions that cannot be written: they have no leader, or too few copies in sync."""

    def __bool__(self) -> bool:
        return bool(self.behind or self.stopped)

    @property
    def sentence(self) -> str:
        """Return the alert's reason: the brokers that lack copies, and the effect on records."""
        # "Lost" would be wrong for a running broker that is still catching up.
        brokers = ", ".join(
            f"broker {node} has no copy in sync"
            if missing == every
            else f"broker {node} lacks {missing} of {every} copies"
            for node, missing, every in self.behind
        )
        effect = f"records have {self.fewest} of {self.wanted} copies"
        if self.stopped:
            partitions = "partition" if self.stopped == 1 else "partitions"
            effect = f"{self.stopped} {partitions} cannot be written until a broker is back"
        return f"Kafka: {brokers}; {effect}" if brokers else f"Kafka: {effect}"


def lost_copies(partitions: Iterable[PartitionCopies], needed: Callable[[int], int]) -> LostCopies:
    """Compare the replicas in sync with the assigned ones.

    `needed` returns the number of a partition's replicas that must have a record before it counts as written.
    """
    every: Counter[int] = Counter()
    missing: Counter[int] = Counter()
    few: tuple[int, int] | None = None
    stopped = 0
    for leader, assigned, listed in partitions:
        # For a partition without a leader, Kafka lists the last replica in sync even if its broker is down.
        in_sync = () if leader == NO_LEADER else listed
        every.update(assigned)
        if lacking := set(assigned) - set(in_sync):
            missing.update(lacking)
            few = min(few or (len(in_sync), len(assigned)), (len(in_sync), len(assigned)))
        stopped += len(in_sync) < max(min(needed(len(assigned)), len(assigned)), 1)
    fewest, wanted = few or (0, 0)
    behind = tuple((node, count, every[node]) for node, count in sorted(missing.items()))
    return LostCopies(behind, fewest, wanted, stopped)


class UnreachableBroker(NamedTuple):
    """A broker that does not answer this host, though another one lists it as up."""

    node: int
    address: str
    leads: int
    """The partitions of this suite that the broker leads."""


@dataclass(frozen=True, slots=True)
class UnreachableBrokers:
    """The brokers that do not answer one host. The object is false if all of them answer."""

    host: str = ""
    brokers: tuple[UnreachableBroker, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.brokers)

    @property
    def led(self) -> int:
        """Return the number of partitions that cannot be read or written from the host."""
        return sum(broker.leads for broker in self.brokers)

    @property
    def sentence(self) -> str:
        """Return the alert's reason: the brokers, the host, the effect and the remedy."""
        named = " and ".join(f"broker {each.node} ({each.address})" for each in self.brokers)
        it, they, leads = ("it", "it", "leads") if len(self.brokers) == 1 else ("them", "they", "lead")
        partitions = "partition" if self.led == 1 else "partitions"
        effect = (
            f"; {self.led} {partitions} that {they} {leads} cannot be read or written from there" if self.led else ""
        )
        remedy = "check routes, firewalls and the broker's advertised.listeners"
        return f"Kafka: {named} cannot be reached from {self.host}, though other brokers reach {it}{effect}; {remedy}"


class CopyLog:
    """The recent answers of brokers about the copies of their topics."""

    def __init__(self) -> None:
        self._answers: deque[tuple[int, LostCopies]] = deque(maxlen=MAX_ANSWERS)

    def add(self, now_ns: int, lost: LostCopies) -> None:
        self._answers.append((now_ns, lost))

    def worst(self, now_ns: int) -> LostCopies | None:
        """Return the recent answer with the fewest copies; None without a recent answer."""
        recent = [lost for at_ns, lost in self._answers if now_ns - at_ns <= RECENT_NS]
        if not recent:
            return None
        return max(recent, key=lambda lost: (lost.stopped, sum(missing for _, missing, _ in lost.behind)))
