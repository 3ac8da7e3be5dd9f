"""Whether GPUs can be reserved for a model at a time of the day, beside those reserved for others."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

DAY_MINUTES: Final = 1_440


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """A number of GPUs reserved for a model at some time of the day."""

    model: str
    gpus: int
    kind: str
    """The kind of claim: `floor`, `pin` or `reservation`."""
    from_minute: int = 0
    to_minute: int = 0
    """The first minute after the claim.

    Equal to `from_minute` it means all day, and below it a claim past midnight.
    """
    priority: int = 0

    def holds_at(self, minute: int) -> bool:
        """Return whether the claim is in force at a minute of the day."""
        if self.from_minute == self.to_minute:
            return True
        if self.from_minute < self.to_minute:
            return self.from_minute <= minute < self.to_minute
        return minute >= self.from_minute or minute < self.to_minute


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The reason a claim cannot be granted."""

    minute: int
    """The minute of the day at which most GPUs are missing."""
    kept_gpus: int
    """The GPUs reserved for other models at that minute."""
    missing_gpus: int
    would_have_to_go: Sequence[GpuClaim]
    """The fewest claims of the lowest priority that make room; empty if not even all of them would."""


def kept_at(claims: Iterable[GpuClaim], minute: int) -> dict[str, int]:
    """Return the GPUs reserved for each model at a minute of the day.

    Claims of one model overlap, so the largest counts.
    """
    kept: dict[str, int] = {}
    for each in claims:
        if each.holds_at(minute):
            kept[each.model] = max(kept.get(each.model, 0), each.gpus)
    return kept


def refusal(claims: Sequence[GpuClaim], wanted: GpuClaim, gpus: int) -> ClaimRefused | None:
    """Return why `gpus` do not suffice for `wanted` beside the other claims; None if they do."""
    others = [each for each in claims if each != wanted]
    worst = max(_moments([*others, wanted]), key=lambda minute: _missing(others, wanted, minute, gpus))
    missing = _missing(others, wanted, worst, gpus)
    if missing <= 0:
        return None
    kept = kept_at([each for each in others if each.model != wanted.model], worst)
    return ClaimRefused(worst, sum(kept.values()), missing, _room(others, wanted, worst, missing))


def _moments(claims: Iterable[GpuClaim]) -> set[int]:
    """Return the minutes at which the reserved GPUs change."""
    return {0} | {minute for each in claims for minute in (each.from_minute, each.to_minute)}


def _missing(others: Sequence[GpuClaim], wanted: GpuClaim, minute: int, gpus: int) -> int:
    if not wanted.holds_at(minute):
        return -gpus
    return sum(kept_at([*others, wanted], minute).values()) - gpus


def _room(others: Sequence[GpuClaim], wanted: GpuClaim, minute: int, missing: int) -> list[GpuClaim]:
    """Return the claims to give up, each model's together, since only the largest of them counts."""
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
