"""The engine's sequence without its tokens, and the messages about it between gateway and workers."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from libs.dispatch.ports import AttemptEvent, QueuedDemand
from libs.engine.kv_blocks import BlockPool
from libs.engine.port import EnginePhase, EngineRequest, SamplingParams
from libs.engine.reports import EngineLoad, FinishReason
from libs.engine.runner import Chunk
from libs.engine.sequence import Sequence
from libs.lab.cluster.time import Coast
from libs.policy.roles import Assignment
from libs.policy.speed import Speed

ANY_TOKEN: Final = 0
GREEDY: Final = SamplingParams(temperature=0.0)
_NO_TABLE: Final[NDArray[np.int32]] = np.empty(0, dtype=np.int32)


class CountedTokens:
    """A sequence of identical tokens that stores only its length."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: Any) -> Any:
        return range(*place.indices(self.count)) if isinstance(place, slice) else ANY_TOKEN

    def append(self, token_id: int) -> None:
        self.count += 1

    def min(self) -> int:
        return ANY_TOKEN

    def max(self) -> int:
        return ANY_TOKEN


@dataclass(frozen=True, slots=True)
class CountedRequest(EngineRequest):
    """An engine request with token counts, conversation and other data that only a trace has."""

    output_tokens: int = 1
    """The length at which the answer ends by itself, counted from the end of the prompt."""
    keys: Items[bytes] = ()
    arrival_ns: int = 0
    """The time at which the client sent the request, known to workers that order their prompts."""
    service_class: str = ""
    """The service class, known to workers that order their prompts."""


class CountedSequence(Sequence):
    """A counted sequence, which moves through the engine core like any other."""

    def __init__(self, request: CountedRequest, *, block_size_tokens: int, max_context_tokens: int) -> None:
        super().__init__(request, block_size_tokens=block_size_tokens, max_context_tokens=max_context_tokens)
        self.keys = request.keys
        self._whole_length = request.prompt_tokens + request.output_tokens
        """The total length in tokens at which the sequence ends in the trace."""
        self.ends_at = min(self._whole_length, self.max_length)
        """The total length in tokens at which the sequence ends here, at most the context."""
        self.sampled_here = False
        """True if the first token after the prompt was sampled on this worker."""

    @property
    def room_tokens(self) -> int:
        """The number of tokens that the sequence's blocks can hold."""
        return self._room_tokens

    def reusable_hashes(self) -> list[bytes]:
        """Return the keys of the blocks that may come from the pool."""
        full = self._known_elsewhere // self._block_size
        keys = self.keys
        return [*keys[:full], *map(self._own_key, range(len(keys), full))]

    def _own_key(self, index: int) -> bytes:
        """Return the key of a block for which the trace has none. It is unique to the request and the same on all
        workers.
        """
        return b"%b:%d" % (self.request.request_id.encode(), index)

    def admit(self, blocks: list[int], shared: int) -> None:
        """Assign blocks, of which the first `shared` already hold their KV."""
        if not self.preempted:
            self.cached_tokens = min(shared * self._block_size, self.request.prompt_tokens)
        self.blocks = []
        self.grow(blocks)
        self.found_blocks = shared
        self.computed = shared * self._block_size
        self.reached = max(self.reached, self.computed)
        self._registered = shared

    def grow(self, blocks: list[int]) -> None:
        self.blocks += blocks
        self._room_tokens = len(self.blocks) * self._block_size

    def chunk(self, tokens: int) -> Chunk:
        """Return the next `tokens` tokens as work for a step."""
        end = self.computed + tokens
        return Chunk(
            self.request.sequence_id,
            cast(Any, range(tokens)),
            self.computed,
            _NO_TABLE,
            end == self.length,
            GREEDY,
            cast(Any, range(end)),
            self.request.prompt_tokens,
        )

    def append(self, token_id: int) -> None:
        self.length += 1

    def ended_by(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Return whether the trace ends the sequence here, or its length limit is reached."""
        if self.length >= self._whole_length:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.max_length else None

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Register blocks that are full and computed for reuse by others."""
        full = self.computed // self._block_size
        if full <= self._registered:
            return
        keys = self.keys
        for index in range(self._registered, full):
            pool.register(self.blocks[index], keys[index] if index < len(keys) else self._own_key(index))
        self._registered = full

    def coast(self, steps: int) -> None:
        """Apply `steps` decode steps, none of which is the last one."""
        self.length += steps
        self.computed += steps
        self.reached = self.computed


@dataclass(slots=True)
class ToWorker:
    """All messages from a gateway to a worker at one moment."""

    submits: list[CountedRequest] = field(default_factory=list)
    proceeds: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of a sequence id and the tokens sampled by the worker that computed its prompt."""
    hand_overs: list[int] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    demand: QueuedDemand | None = None
    returned_prefill: int = 0
    returned_decode: int = 0
    spent_prefill: int = 0
    spent_decode: int = 0


@dataclass(slots=True)
class ToGateway:
    """All messages from a worker to the gateway at one moment."""

    load: EngineLoad
    submits_taken: int
    tokens: list[int]
    """One sequence id for each new token."""
    events: list[AttemptEvent]
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
"""The numbers of the phases as in `libs.policy.roles`."""
