"""The speed of KV transfers between pairs of workers, and the pairs that are much slower than their link allows.

A transfer of a few blocks, or one that waits for its prompt or for a CPU, says little about the link. A pair's speed is
therefore that of its fastest transfers. Links do not state their capability, so pairs of the same kind are
compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

# The fastest transfer sets a pair's speed; each slower one lowers it by at most this factor.
LINK_FORGETS: Final = 1.02
# Smaller transfers measure latency rather than speed.
LEAST_BYTES: Final = 1 << 20
# Fewer transfers may all have met a busy link, so the pair is not judged.
LEAST_TRANSFERS: Final = 8
# vLLM starts a transfer when it decides a step and notices its end when another step ends, so a duration may be two
# steps too long. Two of ten steps are a fifth, less than the gap between `SLOW_LINK` and a sound link. A transfer of
# fewer steps gives a lower bound of the link's speed.
LEAST_STEPS: Final = 10
# A role move hands over all sequences of a worker at once, and their transfers share one link.
MAX_TOGETHER: Final = 64
"""The number of a pair's last transfers whose bytes are added to those of an overlapping one."""
# Older transfers say nothing about the link now.
LINK_KEPT_NS: Final = 600 * 1_000_000_000
# Any route between GPUs reaches this, including shared memory and slow network cards. If no pair does, as for small
# models on CPUs, there is no fast link for comparison.
LEAST_GB_PER_S: Final = 1.0
SLOW_LINK: Final = 1 / 3
"""The share of the fastest pair's speed below which a link counts as faulty."""
SOUND_LINK: Final = 1 / 2
"""The share of the fastest pair's speed from which a link counts as sound again."""


class MovedKv(NamedTuple):
    """A KV transfer as its receiver measured it."""

    size_bytes: int
    start_unix_ns: int
    end_unix_ns: int
    shared_memory: bool = False
    step_ns: int = 0
    """The longest step of a receiver that notices the end of transfers only between steps; 0 if its times are exact."""
    short_of_cpu: bool = False
    """True if a process at either end waited for a CPU, which may have delayed the transfer."""
    awaited_prompt: bool = False
    """True if the sender was still computing the prompt for most of the time."""
    beside_bytes: int = 0
    """The bytes of other transfers that the link carried during this one."""

    def beside(self, others: "Iterable[MovedKv]") -> "MovedKv":
        """Return the transfer with the bytes that the link carried for others, each of which is assumed to have had an
        even rate.
        """
        if self.size_bytes < LEAST_BYTES:
            return self  # its speed is not measured
        carried = 0.0
        for other in others:
            both_ns = min(self.end_unix_ns, other.end_unix_ns) - max(self.start_unix_ns, other.start_unix_ns)
            if both_ns > 0 and other.shared_memory == self.shared_memory:
                carried += other.size_bytes * both_ns / (other.end_unix_ns - other.start_unix_ns)
        return self._replace(beside_bytes=round(carried))


READY_SHARE: Final = 0.5
"""The share of a transfer's time with ready KV in transit below which its prompt delayed it."""


def awaited_prompt(whole_ns: int, ready_ns: int) -> bool:
    """Return whether a transfer's prompt delayed it; `ready_ns` is 0 if unknown."""
    return 0 < ready_ns < whole_ns * READY_SHARE


def way(*, shared_memory: bool) -> str:
    """Return the name of a transfer's route in metrics and API."""
    return "shared_memory" if shared_memory else "network"


@dataclass(frozen=True, slots=True)
class KvLink:
    """The transfers from one worker to another, and their speed."""

    source: str
    target: str
    shared_memory: bool
    """The route of the transfers that set the speed; False means the network."""
    model: str = ""
    """The model of the target worker; empty if it is unknown."""
    transfers: int = 0
    """The number of conclusive transfers of at least `LEAST_BYTES` by that route."""
    total_bytes: int = 0
    gb_per_s: float | None = None
    """The speed of the fastest recent transfers; None if none was conclusive."""
    is_floor: bool = False
    """True if the receiver's steps, a lack of CPUs or the prompt may have limited the speed, so the link may be
    faster.
    """
    one_node: bool = False
    """True if both ends are on one node."""
    moved_unix_ns: int = 0
    """The end of the last transfer; 0 if there was none."""
    measured_unix_ns: int = 0
    """The end of the last transfer of at least `LEAST_BYTES`."""

    def moved(self, kv: MovedKv) -> "KvLink":
        """Return the link including another transfer."""
        duration_ns = kv.end_unix_ns - kv.start_unix_ns
        after = replace(
            self,
            total_bytes=self.total_bytes + kv.size_bytes,
            moved_unix_ns=max(self.moved_unix_ns, kv.end_unix_ns),
        )
        if kv.size_bytes < LEAST_BYTES or duration_ns <= 0:
            return after
        rested = kv.end_unix_ns - self.measured_unix_ns > LINK_KEPT_NS
        anew = self.gb_per_s is None or rested or kv.shared_memory != self.shared_memory
        speed = (kv.size_bytes + kv.beside_bytes) / duration_ns
        held_up = kv.short_of_cpu or kv.awaited_prompt
        if held_up and not anew and speed < (self.gb_per_s or 0.0):
            return after  # a delayed transfer says nothing about the link
        is_floor = held_up or duration_ns < LEAST_STEPS * kv.step_ns
        sunk = 0.0 if anew else (self.gb_per_s or 0.0) / LINK_FORGETS
        if speed < sunk:
            speed, is_floor = sunk, self.is_floor
        return replace(
            after,
            shared_memory=kv.shared_memory,
            transfers=1 if anew else self.transfers + 1,
            gb_per_s=speed,
            is_floor=is_floor,
            measured_unix_ns=max(self.measured_unix_ns, kv.end_unix_ns),
        )

    def at(self, now_ns: int) -> "KvLink | None":
        """Return the link without outdated figures; None if no figures are left."""
        if self.moved_unix_ns <= now_ns - LINK_KEPT_NS:
            return None
        if self.measured_unix_ns <= now_ns - LINK_KEPT_NS:
            return replace(self, transfers=0, gb_per_s=None, is_floor=False)
        return self

    @property
    def kind(self) -> tuple[str, bool, bool]:
        """A key that is equal for comparable pairs: same model, route and locality."""
        return self.model, self.shared_memory, self.one_node


@dataclass(frozen=True, slots=True)
class JudgedLink:
    """A link, compared with the fastest one of its kind."""

    link: KvLink
    fastest_gb_per_s: float

    @property
    def share(self) -> float:
        """The pair's speed as a share of the fastest pair's."""
        return (self.link.gb_per_s or 0.0) / self.fastest_gb_per_s


def judge(links: Iterable[KvLink]) -> Sequence[JudgedLink]:
    """Return the comparable pairs, the slowest first.

    A pair whose speed is a floor shows what others could reach but is not judged itself, since it may be as fast as
    any.
    """
    known = [each for each in links if each.gb_per_s is not None and each.transfers >= LEAST_TRANSFERS]
    fastest: dict[tuple[str, bool, bool], float] = {}
    for each in known:
        fastest[each.kind] = max(fastest.get(each.kind, 0.0), each.gb_per_s or 0.0)
    judged = (JudgedLink(each, fastest[each.kind]) for each in known if not each.is_floor)
    return sorted((each for each in judged if each.fastest_gb_per_s >= LEAST_GB_PER_S), key=lambda each: each.share)
