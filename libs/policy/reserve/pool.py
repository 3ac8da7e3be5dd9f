"""A pool of workers and the models of a catalogue, as a placement sees them, and what it decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class WorkerStage(Enum):
    """What a worker of the pool is doing."""

    EMPTY = "empty"
    """No model is on its device; some may be in its host memory."""
    LOADING = "loading"
    SERVING = "serving"
    LEAVING = "leaving"
    """Its last answers end."""


class Why(Enum):
    """Why a worker is given to a model, or loses it."""

    ASKED = "asked"
    TURN = "turn"
    """Its model's turn is over, and requests of another wait."""
    KEPT = "kept_for"
    """By a floor, a pin or a reservation."""
    PRESSED = "pressed"
    """The workers it has do not suffice."""
    AHEAD = "ahead"
    """It is likely to be asked soon."""
    NOT_WORTH = "not_worth"
    """Holding it costs more than the cold start that it is likely to save: it sleeps."""
    GONE = "gone"
    """It is in the catalogue no more."""


@dataclass(frozen=True, slots=True)
class PoolWorker:
    """One of the pool."""

    id: str
    stage: WorkerStage
    model: str = ""
    """That it holds or loads; empty: none."""
    since_s: float = 0.0
    """How long it has been in this stage with this model."""
    left_s: float = 0.0
    """LOADING: until it is expected to serve."""
    kept: frozenset[str] = frozenset()
    """Models in its host memory."""
    can_take: bool = True
    """Whether it may be given another model now: no call with it is outstanding."""
    gpu: str = ""
    """That it shares with workers of the same name; empty: it has one to itself."""
    memory_bytes: int = 0
    """Of its part of the GPU; 0: any model fits."""


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One of the catalogue."""

    name: str
    load_s: float
    wake_s: float
    sleep_s: float = 0.0
    """Putting it away."""
    waiting: int = 0
    """Requests that no worker has."""
    waited_s: float = 0.0
    """By the first of them."""
    in_flight: int = 0
    """Waiting ones included."""
    priority: int = 0
    least: int = 0
    """Workers that a floor, a pin or a reservation keeps for it now."""
    most: int = 1
    """Workers that its load is worth at most."""
    soon: float = 0.0
    """Probability that it is asked before a switch would have paid."""
    worth: float = 0.0
    """Of holding it where it is loaded: cold start saved over GPU time held; above 1 it pays."""
    worth_ahead: float = 0.0
    """The same of loading it before it is asked."""
    blocked: bool = False
    """Loading it has failed, and is not tried again yet."""
    size_bytes: int = 0
    """Of its weights."""
    lines_waiting: int = 0
    """Of those that wait, lines of batch jobs."""
    lines_in_flight: int = 0

    @property
    def people_wait(self) -> bool:
        """Others than lines of batch jobs."""
        return self.waiting > self.lines_waiting

    @property
    def runs_for_lines_alone(self) -> bool:
        """Whether all its work is lines of batch jobs."""
        return self.is_busy and self.in_flight <= self.lines_in_flight and not self.people_wait

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for an answer of it."""
        return self.in_flight > 0 or self.waiting > 0


@dataclass(frozen=True, slots=True)
class PlacementOrder:
    """An order to a worker."""

    worker: str
    model: str
    """To hold from now on; empty: none."""
    why: Why
    evicts: str = ""
    """The model that loses the worker."""
    switch_s: float = 0.0
    """Until it is expected to serve."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """What a worker would lose if it were given to another model."""

    worker: str
    model: str
    loss_s: float
    """Of a cold start that is likely: its probability times its seconds."""
    free_in_s: float
    """0: at once; else its turn goes on for so long."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What was decided."""

    orders: Sequence[PlacementOrder]
    waits_s: Mapping[str, float]
    """By model: what a request that comes now is expected to wait for a worker that holds it."""
    evictions: Sequence[Eviction]
    """Workers that hold a model, the next one to lose it first."""
