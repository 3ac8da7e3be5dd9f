"""What is to be done about where a sequence is: `placement` decides, the gateway carries out. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from libs.policy.roles import Phase

WorkerKey = tuple[str, int]
"""Id and incarnation: a worker that was started again is another one."""


@dataclass(eq=False, slots=True)
class Attempt:
    """A sequence on a worker: one submit."""

    worker: WorkerKey
    sequence_id: int
    phase: Phase
    known: int
    """Output tokens that its submit carried."""
    tokens: int = 0
    """Made there."""


class Blocks(NamedTuple):
    """KV blocks of a sequence that its worker leaves, or lets be read as it computes them."""

    source: "object"
    """What a decode worker needs to find them."""
    worker_id: str
    """Where they are."""
    kind: str
    """Workers of equal kind can exchange blocks."""
    once: bool
    """They are good for one reader only."""


class Submit(NamedTuple):
    """Send it there, against a prompt credit, or against the decode credit that is set aside there."""

    attempt: Attempt
    blocks: Blocks | None
    """That its tokens go on from."""


class Forget(NamedTuple):
    """Listen to an attempt no more; `abort` also ends it there, or frees the blocks that it left."""

    attempt: Attempt
    abort: bool


class Proceed(NamedTuple):
    """Tell an attempt that pulls blocks as they are computed that all are there, and which tokens it does not know."""

    attempt: Attempt


class HandOver(NamedTuple):
    """Let the worker hand a running attempt over: its place elsewhere is reserved."""

    attempt: Attempt


class Reserve(NamedTuple):
    """Set a decode credit of a worker aside."""

    worker: WorkerKey


class Release(NamedTuple):
    """A decode credit that was set aside is free again."""

    worker: WorkerKey


class Requeue(NamedTuple):
    """Back to the queue."""

    why: str


class End(NamedTuple):
    """It is over."""

    why: "EndReason"
    detail: str = ""


class EndReason(Enum):
    """Why a sequence is over."""

    WHOLE = auto()
    """Its output is complete."""
    REFUSED = auto()
    """No worker would take it."""
    GAVE_UP = auto()
    """It went elsewhere too often."""


WorkerEffect = Submit | Forget | Proceed | HandOver | Reserve | Release
"""To be carried out on a worker; `Submit` and `Forget` also tell what is there."""
Effect = WorkerEffect | Requeue | End
Effects = Sequence[Effect]
NOTHING: Final[Effects] = ()
