"""One sequence inside the engine: its tokens, how many of them have KV, and the blocks that hold it. Also
which sequences an engine takes. Pure."""

from dataclasses import replace
from enum import IntEnum, auto

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import ContextTooLong, InvalidRequest
from libs.contracts.hashing import block_hashes
from libs.engine.kv.block_pool import BlockPool
from libs.engine.kv.handles import Held, Received
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EnginePhase, EngineRequest
from libs.engine.reports import FinishReason, KvTransferReport, Logprob, SequenceOutput
from libs.engine.runner import Chunk, Sampled
from libs.policy.worker.slack import TokenLine


class Stage(IntEnum):
    """Where a sequence stands. Blocks are held from FETCHING on."""

    QUEUED_TRANSFER = auto()
    """Its KV is at another worker; waits for room here."""
    QUEUED_PREEMPTED = auto()
    """Its blocks went to others; it is computed again from its tokens."""
    QUEUED_PROMPT = auto()
    FETCHING = auto()
    """Awaits KV."""
    PREFILL = auto()
    DECODE = auto()
    """One token is left to compute each step, and it is a generated one."""


class Sequence:
    """A request on its way through the engine."""

    def __init__(self, request: EngineRequest, *, block_size_tokens: int, max_context_tokens: int) -> None:
        self.request = request
        self.stage: Stage | None = None
        self.length = len(request.token_ids)
        """Tokens so far."""
        self.computed = 0
        """How many of the tokens have KV."""
        self.max_length = min(request.prompt_tokens + request.max_output_tokens, max_context_tokens)
        self.blocks: list[int] = []
        self.preempted = False
        """It has lost its blocks at least once: from then on it is computed here, wherever it came from."""
        self.reached = 0
        """Tokens that have had KV here; to compute them once more is recomputation."""
        self.cached_tokens = 0
        self.computed_prompt_tokens = 0
        self.kv_bytes_received = 0
        self.kv_arrived = False
        self.kv_ready = request.kv is not None and not request.kv.streamed
        """Some of its KV is ready at its source and not here, as far as the source has said."""
        self.kv_ready_since_ns = 0
        """Since when; 0: it is not."""
        self.found_blocks = 0
        """Blocks at the start of its table that were found here with their KV, so that only the rest is fetched."""
        self.sampled_elsewhere: tuple[int, ...] | None = None
        """Tokens sampled where a streamed prompt was computed; None: not known yet."""
        self.streamed: Held | None = None
        """The handle of a prompt that is being computed here."""
        self.joined = False
        """It has decoded here: what has begun is not held back."""
        self.held_since_ns = 0
        """When it could first have decoded here; 0: not yet."""
        self.line_from_ns = 0
        """When its first token is known to have been there, which is where its TPOT is counted from; 0: not yet."""
        self.line_from_length = 0
        self.prompt_logprobs: list[Logprob] = []
        """Of the prompt's tokens so far, where they are wanted."""
        self.in_step = False
        """The running step computes it: its blocks may not change hands before the step ends."""
        self.aborting = False
        self.handing_over = False
        """It is to be handed over at its next step boundary."""
        self._block_size = block_size_tokens
        self._room_tokens = 0
        """What its blocks hold."""
        self._tokens = request.token_ids
        self._table: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._hashes: list[bytes] = []
        self._registered = 0

    @property
    def sequence_id(self) -> int:
        """The request's."""
        return self.request.sequence_id

    @property
    def transferred(self) -> bool:
        """Its prompt was computed elsewhere."""
        return self.request.kv is not None

    @property
    def yields(self) -> bool:
        """Its prompt waits while another's can be computed."""
        return self.request.yields

    @property
    def kind(self) -> str:
        """Whose answers it is expected to resemble."""
        return self.request.kind

    @property
    def tpot_target_ns(self) -> int:
        """Time per output token that is wanted; 0: none."""
        return self.request.tpot_target_ns

    @property
    def line(self) -> TokenLine | None:
        """When its tokens are due; None without a target, or before its first token."""
        target_ns = self.request.tpot_target_ns
        if not target_ns or not self.line_from_ns:
            return None
        return TokenLine(self.line_from_ns, target_ns, self.length - self.line_from_length)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far, elsewhere too."""
        return self.length - self.request.prompt_tokens

    @property
    def most_left(self) -> int:
        """Tokens that may be sampled yet."""
        return self.max_length - self.length

    @property
    def first_token_due_ns(self) -> int:
        """When its first token is wanted; 0: it is out, or nobody has said."""
        return 0 if self.output_tokens else self.request.first_token_due_ns

    @property
    def pending(self) -> int:
        """Tokens left to compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def pending_free(self) -> int:
        """Those of the pending tokens that no prompt budget holds back: tokens lost with the blocks, a generated one
        after."""
        decoding = self.reached >= self.request.prompt_tokens and self.reached + 1 == self.length
        return max(self.reached + decoding - self.computed, 0)

    @property
    def blocks_at_most(self) -> int:
        """Blocks for everything that will ever be computed here; a last sampled token needs no KV."""
        return self._blocks_for(self.length if self.request.phase is EnginePhase.PREFILL else self.max_length - 1)

    @property
    def blocks_now(self) -> int:
        """Blocks for its tokens so far."""
        return self._blocks_for(self.length)

    @property
    def has_room(self) -> bool:
        """Whether its blocks hold its tokens so far."""
        return self.length <= self._room_tokens

    @property
    def may_grow(self) -> bool:
        """Whether it can come to need more blocks than it has."""
        return max(len(self.blocks), self.blocks_now) < self.blocks_at_most

    def reusable_hashes(self) -> list[bytes]:
        """Hashes of the blocks that may come from the pool: full ones, and at least the last token stays to compute."""
        if not self.request.chain_root:
            return []
        self._extend_hashes(self.length // self._block_size)
        return self._hashes[: self._known_elsewhere // self._block_size]

    def admit(self, blocks: list[int], shared: int) -> None:
        """Take blocks, of which the first `shared` were found with their KV."""
        if not self.preempted:
            tokens = np.empty(self.max_length, dtype=np.int32)
            tokens[: self.length] = self.request.token_ids
            self._tokens = tokens
            self._table = np.empty(self.blocks_at_most, dtype=np.int32)
            self.cached_tokens = min(shared * self._block_size, self.request.prompt_tokens)
        self.blocks = []
        self.grow(blocks)
        self.found_blocks = shared
        self.computed = shared * self._block_size
        self.reached = max(self.reached, self.computed)
        self._registered = shared

    def grow(self, blocks: list[int]) -> None:
        """Take more blocks."""
        self._table[len(self.blocks) : len(self.blocks) + len(blocks)] = blocks
        self.blocks += blocks
        self._room_tokens = len(self.blocks) * self._block_size

    def preempt(self) -> list[int]:
        """Lose its blocks, which are the answer, but no token."""
        blocks, self.blocks = self.blocks, []
        self._room_tokens = 0
        self.computed = 0
        self.prompt_logprobs.clear()
        self.preempted = True
        return blocks

    def receive(self) -> None:
        """The KV of its handle has come from elsewhere."""
        self.computed = self.reached = self._known_elsewhere

    def table(self, tokens: int) -> NDArray[np.int32]:
        """[blocks] 1D int32: the blocks of the first `tokens` positions."""
        return self._table[: -(-tokens // self._block_size)]

    def chunk(self, tokens: int) -> Chunk:
        """The next `tokens` tokens as work for a step."""
        end = self.computed + tokens
        request = self.request
        scores = request.sampling.prompt_logprobs and self.length == request.prompt_tokens
        return Chunk(
            sequence_id=self.sequence_id,
            token_ids=self._tokens[self.computed : end],
            start=self.computed,
            block_table=self.table(end),
            sample=end == self.length,
            sampling=request.sampling,
            history=self._tokens[:end],
            prompt_tokens=request.prompt_tokens,
            scored=self._tokens[self.computed + 1 : min(end + 1, self.length)] if scores else None,
            adapter=request.adapter,
            adapter_source=request.adapter_source,
        )

    def advance(self, tokens: int) -> int:
        """A step has computed `tokens` tokens; the answer is how many of them it had computed before."""
        start, self.computed = self.computed, self.computed + tokens
        if start == self.reached and start >= self.request.prompt_tokens:  # as it is for nearly every token
            self.reached = self.computed
            return 0
        again = max(min(self.computed, self.reached) - start, 0)
        if start < self.request.prompt_tokens:
            self.computed_prompt_tokens += max(min(self.computed, self.request.prompt_tokens) - start - again, 0)
        self.reached = max(self.reached, self.computed)
        return again

    def start_line(self, now_ns: int, length: int) -> None:
        """Its TPOT is counted from now, with `length` tokens; only the first call counts."""
        if not self.line_from_ns:
            self.line_from_ns, self.line_from_length = now_ns, length

    def append(self, token_id: int) -> None:
        """A token was sampled."""
        self._tokens[self.length] = token_id
        self.length += 1

    def ended_by(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Why the sequence ends with `token_id`, its last; None when it goes on."""
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.max_length else None

    def give_prompt_logprobs(self, token: Sampled) -> None:
        """Let the first token with a logprob carry those of the prompt."""
        if self.prompt_logprobs and token.logprob is not None:
            token.logprob = replace(token.logprob, prompt=tuple(self.prompt_logprobs))
            self.prompt_logprobs = []

    def last_output(
        self, reason: FinishReason, token: Sampled | None, handle: KvHandle | None, detail: str
    ) -> SequenceOutput:
        """With what came of it here."""
        return SequenceOutput(
            sequence_id=self.sequence_id,
            token_ids=(token.token_id,) if token else (),
            logprobs=token.logprobs if token else (),
            finish=reason,
            handle=handle,
            detail=detail,
            cached_tokens=self.cached_tokens,
            computed_prompt_tokens=self.computed_prompt_tokens,
            kv_bytes_received=self.kv_bytes_received,
        )

    def transfer_report(self, received: Received, started_ns: int, now_ns: int) -> KvTransferReport:
        """Report the blocks that have come for it."""
        kv, prompt_tokens = self.request.kv, self.request.prompt_tokens
        assert kv is not None
        return KvTransferReport(
            request_id=self.request.request_id,
            from_worker_id=kv.worker_id,
            blocks=received.blocks,
            data_bytes=received.data_bytes,
            start_unix_ns=started_ns,
            end_unix_ns=now_ns,
            prompt_tokens=prompt_tokens,
            prompt_tokens_computed=max(prompt_tokens - kv.tokens, 0),
            shared=received.shared,
        )

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Let others reuse the blocks that are full and computed."""
        full = self.computed // self._block_size
        if full <= self._registered or not self.request.chain_root:
            return
        self._extend_hashes(full)
        for index in range(self._registered, full):
            pool.register(self.blocks[index], self._hashes[index])
        self._registered = full

    @property
    def _known_elsewhere(self) -> int:
        """Tokens whose KV may be found or fetched; the last one is always computed here, to be sampled."""
        kv = self.request.kv
        return min(kv.tokens, self.length - 1) if kv and not self.preempted else self.length - 1

    def _blocks_for(self, tokens: int) -> int:
        own = -(-tokens // self._block_size)
        kv = self.request.kv
        return max(own, kv.blocks) if kv and not self.preempted else own

    def _extend_hashes(self, blocks: int) -> None:
        known = len(self._hashes)
        if blocks <= known:
            return
        parent = self._hashes[-1] if known else self.request.chain_root
        tokens = self._tokens[known * self._block_size : blocks * self._block_size]
        self._hashes += block_hashes(parent, tokens, self._block_size)


def check_request(sequence: Sequence, capabilities: Capabilities) -> None:
    """Raises InvalidRequest when the sequence could never run on an engine with these capabilities."""
    request = sequence.request
    if not 1 <= request.prompt_tokens <= sequence.length:
        raise InvalidRequest(f"prompt_tokens is {request.prompt_tokens}, but the sequence has {sequence.length} tokens")
    if sequence.length >= capabilities.max_context_tokens:
        raise ContextTooLong(
            f"{sequence.length} tokens leave no room in a context of {capabilities.max_context_tokens}"
        )
    if sequence.length >= sequence.max_length:
        raise InvalidRequest(f"max_output_tokens {request.max_output_tokens} is already reached")
    ids = {int(request.token_ids.min()), int(request.token_ids.max()), *request.sampling.logit_bias}
    if capabilities.vocab_size and not 0 <= min(ids) <= max(ids) < capabilities.vocab_size:
        raise InvalidRequest(f"token ids must be from 0 to {capabilities.vocab_size - 1}, in logit_bias too")
    if request.sampling.prompt_logprobs and not capabilities.scores_prompts:
        raise InvalidRequest("this engine gives no logprobs of prompts: ask without echo and prompt_logprobs")
    _check_kv(sequence)
    if sequence.blocks_at_most > capabilities.kv_blocks:
        raise InvalidRequest(
            f"the sequence can need {sequence.blocks_at_most} KV blocks, the engine has {capabilities.kv_blocks}"
        )


def _check_kv(sequence: Sequence) -> None:
    request = sequence.request
    if (request.phase is EnginePhase.DECODE) != (request.kv is not None):
        raise InvalidRequest("a KV handle belongs to phase DECODE, and to no other")
    if request.kv is not None and request.kv.tokens < request.prompt_tokens - 1:
        raise InvalidRequest(
            f"the KV handle covers {request.kv.tokens} tokens: of a prompt of {request.prompt_tokens}"
            " at most the last token may be missing"
        )
