"""The engine core: queue, blocks and batches of one engine. Pure: sync, no clock, no I/O, no randomness.

`plan` composes the next step; `begin` and `apply` bracket the model call. `take_event` returns the results of steps and
of all other calls.

When KV runs out, older sequences take the blocks of the youngest one, which is computed again later. The oldest running
sequence is never preempted, so every sequence that fits the pool alone can finish. A sequence is admitted only while
each running one can still take a whole block, which bounds thrashing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice

from libs.contracts.errors import InvalidRequest, QueueFull
from libs.engine.config import EngineConfig
from libs.engine.kv_blocks import BlockPool, KvWait, RandomBytes, ReceivedTotals
from libs.engine.kv_port import KvHandle
from libs.engine.offers import Offers
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase, EngineRequest, PromptImage
from libs.engine.reports import (
    EngineEvent,
    EngineIntegrity,
    EngineLoad,
    EngineNews,
    FinishReason,
    SequenceOutput,
    StepReport,
)
from libs.engine.roster import QUEUED, Roster, grow, unless_others_wait
from libs.engine.runner import Batch, Sampled, blocks_for
from libs.engine.sequence import IMAGES_ELSEWHERE, Sequence, Stage, check_request
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker.pace import Pace

RETRY_AFTER_S = 1.0


def compose(
    decodes: Iterable[Sequence],
    prompts: Iterable[Sequence],
    budget_tokens: int,
    recompute_tokens: int,
    *,
    whole: bool = False,
) -> Batch:
    """Return the next step: every decode with room, then chunks of prompts with room, in order and up to the budget.

    A transferred sequence computes at least one token per step, since with budget 0 it would never start. Tokens lost
    by preemption have their own budget, `recompute_tokens`, and take nothing from other prompts. With `whole`, prompts
    are not cut. A prompt that exceeds the rest of the budget is then computed alone in a later step.
    """
    chunks = [sequence.chunk(1) for sequence in decodes if sequence.has_room]
    for sequence in prompts:
        if not sequence.has_room:
            continue
        if sequence.pending_free:
            tokens = min(sequence.pending_free, recompute_tokens)
            recompute_tokens -= tokens
            if tokens:
                chunks.append(sequence.chunk(tokens))
            continue
        tokens = min(sequence.pending, max(budget_tokens, 1 if sequence.request.kv else 0))
        if whole and 0 < tokens < sequence.pending:
            if chunks:
                break  # first in the next step, so that shorter prompts cannot overtake it forever
            tokens = sequence.pending
        if tokens:
            chunks.append(sequence.chunk(tokens))
            budget_tokens = max(budget_tokens - tokens, 0)
    return Batch(tuple(chunks))


def blocks_to_spare(admitted: Sequence, holding: Iterable[Sequence], enough: int) -> int:
    """Return the number of blocks that must stay free when a sequence is admitted: one for each sequence that may grow.

    Counting stops at `enough`, so a nearly full pool is checked without a look at every sequence.
    """
    return sum(islice((1 for sequence in chain((admitted,), holding) if sequence.may_grow), enough))


class Core:
    """The sequences of one engine, from `submit` to their last output.

    Prompts are admitted first come, first served. Transferred sequences go before them, since their first token has
    been sent and their blocks have a lease. Preempted sequences go before both. Within each kind, sequences that yield
    are admitted last and preempted first. Blocks are allocated as sequences grow.
    """

    def __init__(
        self,
        config: EngineConfig,
        capabilities: Capabilities,
        eos_token_ids: frozenset[int],
        identity: EngineIdentity,
        *,
        random_bytes: RandomBytes,
        new_sequence: Callable[..., Sequence] = Sequence,
    ) -> None:
        # The lab passes a `new_sequence` whose sequences hold no tokens.
        self._config = config
        self._capabilities = capabilities
        self._new_sequence = new_sequence
        self._eos_token_ids = eos_token_ids
        self._pace = Pace(config.prefill_chunk_tokens)
        self._pool = BlockPool(capabilities.kv_blocks)
        lease_ns = config.kv_lease_ms * 1_000_000
        self.offers = Offers(self._pool, identity, capabilities, lease_ns=lease_ns, random_bytes=random_bytes)
        """The KV that other workers can pull, by handle."""
        self._kv_wait = KvWait()
        self._sequences = Roster()
        self._preemptions = 0
        self._recomputed_tokens = 0
        self._new_fetches: list[Sequence] = []
        self._step: StepReport | None = None
        self._news = EngineNews()

    # ------------------------------------------------------------------ requests

    def submit(self, request: EngineRequest, now_ns: int) -> None:
        """Queue a sequence. Raise InvalidRequest if it can never run here, QueueFull if the queue is at its bound."""
        if request.sequence_id in self._sequences:
            raise InvalidRequest(f"sequence {request.sequence_id} is in use")
        sequence = self._new_sequence(
            request,
            block_size_tokens=self._capabilities.block_size_tokens,
            max_context_tokens=self._capabilities.max_context_tokens,
        )
        check_request(sequence, self._capabilities)
        if self._sequences.waiting >= self._config.max_waiting:
            raise QueueFull("the engine's queue is full", retry_after_s=RETRY_AFTER_S)
        if request.kv_name:
            self.offers.expect(request.kv_name)
        self.offers.forget_sequence(request.sequence_id)
        self._pace.note_prompt(sequence, now_ns)
        if request.kv and sequence.length > request.prompt_tokens:
            sequence.start_line(now_ns, sequence.length)
        self._sequences.add(sequence, Stage.QUEUED_TRANSFER if request.kv else Stage.QUEUED_PROMPT)
        self.admit(now_ns)

    def abort(self, sequence_id: int, now_ns: int) -> None:
        """End a sequence, or the lease it left. A sequence in the running step ends with that step."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            self.offers.end_sequence(sequence_id)
        elif sequence.in_step:
            sequence.aborting = True
        else:
            self._finish(sequence, FinishReason.ABORTED)
        self.admit(now_ns)

    def proceed(self, sequence_id: int, token_ids: tuple[int, ...], now_ns: int) -> None:
        """Continue `sequence_id` from the tokens that another worker sampled after its prompt. Ignore other ids.

        Raise InvalidRequest for tokens from which the sequence cannot continue.
        """
        sequence = self._sequences.get(sequence_id)
        kv = sequence.request.kv if sequence else None
        if sequence is None or kv is None or not kv.streamed or sequence.sampled_elsewhere is not None:
            return
        if sequence.length + len(token_ids) >= sequence.max_length or not self._capabilities.knows(token_ids):
            raise InvalidRequest(f"a sequence of {sequence.length} tokens cannot continue from {token_ids}")
        sequence.sampled_elsewhere = token_ids
        sequence.start_line(now_ns, sequence.length + len(token_ids))
        sequence.kv_ready = True  # the prompt is computed
        if sequence.kv_arrived:
            self._go_on(sequence, now_ns)

    def hand_over(self, sequence_id: int, now_ns: int) -> None:
        """Hand a sequence over with its KV, now or with its next token. Unknown ids are ignored."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.request.phase is EnginePhase.PREFILL:
            return
        sequence.handing_over = True
        if sequence.stage is Stage.DECODE and not sequence.in_step:
            self._finish(sequence, FinishReason.HANDED_OVER, handle=self.offers.seal(sequence, now_ns))
            self.admit(now_ns)

    def set_prefill_budget(self, tokens: int) -> None:
        """Set the number of prompt tokens that a step may compute, at most a chunk. At 0, prompts wait."""
        self._pace.budget_tokens = max(tokens, 0)

    def set_prefill_chunk(self, tokens: int) -> None:
        """Set the upper bound of prompt tokens per step, regardless of the budget."""
        self._pace.chunk_tokens = max(tokens, 1)

    def set_step_time(self, model: StepTimeModel) -> None:
        """Set the model by which prompt chunks and new decodes are limited to meet running TPOT targets."""
        self._pace.step_time = model

    # ------------------------------------------------------------------ steps

    def admit(self, now_ns: int) -> None:
        """Allocate blocks to queued sequences while the head of the queue fits. Safe while a step runs."""
        self.offers.expire(now_ns)
        waiting = self._sequences.waiting
        running = len(self._sequences) - waiting
        for stage in QUEUED if waiting else ():
            while (sequence := self._sequences.head(stage)) is not None:
                if running >= self._capabilities.max_sequences or not self._give_blocks(sequence, running):
                    self._note_awaiting(now_ns)
                    return
                running += 1
        self._note_awaiting(now_ns)

    def plan(self, now_ns: int) -> Batch | None:
        """Return the next step: every decode, then prompt chunks within the budget. None if there is no work."""
        return self._compose(*self._ready(now_ns), now_ns)

    def _ready(self, now_ns: int) -> tuple[list[Sequence], list[Sequence]]:
        """Return (decodes, prompts) that the next step may compute."""
        self.offers.expire(now_ns)
        self._grow()
        self.admit(now_ns)
        decodes = self._pace.decodes(self._sequences.at(Stage.DECODE), now_ns)
        return decodes, unless_others_wait(self._sequences.at(Stage.PREFILL))

    def _compose(self, decodes: list[Sequence], prompts: list[Sequence], now_ns: int) -> Batch | None:
        batch = compose(
            decodes,
            prompts,
            budget_tokens=self._pace.prompt_tokens(decodes, prompts, now_ns, self._sequences.at(Stage.FETCHING)),
            recompute_tokens=self._pace.chunk_tokens,
            whole=self._capabilities.whole_prompts,
        )
        return batch if batch.chunks else None

    def begin(self, batch: Batch, now_ns: int) -> StepReport:
        """Record that a step starts now, and return the report that announces it."""
        for chunk in batch.chunks:
            sequence = self._sequences[chunk.sequence_id]
            sequence.in_step = True
            # A prompt that this step finishes has nothing to stream: all its blocks become ready at once. The receiver
            # of a named handle is already waiting and needs no announcement.
            name = sequence.request.kv_name
            partial = sequence.request.phase is EnginePhase.PREFILL and not chunk.sample
            if (partial or name) and not sequence.streamed and self._capabilities.streams_kv and chunk.pooling is None:
                handle = self.offers.stream(sequence)
                if not name:
                    self._news.outputs.append(SequenceOutput(sequence.sequence_id, streamed_handle=handle))
        self._kv_wait.stepping(True, now_ns)
        self._step = self._sequences.report(batch.work, now_ns, 0)
        return self._step

    def apply(self, batch: Batch, sampled: Mapping[int, Sampled], now_ns: int) -> StepReport:
        """Record that the step ended now and sampled these tokens, and return its report."""
        assert self._step is not None
        self._kv_wait.stepping(False, now_ns)
        for chunk in batch.chunks:
            sequence = self._sequences[chunk.sequence_id]
            sequence.in_step = False
            self._recomputed_tokens += sequence.advance(len(chunk.token_ids))
            sequence.register_full_blocks(self._pool)
            if sequence.streamed is not None:
                self.offers.progress(sequence)
            if chunk.scored is not None:
                sequence.prompt_logprobs += sampled[chunk.sequence_id].prompt
            if chunk.pooling is not None and chunk.sequence_id in sampled:
                sequence.add_pooled(sampled[chunk.sequence_id])
            if sequence.aborting:
                self._finish(sequence, FinishReason.ABORTED)
            elif chunk.sample:
                self._take_token(sequence, sampled[chunk.sequence_id], now_ns)
        started, self._step = self._step, None
        return self._sequences.report(batch.work, started.start_unix_ns, now_ns)

    def begin_encode(self, images: int, now_ns: int) -> StepReport:
        """Record that a step starts now that encodes images, and return the report that announces it."""
        return replace(self.begin_trial(StepWork(), now_ns), encoded_images=images)

    def end_encode(self, faults: Mapping[bytes, str], now_ns: int) -> None:
        """Record that the encoding step ended, and fail the sequences with images in `faults` (reasons by digest)."""
        self._kv_wait.stepping(False, now_ns)
        for sequence in list(self._sequences) if faults else ():
            digests = [image.span.digest for image in sequence.request.images if image.data]
            if broken := faults.keys() & digests:
                self._finish(sequence, FinishReason.FAILED, detail=faults[min(broken)])
        self.admit(now_ns)

    # ------------------------------------------------------------------ measuring

    def lend_blocks(self, tokens: int, now_ns: int) -> list[int] | None:
        """Allocate blocks for a trial step of `tokens` tokens. The caller frees them with `give_back`.

        Return None if there is no room, or if decoding sequences would miss their targets.
        """
        if not self._pace.has_time_for_trial(tokens, list(self._sequences.at(Stage.DECODE)), now_ns):
            return None
        return self._pool.allocate(blocks_for(tokens, self._capabilities.block_size_tokens))

    def begin_trial(self, work: StepWork, now_ns: int) -> StepReport:
        """Record that a trial step starts now, which ends any KV wait, and return the report that announces it."""
        self._kv_wait.stepping(True, now_ns)
        return self._sequences.report(work, now_ns, 0)

    def give_back(self, blocks: list[int], now_ns: int) -> None:
        """Free the blocks of a trial step that ends now."""
        self._kv_wait.stepping(False, now_ns)
        self._pool.release(blocks)
        self.admit(now_ns)

    # ------------------------------------------------------------------ KV from and for other engines

    def take_fetches(self) -> list[Sequence]:
        """Return the sequences that got blocks since the last call and await their KV."""
        fetches, self._new_fetches = self._new_fetches, []
        return [sequence for sequence in fetches if sequence.stage is Stage.FETCHING]

    def kv_requested(self, sequence: Sequence) -> None:
        """Publish that the first block was requested, after which the decode worker no longer changes."""
        self._news.outputs.append(SequenceOutput(sequence.sequence_id, pulling=True))

    def kv_arrived(self, sequence: Sequence, received: ReceivedTotals, started_ns: int, now_ns: int) -> None:
        """Record that all blocks of the sequence's handle have been received into the pool."""
        kv = sequence.request.kv
        assert kv is not None
        sequence.kv_bytes_received = received.data_bytes
        sequence.kv_arrived = True
        self._news.transfers.append(sequence.transfer_report(received, started_ns, now_ns))
        if sequence.sampled_elsewhere is not None or not kv.streamed:
            self._go_on(sequence, now_ns)
        elif kv.named:
            self._proceed_named(sequence, received.token_ids, now_ns)
        self._note_awaiting(now_ns)

    def _proceed_named(self, sequence: Sequence, token_ids: tuple[int, ...], now_ns: int) -> None:
        if not token_ids:
            self.kv_failed(sequence, FinishReason.KV_LOST, "the blocks of a named handle came without a token", now_ns)
            return
        try:
            self.proceed(sequence.sequence_id, token_ids, now_ns)
        except InvalidRequest as error:
            self.kv_failed(sequence, FinishReason.FAILED, error.message, now_ns)

    def kv_is_ready(self, sequence: Sequence, ready: bool, now_ns: int) -> None:
        """Record whether the source has ready KV that has not been received here."""
        if sequence.kv_ready is not ready:
            sequence.kv_ready = ready
            self._note_awaiting(now_ns)

    def kv_failed(self, sequence: Sequence, reason: FinishReason, detail: str, now_ns: int) -> None:
        """End a sequence whose blocks cannot be received."""
        self._finish(sequence, reason, detail=detail)
        self.admit(now_ns)

    def release(self, opaque: bytes, now_ns: int) -> None:
        """Free the blocks behind a handle. Its receiver has its own copy."""
        self.offers.end(opaque)
        self.admit(now_ns)

    # ------------------------------------------------------------------ results

    def take_event(self, step: StepReport | None = None) -> EngineEvent | None:
        """Return all news since the last call together with `step`; None if there are none."""
        return self._news.take(step, self._kv_wait, self._pool)

    def load(self, *, reported_to_ns: int = 0, pool_faults: int = 0) -> EngineLoad:
        """Return the current depths. The calling engine supplies `reported_to_ns` and `pool_faults`."""
        fetching = self._sequences.at(Stage.FETCHING)
        ready_since = [each.kv_ready_since_ns for each in fetching if each.kv_ready_since_ns and not each.kv_arrived]
        return EngineLoad(
            running=len(self._sequences.at(Stage.PREFILL)) + len(self._sequences.at(Stage.DECODE)),
            waiting=self._sequences.waiting,
            waiting_prefill_tokens=self._sequences.waiting_prefill_tokens,
            awaiting_kv=len(fetching),
            free_kv_blocks=self._pool.available,
            kv_wait_since_unix_ns=self._kv_wait.since_ns,
            reported_to_unix_ns=reported_to_ns,
            pool_faults=pool_faults,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            waiting_prefill_squares=self._sequences.waiting_prefill_squares,
            starved_since_unix_ns=self._kv_wait.starved_since_ns,
            awaiting_ready_kv=len(ready_since),
            ready_kv_since_unix_ns=min(ready_since, default=0),
        )

    @property
    def waiting_images(self) -> list[PromptImage]:
        return self._sequences.waiting_images()

    def integrity(self) -> EngineIntegrity:
        """Return the counters that must be zero when nothing runs."""
        return EngineIntegrity(len(self._sequences), self._pool.referenced, len(self.offers))

    @property
    def holds_blocks(self) -> bool:
        """True if any sequence or handle exists that may hold blocks."""
        return bool(self._sequences or len(self.offers))

    def pool_fault(self) -> str:
        """Describe a mismatch between reference counts and the blocks of sequences and handles; empty if none."""
        return self._pool.fault(chain((b for each in self._sequences for b in each.blocks), self.offers.blocks()))

    def drop_all(self, now_ns: int) -> None:
        """Abort every sequence and end every lease. No step may be running."""
        self._step = None
        self._kv_wait.stepping(False, now_ns)
        for sequence in list(self._sequences):
            self._finish(sequence, FinishReason.ABORTED)
        self.offers.end_all()
        self._note_awaiting(now_ns)

    # ------------------------------------------------------------------ inner parts

    def _give_blocks(self, sequence: Sequence, running: int) -> bool:
        shared = self._pool.match(sequence.reusable_hashes())
        needed, spare = sequence.blocks_now - len(shared), 0
        # With a free block left for each running sequence, it does not matter which of them may grow.
        if running and self._pool.available <= needed + len(shared) + running:
            # Counting one block more than could stay free is enough to refuse the sequence.
            enough = max(self._pool.available - needed + 1, 0)
            spare = blocks_to_spare(sequence, self._sequences.holding(), enough)
        blocks = self._pool.allocate(needed, shared, spare=spare)
        if blocks is None:
            return False
        sequence.admit(blocks, len(shared))
        if sequence.request.kv and not sequence.preempted:
            self._new_fetches.append(sequence)
            self._sequences.move(sequence, Stage.FETCHING)
        else:
            self._sequences.move(sequence, Stage.PREFILL)
        return True

    def _grow(self) -> None:
        """Allocate blocks for sampled tokens. No step may be running."""
        if all(sequence.has_room for sequence in self._sequences.computing()):
            return
        for sequence in grow(self._sequences.running(), self._pool):
            self._preemptions += 1
            self._sequences.move(sequence, Stage.QUEUED_PREEMPTED)
            if sequence.lacks_images:
                self._finish(sequence, FinishReason.KV_LOST, detail=IMAGES_ELSEWHERE)

    def _take_token(self, sequence: Sequence, token: Sampled, now_ns: int) -> None:
        if token.fault:
            self._finish(sequence, FinishReason.FAILED, detail=token.fault)
            return
        if sequence.request.pooling is not None:
            self._finish(sequence, FinishReason.STOP, pooled=sequence.pooled())
            return
        sequence.give_prompt_logprobs(token)
        sequence.append(token.token_id)
        if not sequence.line_from_ns:
            sequence.start_line(now_ns, sequence.length)
        reason = sequence.ended_by(token.token_id, self._eos_token_ids)
        handle = None
        if reason is None and (sequence.handing_over or sequence.request.phase is EnginePhase.PREFILL):
            reason = FinishReason.HANDED_OVER if sequence.handing_over else FinishReason.PREFILLED
            handle = self.offers.seal(sequence, now_ns, (token.token_id,))
        if reason is not None:
            self._finish(sequence, reason, token=token, handle=handle)
            return
        if sequence.stage is not Stage.DECODE:
            self._sequences.move(sequence, Stage.DECODE)
        self._news.outputs.append(SequenceOutput(sequence.sequence_id, (token.token_id,), token.logprobs))

    def _go_on(self, sequence: Sequence, now_ns: int) -> None:
        """Resume a transferred sequence that has its KV and all tokens sampled elsewhere."""
        for token_id in sequence.sampled_elsewhere or ():
            sequence.append(token_id)
        sequence.receive()
        sequence.register_full_blocks(self._pool)
        generated_only = sequence.pending == 1 and sequence.computed >= sequence.request.prompt_tokens
        self._sequences.move(sequence, Stage.DECODE if generated_only else Stage.PREFILL)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token: Sampled | None = None,
        handle: KvHandle | None = None,
        detail: str = "",
        pooled: bytes = b"",
    ) -> None:
        self.offers.withdraw(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        self._sequences.remove(sequence)
        if reason in {FinishReason.STOP, FinishReason.LENGTH} and not pooled:
            self._pace.note_end(sequence.output_tokens, sequence.kind)
        self._news.outputs.append(sequence.last_output(reason, token, handle, detail, pooled))

    def _note_awaiting(self, now_ns: int) -> None:
        # A sequence that has its KV and only lacks the token sampled elsewhere does not wait for KV.
        awaiting = [each for each in self._sequences.at(Stage.FETCHING) if not each.kv_arrived]
        for each in awaiting:
            each.note_kv_ready(now_ns)
        self._kv_wait.awaiting(bool(awaiting), now_ns, ready=any(each.kv_ready for each in awaiting))
