"""The effects that `placement` returns and the gateway carries out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NamedTuple

from libs.policy.roles import Phase

WorkerKey = tuple[str, int]
"""A worker's id and incarnation: a restarted worker is a different one."""


@dataclass(eq=False, slots=True)
class Attempt:
    """One submit of a sequence to a worker."""

    worker: WorkerKey
    sequence_id: int
    phase: Phase
    known: int
    """The output tokens that its submit carried."""
    tokens: int = 0
    """The output tokens generated on this worker."""


class Blocks(NamedTuple):
    """The KV blocks of a sequence that its worker leaves behind, or serves while it computes them."""

    # What a decode worker needs to find the blocks; opaque here.
    source: "object"
    worker_id: str
    """The id of the worker that holds the blocks."""
    kind: str
    """The kind of KV; workers of equal kind can exchange blocks."""
    once: bool
    """Whether only one reader may ever pull the blocks."""


class Submit(NamedTuple):
    """An attempt to send to its worker, against a prompt credit or the decode credit reserved there."""

    attempt: Attempt
    blocks: Blocks | None
    """The blocks that the attempt continues from."""


class Forget(NamedTuple):
    """An attempt to stop listening to.

    `abort` also ends it on its worker, or frees the blocks that it left there.
    """

    attempt: Attempt
    abort: bool


class Proceed(NamedTuple):
    """An attempt whose blocks, pulled during prefill, are now complete; it also gets the tokens it lacks."""

    attempt: Attempt


class HandOver(NamedTuple):
    """A running attempt that its worker should hand over, as a place elsewhere is reserved."""

    attempt: Attempt


class Reserve(NamedTuple):
    """A decode credit to reserve on a worker."""

    worker: WorkerKey


class Release(NamedTuple):
    """A reserved decode credit to free on a worker."""

    worker: WorkerKey


class Requeue(NamedTuple):
    """The return of the sequence to the gateway's queue."""

    why: str


class End(NamedTuple):
    """The end of the sequence, for one of the reasons below."""

    why: "EndReason"
    detail: str = ""


class EndReason(Enum):
    # The output is complete.
    WHOLE = auto()
    # A worker refused the request as invalid.
    REFUSED = auto()
    # It was rerouted too often.
    GAVE_UP = auto()


WorkerEffect = Submit | Forget | Proceed | HandOver | Reserve | Release
"""The effects carried out on a worker; `Submit` and `Forget` also change the set of known attempts."""
Effect = WorkerEffect | Requeue | End
Effects = Sequence[Effect]
NOTHING: Final[Effects] = ()
