"""The inputs and outputs of a placement: the workers of a pool, the models of a catalogue, and the orders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class WorkerStage(Enum):
    """The state of a worker of the pool."""

    # No model is on its device, though some may be in its host memory.
    EMPTY = "empty"
    LOADING = "loading"
    SERVING = "serving"
    # Its last answers are ending.
    LEAVING = "leaving"


class Why(Enum):
    """The reason a worker is given to a model, or loses it."""

    ASKED = "asked"
    # Its model's turn is over, and requests for another one wait.
    TURN = "turn"
    # A floor, a pin or a reservation requires it.
    KEPT = "kept_for"
    # The model's workers do not suffice.
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
    """The model that it holds or loads; empty if none."""
    since_s: float = 0.0
    """The time it has been in this stage with this model."""
    left_s: float = 0.0
    """The time until it is expected to serve, while it is loading."""
    kept: frozenset[str] = frozenset()
    """The models whose weights its host memory holds, so that they only wake."""
    can_take: bool = True
    """Whether it may be given another model now, with no call to it outstanding."""
    gpu: str = ""
    """The GPU that it shares with other workers of the same value; empty if it has one to itself."""
    memory_bytes: int = 0
    """The memory of its part of the GPU; 0 means any model fits."""


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
    """The workers that a floor, a pin or a reservation requires for it now."""
    most: int = 1
    """The most workers that its load justifies."""
    soon: float = 0.0
    """The probability that it is requested before a switch would have paid off."""
    worth: float = 0.0
    """The worth of holding it where it is loaded: cold start saved over GPU time held. Holding pays above 1."""
    worth_ahead: float = 0.0
    """The worth of loading it before it is requested."""
    blocked: bool = False
    """Whether loading has failed and is not retried yet."""
    # Of the weights alone.
    size_bytes: int = 0
    lines_waiting: int = 0
    """The waiting requests that are batch lines."""
    lines_in_flight: int = 0

    @property
    def people_wait(self) -> bool:
        """Whether any interactive request waits, not only batch lines."""
        return self.waiting > self.lines_waiting

    @property
    def runs_for_lines_alone(self) -> bool:
        """Whether all its work is batch lines."""
        return self.is_busy and self.in_flight <= self.lines_in_flight and not self.people_wait

    @property
    def is_busy(self) -> bool:
        """Whether any request for it waits or runs."""
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
    """The time until it is expected to serve."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """The loss if a worker were given to another model."""

    worker: str
    model: str
    loss_s: float
    """The expected cold start: its probability times its seconds."""
    free_in_s: float
    """The remaining time of its turn; 0 if it is free at once."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The decision about a pool of workers."""

    orders: Sequence[PlacementOrder]
    waits_s: Mapping[str, float]
    """By model, the expected wait of a new request for a worker that holds it."""
    evictions: Sequence[Eviction]
    """The workers that hold a model, the next one to lose it first."""
