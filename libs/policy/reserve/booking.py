"""Whether GPUs can be kept for a model at a time of the day, beside what is kept for others. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

DAY_MINUTES: Final = 1_440


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """GPUs that are kept for a model."""

    model: str
    gpus: int
    kind: str
    """floor, pin or reservation."""
    from_minute: int = 0
    to_minute: int = 0
    """Not included; equal to `from_minute`: all day, less: past midnight."""
    priority: int = 0

    def holds_at(self, minute: int) -> bool:
        """Whether it is in force at a minute of the day."""
        if self.from_minute == self.to_minute:
            return True
        if self.from_minute < self.to_minute:
            return self.from_minute <= minute < self.to_minute
        return minute >= self.from_minute or minute < self.to_minute


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """Why a claim cannot be kept."""

    minute: int
    """Of the day, where most is missing."""
    kept_gpus: int
    """For others then."""
    missing_gpus: int
    would_have_to_go: Sequence[GpuClaim]
    """Of those others, the fewest of the lowest priority that make room; empty where even all would not."""


def kept_at(claims: Iterable[GpuClaim], minute: int) -> dict[str, int]:
    """GPUs kept for each model at a minute of the day. Claims of one model overlap: the largest counts."""
    kept: dict[str, int] = {}
    for each in claims:
        if each.holds_at(minute):
            kept[each.model] = max(kept.get(each.model, 0), each.gpus)
    return kept


def refusal(claims: Sequence[GpuClaim], wanted: GpuClaim, gpus: int) -> ClaimRefused | None:
    """Why `gpus` do not suffice for `wanted` beside the other claims; None where they do."""
    others = [each for each in claims if each != wanted]
    worst = max(_moments([*others, wanted]), key=lambda minute: _missing(others, wanted, minute, gpus))
    missing = _missing(others, wanted, worst, gpus)
    if missing <= 0:
        return None
    kept = kept_at([each for each in others if each.model != wanted.model], worst)
    return ClaimRefused(worst, sum(kept.values()), missing, _room(others, wanted, worst, missing))


def _moments(claims: Iterable[GpuClaim]) -> set[int]:
    """Minutes at which what is kept changes."""
    return {0} | {minute for each in claims for minute in (each.from_minute, each.to_minute)}


def _missing(others: Sequence[GpuClaim], wanted: GpuClaim, minute: int, gpus: int) -> int:
    if not wanted.holds_at(minute):
        return -gpus
    return sum(kept_at([*others, wanted], minute).values()) - gpus


def _room(others: Sequence[GpuClaim], wanted: GpuClaim, minute: int, missing: int) -> list[GpuClaim]:
    """Claims to give up, each model's all together, since the largest of them counts."""
    by_model: dict[str, list[GpuClaim]] = {}
    for each in others:
        if each.model != wanted.model and each.holds_at(minute):
            by_model.setdefault(each.model, []).append(each)
    going: list[GpuClaim] = []
    for claims in sorted(
        by_model.values(), key=lambda held: (held[0].priority, -max(each.gpus for each in held), held[0].model)
    ):
        if missing <= 0:
            break
        going += claims
        missing -= max(each.gpus for each in claims)
    return going if missing <= 0 else []
