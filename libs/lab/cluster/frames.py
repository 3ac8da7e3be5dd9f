"""What goes between the gateway and a worker, in records in place of protobuf."""

from dataclasses import dataclass, field

from libs.dispatch.ports import QueuedDemand
from libs.dispatch.worker_news import Happened
from libs.engine.port import EnginePhase
from libs.engine.reports import EngineLoad
from libs.lab.cluster.cost import Coast
from libs.lab.cluster.sequence import CountedRequest
from libs.policy.roles import Assignment
from libs.policy.speed import Speed


@dataclass(slots=True)
class ToWorker:
    """All that a gateway has for a worker at one moment."""

    submits: list[CountedRequest] = field(default_factory=list)
    proceeds: list[tuple[int, int]] = field(default_factory=list)
    """(sequence id, tokens sampled where its prompt was computed)."""
    hand_overs: list[int] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    demand: QueuedDemand | None = None
    returned_prefill: int = 0
    returned_decode: int = 0
    spent_prefill: int = 0
    spent_decode: int = 0


@dataclass(slots=True)
class ToGateway:
    """All that a worker has for the gateway at one moment."""

    load: EngineLoad
    submits_taken: int
    tokens: list[int]
    """Sequence ids, one for each token."""
    happened: list[Happened]
    credit: tuple[int, int, int, int] | None
    """(prefill grant, prefill recall, decode grant, decode recall)."""
    assignment: Assignment | None
    """Where it is another one."""
    speed: Speed | None
    """Where it is another one."""


@dataclass(slots=True)
class Coasted:
    """Decode steps that have passed at once."""

    sequences: list[int]
    coast: Coast
    steps: int
    load: EngineLoad
    """After the last of them."""
    submits_taken: int
    speed: Speed | None
    """Where it is another one: then these steps are a single one."""


PHASES = {EnginePhase.PREFILL: 1, EnginePhase.DECODE: 2, EnginePhase.BOTH: 3}
"""As in `libs.policy.roles`."""
