"""Messages between gateway and workers, as records instead of protobuf."""

from dataclasses import dataclass, field

from libs.dispatch.ports import Happened, QueuedDemand
from libs.engine.port import EnginePhase
from libs.engine.reports import EngineLoad
from libs.lab.cluster.cost import Coast
from libs.lab.cluster.sequence import CountedRequest
from libs.policy.roles import Assignment
from libs.policy.speed import Speed


@dataclass(slots=True)
class ToWorker:
    """Everything that a gateway sends a worker at one moment."""

    submits: list[CountedRequest] = field(default_factory=list)
    proceeds: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of sequence id and the tokens sampled where its prompt was computed."""
    hand_overs: list[int] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    demand: QueuedDemand | None = None
    returned_prefill: int = 0
    returned_decode: int = 0
    spent_prefill: int = 0
    spent_decode: int = 0


@dataclass(slots=True)
class ToGateway:
    """Everything that a worker sends the gateway at one moment."""

    load: EngineLoad
    submits_taken: int
    tokens: list[int]
    """One sequence id for each new token."""
    happened: list[Happened]
    credit: tuple[int, int, int, int] | None
    """(prefill grant, prefill recall, decode grant, decode recall)."""
    assignment: Assignment | None
    """The new assignment, if it has changed."""
    speed: Speed | None
    """The new speed, if it has changed."""


@dataclass(slots=True)
class Coasted:
    """Decode steps that have passed at once, as reported to the gateway."""

    sequences: list[int]
    coast: Coast
    steps: int
    load: EngineLoad
    submits_taken: int
    speed: Speed | None
    """The new speed, if it has changed; `steps` is 1 in that case."""


PHASES = {EnginePhase.PREFILL: 1, EnginePhase.DECODE: 2, EnginePhase.BOTH: 3}
"""Numbers of the phases as in `libs.policy.roles`."""
