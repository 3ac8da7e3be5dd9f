"""How fast KV comes from one worker to another, and which pairs are far below what their link can do. Pure.

A transfer that waits for its prompt, or of a few blocks, says little of the link, so a pair's speed is that of its
fastest transfers. What a link can do nobody states; pairs that move KV in the same way show it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

LINK_FORGETS: Final = 1.02
"""The fastest transfer sets a pair's speed; each slower one lowers it by at most this factor."""
LEAST_BYTES: Final = 1 << 20
"""Smaller transfers say more of latency than of speed."""
LEAST_TRANSFERS: Final = 8
"""With fewer, none of which need have found the link free, nothing is said of a pair."""
LEAST_STEPS: Final = 10
"""vLLM starts a transfer as it decides a step and notices its end as another step ends, so a duration may be two steps
too long. Two of ten steps are a fifth, less than `SLOW_LINK` is below a sound link. A transfer of fewer steps shows a
floor of the link's speed."""
LINK_KEPT_NS: Final = 600 * 1_000_000_000
"""What a pair did longer ago says nothing of its link now."""
LEAST_GB_PER_S: Final = 1.0
"""That any way between GPUs brings, shared memory and a slow network card included. Where no pair gets as much, there
is no fast link to be compared with: small models on CPUs."""
SLOW_LINK: Final = 1 / 3
"""Share of the fastest pair's speed below which something is wrong with a link."""
SOUND_LINK: Final = 1 / 2
"""From here on it is well again."""


class MovedKv(NamedTuple):
    """One transfer, as its receiver saw it."""

    size_bytes: int
    start_unix_ns: int
    end_unix_ns: int
    shared_memory: bool = False
    step_ns: int = 0
    """Of a receiver that notices ends only between its steps, the longest of them; 0: its times are exact."""


def way(*, shared_memory: bool) -> str:
    """How KV went, as metrics and API name it."""
    return "shared_memory" if shared_memory else "network"


@dataclass(frozen=True, slots=True)
class KvLink:
    """From one worker to another."""

    source: str
    target: str
    shared_memory: bool
    """The way of the transfers that set its speed; else KV was sent."""
    model: str = ""
    """The target's; empty: not known."""
    transfers: int = 0
    """Of at least `LEAST_BYTES`, by that way."""
    total_bytes: int = 0
    gb_per_s: float | None = None
    """Of the fastest transfers of late; None: there was none that says something."""
    is_floor: bool = False
    """Whether steps of the receiver may have made that speed: the link brings as much or more."""
    one_node: bool = False
    """Whether both ends are on one node."""
    moved_unix_ns: int = 0
    """End of the last transfer."""
    measured_unix_ns: int = 0
    """End of the last one of at least `LEAST_BYTES`."""

    def moved(self, kv: MovedKv) -> "KvLink":
        """After another transfer."""
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
        speed, is_floor = kv.size_bytes / duration_ns, duration_ns < LEAST_STEPS * kv.step_ns
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
        """Without what is too old; None where it moves nothing any more."""
        if self.moved_unix_ns <= now_ns - LINK_KEPT_NS:
            return None
        if self.measured_unix_ns <= now_ns - LINK_KEPT_NS:
            return replace(self, transfers=0, gb_per_s=None, is_floor=False)
        return self

    @property
    def kind(self) -> tuple[str, bool, bool]:
        """Equal for pairs that can be compared: one model's, by one way, over the same kind of wire."""
        return self.model, self.shared_memory, self.one_node


@dataclass(frozen=True, slots=True)
class JudgedLink:
    """A pair beside the fastest of its kind."""

    link: KvLink
    fastest_gb_per_s: float

    @property
    def share(self) -> float:
        """Of the fastest pair's speed."""
        return (self.link.gb_per_s or 0.0) / self.fastest_gb_per_s


def judge(links: Iterable[KvLink]) -> Sequence[JudgedLink]:
    """Pairs that can be compared, the slowest first. A floor shows what others could reach, and is itself not judged:
    such a pair may be as fast as any."""
    known = [each for each in links if each.gb_per_s is not None and each.transfers >= LEAST_TRANSFERS]
    fastest: dict[tuple[str, bool, bool], float] = {}
    for each in known:
        fastest[each.kind] = max(fastest.get(each.kind, 0.0), each.gb_per_s or 0.0)
    judged = (JudgedLink(each, fastest[each.kind]) for each in known if not each.is_floor)
    return sorted((each for each in judged if each.fastest_gb_per_s >= LEAST_GB_PER_S), key=lambda each: each.share)
