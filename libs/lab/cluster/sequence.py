"""The engine's sequence without its tokens: counts, and block keys in place of hashes."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from libs.engine.kv.block_pool import BlockPool
from libs.engine.port import EngineRequest, SamplingParams
from libs.engine.reports import FinishReason
from libs.engine.runner import Chunk
from libs.engine.sequence import Sequence

ANY_TOKEN: Final = 0
GREEDY: Final = SamplingParams(temperature=0.0)
_NO_TABLE: Final[NDArray[np.int32]] = np.empty(0, dtype=np.int32)


class CountedTokens:
    """As many tokens as are counted, all alike."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: Any) -> Any:
        return range(*place.indices(self.count)) if isinstance(place, slice) else ANY_TOKEN

    def append(self, token_id: int) -> None:
        """One more."""
        self.count += 1

    def min(self) -> int:
        """Of token ids."""
        return ANY_TOKEN

    def max(self) -> int:
        """Of token ids."""
        return ANY_TOKEN


@dataclass(frozen=True, slots=True)
class CountedRequest(EngineRequest):
    """With what only a trace knows."""

    output_tokens: int = 1
    """Where the answer ends by itself, counted from the end of the prompt."""
    keys: Items[bytes] = ()
    """Of the prompt's full blocks."""
    arrival_ns: int = 0
    """When its client sent it; known where the worker orders its prompts."""
    service_class: str = ""
    """Known there too."""


class CountedSequence(Sequence):
    """Moves through the engine core as any sequence does."""

    def __init__(self, request: CountedRequest, *, block_size_tokens: int, max_context_tokens: int) -> None:
        super().__init__(request, block_size_tokens=block_size_tokens, max_context_tokens=max_context_tokens)
        self.keys = request.keys
        """Of the prompt's full blocks."""
        self._whole_length = request.prompt_tokens + request.output_tokens
        """Where the trace ends it."""
        self.ends_at = min(self._whole_length, self.max_length)
        """Its length with its last token."""
        self.sampled_here = False
        """Whether a token that goes on from its prompt was sampled here."""

    @property
    def room_tokens(self) -> int:
        """What its blocks hold."""
        return self._room_tokens

    def reusable_hashes(self) -> list[bytes]:
        """Keys of the blocks that may come from the pool."""
        full = self._known_elsewhere // self._block_size
        keys = self.keys
        return [*keys[:full], *map(self._own_key, range(len(keys), full))]

    def _own_key(self, index: int) -> bytes:
        """Key of a block that the trace has no key for: only this request, wherever it runs, has it."""
        return b"%b:%d" % (self.request.request_id.encode(), index)

    def admit(self, blocks: list[int], shared: int) -> None:
        """Take blocks, of which the first `shared` were found with their KV."""
        if not self.preempted:
            self.cached_tokens = min(shared * self._block_size, self.request.prompt_tokens)
        self.blocks = []
        self.grow(blocks)
        self.found_blocks = shared
        self.computed = shared * self._block_size
        self.reached = max(self.reached, self.computed)
        self._registered = shared

    def grow(self, blocks: list[int]) -> None:
        """Take more blocks."""
        self.blocks += blocks
        self._room_tokens = len(self.blocks) * self._block_size

    def chunk(self, tokens: int) -> Chunk:
        """The next `tokens` tokens as work for a step."""
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
        """A token was sampled."""
        self.length += 1

    def ended_by(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """By itself where the trace says so, else at its bound."""
        if self.length >= self._whole_length:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.max_length else None

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Let others reuse the blocks that are full and computed."""
        full = self.computed // self._block_size
        if full <= self._registered:
            return
        keys = self.keys
        for index in range(self._registered, full):
            pool.register(self.blocks[index], keys[index] if index < len(keys) else self._own_key(index))
        self._registered = full

    def coast(self, steps: int) -> None:
        """Enter `steps` decode steps, none of them its last."""
        self.length += steps
        self.computed += steps
        self.reached = self.computed
