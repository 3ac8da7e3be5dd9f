"""A sequence inside the engine, and the validation of requests. Pure.

A sequence consists of its tokens, the number of leading tokens with KV, and the blocks that contain that KV.
"""

from dataclasses import replace
from enum import IntEnum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.contracts.errors import ContextTooLong, InvalidRequest
from libs.contracts.hashing import block_hashes
from libs.engine.kv_blocks import BlockPool, Offer, ReceivedTotals
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EnginePhase, EngineRequest, Pooling, PromptImage
from libs.engine.reports import FinishReason, KvTransferReport, Logprob, SequenceOutput
from libs.engine.runner import Chunk, Sampled
from libs.policy.worker.pace import TokenLine

IMAGES_ELSEWHERE: Final = "its blocks went to older sequences, and its images are not here to compute it again"
NO_IMAGES: Final = (
    "this engine takes no images: serve a vision model, such as LLaVA, with workers of the engine torch, or of vllm"
    " without a KV store"
)


class Stage(IntEnum):
    """The stage of a sequence in the engine. A sequence has blocks from FETCHING on."""

    QUEUED_TRANSFER = auto()
    """The KV is at another worker, and the sequence waits for free blocks here."""
    QUEUED_PREEMPTED = auto()
    """The sequence lost its blocks to another one. Its KV will be recomputed from the tokens."""
    QUEUED_PROMPT = auto()
    FETCHING = auto()
    """The blocks are allocated, and the KV is in transit."""
    PREFILL = auto()
    DECODE = auto()
    """Each step computes one generated token."""


class Sequence:
    """A request's tokens, blocks and progress while it is in the engine."""

    _pooled: NDArray[np.float32] | None = None
    """[hidden] 1D float32: the sum of the vectors of the chunks so far; None before the first vector."""

    def __init__(self, request: EngineRequest, *, block_size_tokens: int, max_context_tokens: int) -> None:
        self.request = request
        self.stage: Stage | None = None
        self.length = len(request.token_ids)
        """The number of tokens, of the prompt and generated."""
        self.computed = 0
        """The number of leading tokens that have KV here."""
        self.max_length = min(request.prompt_tokens + request.max_output_tokens, max_context_tokens)
        self.blocks: list[int] = []
        self.preempted = False
        """True if the sequence ever lost its blocks. From then on it is computed here, even if its KV once came from
        elsewhere.
        """
        self.reached = 0
        """The highest number of leading tokens that ever had KV here. Computing one of them again counts as
        recomputation.
        """
        self.cached_tokens = 0
        self.computed_prompt_tokens = 0
        self.kv_bytes_received = 0
        self.kv_arrived = False
        self.kv_ready = request.kv is not None and not request.kv.streamed
        """True if the source reports ready KV that has not arrived here."""
        self.kv_ready_since_ns = 0
        """The time in Unix nanoseconds since which `kv_ready` has been True; 0 while it is False."""
        self.kv_ready_ns = 0
        """The total time for which `kv_ready` was True, without the current period."""
        self.found_blocks = 0
        """The number of leading blocks that were cached here. Only the rest is fetched."""
        self.sampled_elsewhere: tuple[int, ...] | None = None
        """The tokens sampled by the worker that computed the streamed prompt; None until `proceed`."""
        self.streamed: Offer | None = None
        """The offer of this prompt while it is computed; None if nothing is streamed."""
        self.joined = False
        """True if the sequence has decoded here. It is then never held back again."""
        self.held_since_ns = 0
        """The time at which the sequence could first have decoded here, in Unix nanoseconds; 0 if not yet."""
        self.line_from_ns = 0
        """The time in Unix nanoseconds from which TPOT is measured, when the first token was known to exist; 0 if not
        yet.
        """
        self.line_from_length = 0
        self.prompt_logprobs: list[Logprob] = []
        """The logprobs of the prompt's tokens so far, if requested."""
        self.in_step = False
        """True if the running step computes the sequence. Its blocks must not be freed before that step ends."""
        self.aborting = False
        self.handing_over = False
        """True if the sequence is handed over at its next step boundary."""
        self._block_size = block_size_tokens
        self._room_tokens = 0
        """The number of tokens that the allocated blocks can hold."""
        self._tokens = request.token_ids
        self._table: NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._hashes: list[bytes] = []
        self._registered = 0

    @property
    def sequence_id(self) -> int:
        return self.request.sequence_id

    @property
    def transferred(self) -> bool:
        return self.request.kv is not None

    @property
    def yields(self) -> bool:
        """True if the prompt is computed only while no prompt without this flag waits."""
        return self.request.yields

    @property
    def kind(self) -> str:
        """The tenant and class whose past answers predict this sequence's length."""
        return self.request.kind

    @property
    def tpot_target_ns(self) -> int:
        """The target time per output token; 0 for none."""
        return self.request.tpot_target_ns

    @property
    def line(self) -> TokenLine | None:
        """The due times of the sequence's tokens; None without a TPOT target, or before the first token."""
        target_ns = self.request.tpot_target_ns
        if not target_ns or not self.line_from_ns:
            return None
        return TokenLine(self.line_from_ns, target_ns, self.length - self.line_from_length)

    @property
    def output_tokens(self) -> int:
        """The number of tokens sampled so far, here and elsewhere."""
        return self.length - self.request.prompt_tokens

    @property
    def most_left(self) -> int:
        """The upper bound of the tokens still to be sampled."""
        return self.max_length - self.length

    @property
    def first_token_due_ns(self) -> int:
        """The deadline of the first token in Unix nanoseconds; 0 if it was sampled or has no deadline."""
        return 0 if self.output_tokens else self.request.first_token_due_ns

    @property
    def pending(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def pending_free(self) -> int:
        """The number of pending tokens exempt from the prompt budget.

        These are the tokens whose KV was lost to preemption, and the one generated token after them.
        """
        decoding = self.reached >= self.request.prompt_tokens and self.reached + 1 == self.length
        return max(self.reached + decoding - self.computed, 0)

    @property
    def blocks_at_most(self) -> int:
        """The number of blocks for all tokens that will ever be computed here. The last sampled token needs no KV."""
        return self._blocks_for(self.length if self.request.phase is EnginePhase.PREFILL else self.max_length - 1)

    @property
    def blocks_now(self) -> int:
        """The number of blocks that the sequence's current tokens need."""
        return self._blocks_for(self.length)

    @property
    def has_room(self) -> bool:
        """True if the sequence's blocks can hold its current tokens."""
        return self.length <= self._room_tokens

    @property
    def may_grow(self) -> bool:
        """True if the sequence may still need more blocks than it has."""
        return max(len(self.blocks), self.blocks_now) < self.blocks_at_most

    def reusable_hashes(self) -> list[bytes]:
        """Return the hashes of blocks that may be reused from the pool.

        Only full blocks can be reused, and at least the last token remains to be computed.
        """
        if not self.request.chain_root:
            return []
        self._extend_hashes(self.length // self._block_size)
        return self._hashes[: self._known_elsewhere // self._block_size]

    def admit(self, blocks: list[int], shared: int) -> None:
        """Assign blocks. The first `shared` of them were cached and contain KV."""
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
        self._table[len(self.blocks) : len(self.blocks) + len(blocks)] = blocks
        self.blocks += blocks
        self._room_tokens = len(self.blocks) * self._block_size

    def preempt(self) -> list[int]:
        """Take all blocks from the sequence and return them. Its tokens remain."""
        blocks, self.blocks = self.blocks, []
        self._room_tokens = 0
        self.computed = 0
        self.prompt_logprobs.clear()
        self._pooled = None
        self.preempted = True
        return blocks

    def receive(self) -> None:
        """Record that the KV behind the request's handle has arrived."""
        self.computed = self.reached = self._known_elsewhere

    def table(self, tokens: int) -> NDArray[np.int32]:
        """Return [blocks] 1D int32: the blocks of the first `tokens` positions."""
        return self._table[: -(-tokens // self._block_size)]

    def chunk(self, tokens: int) -> Chunk:
        """Return the next `tokens` tokens as work for a step."""
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
            pooling=request.pooling,
            images=self._images_in(self.computed, end) if request.images else (),
            second_from=request.second_from,
        )

    def _images_in(self, first: int, end: int) -> tuple[PromptImage, ...]:
        spans = ((image, image.span) for image in self.request.images)
        return tuple(image for image, span in spans if span.first < end and first < span.first + span.tokens)

    @property
    def images_left(self) -> tuple[PromptImage, ...]:
        """The images with tokens that are still to be computed."""
        return self._images_in(self.computed, self.request.prompt_tokens)

    @property
    def lacks_images(self) -> bool:
        """True if the prompt cannot be computed here because this engine has no files of its images."""
        return any(not image.data for image in self.request.images)

    def advance(self, tokens: int) -> int:
        """Record `tokens` computed tokens, and return how many of them had been computed before."""
        start, self.computed = self.computed, self.computed + tokens
        if start == self.reached and start >= self.request.prompt_tokens:  # nearly every token
            self.reached = self.computed
            return 0
        again = max(min(self.computed, self.reached) - start, 0)
        if start < self.request.prompt_tokens:
            self.computed_prompt_tokens += max(min(self.computed, self.request.prompt_tokens) - start - again, 0)
        self.reached = max(self.reached, self.computed)
        return again

    def start_line(self, now_ns: int, length: int) -> None:
        """Measure TPOT from `now_ns`, when the sequence has `length` tokens. Only the first call has an effect."""
        if not self.line_from_ns:
            self.line_from_ns, self.line_from_length = now_ns, length

    def append(self, token_id: int) -> None:
        self._tokens[self.length] = token_id
        self.length += 1

    def ended_by(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Return the reason why `token_id`, the last token, ends the sequence; None if the sequence continues."""
        sampling = self.request.sampling
        if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.max_length else None

    def give_prompt_logprobs(self, token: Sampled) -> None:
        """Move the prompt's logprobs into the first token's, if there are any."""
        if self.prompt_logprobs and token.logprob is not None:
            token.logprob = replace(token.logprob, prompt=tuple(self.prompt_logprobs))
            self.prompt_logprobs = []

    def add_pooled(self, token: Sampled) -> None:
        """Add the vector of a chunk, if it has one."""
        if token.pooled is not None:
            self._pooled = token.pooled if self._pooled is None else self._pooled + token.pooled

    def pooled(self) -> bytes:
        """Return the vector of the whole prompt as packed little-endian float32."""
        assert self._pooled is not None
        tokens = self.request.prompt_tokens if self.request.pooling is Pooling.MEAN else 1
        return (self._pooled / tokens).astype("<f4").tobytes()

    def last_output(
        self, reason: FinishReason, token: Sampled | None, handle: KvHandle | None, detail: str, pooled: bytes = b""
    ) -> SequenceOutput:
        """Return the final output, with the sequence's totals on this engine."""
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
            pooled=pooled,
        )

    def transfer_report(self, received: ReceivedTotals, started_ns: int, now_ns: int) -> KvTransferReport:
        kv, prompt_tokens = self.request.kv, self.request.prompt_tokens
        assert kv is not None
        ready_ns = self._kv_ready_until_ns(now_ns)
        if kv.named and not received.waited_ns:
            ready_ns = 0
        elif kv.named:  # its pull is open before its prompt has begun, and the sender measures for how long it waits
            started_ns = min(started_ns + received.first_waited_ns, now_ns)
            ready_ns = max(now_ns - started_ns - (received.waited_ns - received.first_waited_ns), 1)
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
            ready_ns=min(ready_ns, now_ns - started_ns),
            named=kv.named,
        )

    def note_kv_ready(self, now_ns: int) -> None:
        """Update `kv_ready_since_ns` and `kv_ready_ns` after a change of `kv_ready`."""
        if self.kv_ready:
            self.kv_ready_since_ns = self.kv_ready_since_ns or now_ns
        else:
            self.kv_ready_ns, self.kv_ready_since_ns = self._kv_ready_until_ns(now_ns), 0

    def _kv_ready_until_ns(self, now_ns: int) -> int:
        since_ns = self.kv_ready_since_ns
        return self.kv_ready_ns + (now_ns - since_ns if since_ns else 0)

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Make full, computed blocks reusable by other sequences."""
        full = self.computed // self._block_size
        if full <= self._registered or not self.request.chain_root:
            return
        self._extend_hashes(full)
        for index in range(self._registered, full):
            pool.register(self.blocks[index], self._hashes[index])
        self._registered = full

    @property
    def _known_elsewhere(self) -> int:
        """The upper bound of tokens whose KV can be found or fetched.

        The last one is always computed here, to sample the next.
        """
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
        images = [image.span for image in self.request.images]
        self._hashes += block_hashes(parent, tokens, self._block_size, images, first=known * self._block_size)


def check_request(sequence: Sequence, capabilities: Capabilities) -> None:
    """Raise InvalidRequest if the sequence could never run on an engine with these capabilities."""
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
        raise InvalidRequest("this engine has no logprobs of prompts: send the request without echo or prompt_logprobs")
    if request.pooling is not None:
        _check_pooling(request, capabilities)
    elif not capabilities.generates:
        raise InvalidRequest(
            "this engine only gives vectors: its model is an encoder, or it was started with runner=pooling"
        )
    if request.images:
        _check_images(request, capabilities)
    _check_kv(sequence)
    if sequence.blocks_at_most > capabilities.kv_blocks:
        raise InvalidRequest(
            f"the sequence can need {sequence.blocks_at_most} KV blocks, the engine has {capabilities.kv_blocks}"
        )


def _check_pooling(request: EngineRequest, capabilities: Capabilities) -> None:
    if not capabilities.pools:
        raise InvalidRequest(
            "this engine gives no embeddings: serve the model with the engine torch, or start workers of the engine"
            " vllm with --engine-arg runner=pooling"
        )
    if request.pooling is not None and request.pooling not in capabilities.pools:
        raise InvalidRequest(
            f"this engine does not pool by {request.pooling.name.lower()}: its model's files name another method"
        )
    if request.phase is EnginePhase.DECODE or len(request.token_ids) != request.prompt_tokens:
        raise InvalidRequest("only a prompt becomes a vector, where it is computed")
    if request.pooling is not Pooling.LAST and request.chain_root:
        raise InvalidRequest("a vector of all tokens: no prefix of it may be reused")
    if not 0 <= request.second_from < request.prompt_tokens:
        raise InvalidRequest(f"second_from is {request.second_from}, beyond {request.prompt_tokens} tokens")


def _check_images(request: EngineRequest, capabilities: Capabilities) -> None:
    if not capabilities.images:
        raise InvalidRequest(NO_IMAGES)
    end = 0
    for image in request.images:
        if not end <= image.span.first < image.span.first + image.span.tokens <= request.prompt_tokens:
            raise InvalidRequest("the images of a prompt must lie in it, one after the other")
        end = image.span.first + image.span.tokens
        if not image.data and (request.kv is None or end > request.kv.tokens):
            raise InvalidRequest("an image without its file can only be part of a prompt that is computed elsewhere")


def _check_kv(sequence: Sequence) -> None:
    request = sequence.request
    if (request.phase is EnginePhase.DECODE) != (request.kv is not None):
        raise InvalidRequest("a KV handle belongs to phase DECODE, and to no other")
    if request.kv is not None and request.kv.tokens < request.prompt_tokens - 1:
        raise InvalidRequest(
            f"the KV handle covers {request.kv.tokens} tokens: of a prompt of {request.prompt_tokens}"
            " at most the last token may be missing"
        )
