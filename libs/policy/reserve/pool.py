"""The inputs and outputs of a placement (workers of a pool, models of a catalogue, orders), and bookings of GPUs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final


class WorkerStage(Enum):
    """The state of a worker of the pool."""

    # No model is on its device, though some may be in its host memory.
    EMPTY = "empty"
    LOADING = "loading"
    SERVING = "serving"
    # Its last answers are ending.
    LEAVING = "leaving"


class Why(Enum):
    """The reason why a worker is given to a model, or loses it."""

    REQUESTED = "asked"
    # Its model's turn is over, and requests for another one wait.
    TURN = "turn"
    # A floor, a pin or a reservation requires it.
    KEPT = "kept_for"
    # The model does not have enough workers.
    PRESSED = "pressed"
    # The model is likely to be requested soon.
    AHEAD = "ahead"
    # Holding the model costs more than the cold start it is likely to save, so it sleeps.
    NOT_WORTH = "not_worth"
    # The model is no longer in the catalogue.
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """A worker of the pool and its current model."""

    id: str
    stage: WorkerStage
    model: str = ""
    """The model that the worker holds or loads; empty if none."""
    since_s: float = 0.0
    """The time that the worker has been in this stage with this model."""
    left_s: float = 0.0
    """The expected time until the worker serves, while it is loading."""
    kept: frozenset[str] = frozenset()
    """The models whose weights are in host memory, so that they only need to wake."""
    can_take: bool = True
    """True if the worker may be given another model now, with no call to it outstanding."""
    gpu: str = ""
    """The GPU, shared by all workers with the same value; empty if the worker has one to itself."""
    memory_bytes: int = 0
    """The memory of the worker's part of the GPU; 0 means any model fits."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model of the catalogue with its demand."""

    name: str
    load_s: float
    wake_s: float
    sleep_s: float = 0.0
    """The time to put it to sleep."""
    waiting: int = 0
    """The requests that are not bound to a worker yet."""
    waited_s: float = 0.0
    """The wait of the first of them."""
    in_flight: int = 0
    """The requests in flight, waiting ones included."""
    priority: int = 0
    least: int = 0
    """The workers that a floor, a pin or a reservation requires for the model now."""
    most: int = 1
    """The maximum number of workers that the load justifies."""
    soon: float = 0.0
    """The probability that the model is requested before a switch would have paid off."""
    worth: float = 0.0
    """The worth of keeping it loaded: saved cold start over held GPU time. Keeping it pays above 1."""
    worth_ahead: float = 0.0
    """The worth of loading the model before it is requested."""
    blocked: bool = False
    """True if loading has failed and is not retried yet."""
    # The size of the weights alone.
    size_bytes: int = 0
    lines_waiting: int = 0
    """The waiting requests that are batch lines."""
    lines_in_flight: int = 0

    @property
    def people_wait(self) -> bool:
        """Return whether any interactive request waits, not only batch lines."""
        return self.waiting > self.lines_waiting

    @property
    def runs_for_lines_alone(self) -> bool:
        """Return whether all its work is batch lines."""
        return self.is_busy and self.in_flight <= self.lines_in_flight and not self.people_wait

    @property
    def is_busy(self) -> bool:
        """Return whether any request for it waits or runs."""
        return self.in_flight > 0 or self.waiting > 0


@dataclass(frozen=True, slots=True)
class PlacementOrder:
    """A change of the model that a worker holds."""

    worker: str
    model: str
    """The model to hold from now on; empty for none."""
    why: Why
    evicts: str = ""
    """The model that loses the worker; empty if none does."""
    switch_s: float = 0.0
    """The expected time until the model is served."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """The loss if a worker were given to another model."""

    worker: str
    model: str
    loss_s: float
    """The expected cold start: its probability times its seconds."""
    free_in_s: float
    """The remaining time of the worker's turn; 0 if it is free at once."""


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """The decision about a pool of workers."""

    orders: Sequence[PlacementOrder]
    waits_s: Mapping[str, float]
    """The expected wait of a new request for a worker that holds its model, by model."""
    evictions: Sequence[Eviction]
    """The workers that hold a model, the next one to lose it first."""


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

    If it equals `from_minute`, the claim covers the whole day; if it is lower, the claim ends on the next day.
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
