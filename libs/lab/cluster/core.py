"""The engine core over counted sequences, which can pass many decode steps at once."""

from typing import Final, NamedTuple, cast

from libs.engine.config import EngineConfig
from libs.engine.core import Core
from libs.engine.kv_blocks import RandomBytes
from libs.engine.port import Capabilities, EngineIdentity, EnginePhase
from libs.engine.reports import EngineLoad, StepReport
from libs.engine.runner import Batch, Sampled
from libs.engine.sequence import Sequence, Stage
from libs.lab.cluster.sequence import CountedRequest, CountedSequence
from libs.lab.rivals.port import PromptOrder, PromptTurn, QueuedPrompt
from libs.policy.gateway.queues import Outflow
from libs.policy.speed import Speed

MIN_COAST_STEPS: Final = 2


class DecodeSteps(NamedTuple):
    """A run of steps that only decode."""

    sequences: list[CountedSequence]
    steps: int
    """The number of steps that may pass at once."""


class LabCore(Core):
    """An engine core that can skip over steps without decisions, and order prompts as a rival does."""

    def __init__(
        self, config: EngineConfig, capabilities: Capabilities, identity: EngineIdentity, *, handles: RandomBytes
    ) -> None:
        """`handles` supplies the unique names of KV handles."""
        super().__init__(
            config, capabilities, frozenset(), identity, random_bytes=handles, new_sequence=CountedSequence
        )
        self._order: PromptOrder | None = None
        self._speed: Speed | None = None
        self._done = Outflow()
        self._prompts_wait = False

    def order_prompts(self, order: PromptOrder, speed: Speed) -> None:
        """Sort prompts by this order from now on. `speed` predicts the time of computing them."""
        self._order, self._speed = order, speed

    def admit(self, now_ns: int) -> None:
        """Admit as `Core.admit` does, in the configured order of prompts."""
        if self._order is not None and len(self._sequences.at(Stage.QUEUED_PROMPT)) > 1:
            admitted_ns = sum(each.left_ns for each in self._queued(Stage.PREFILL))
            pace = self._done.per_ns(now_ns)
            self._sort(Stage.QUEUED_PROMPT, now_ns, now_ns + admitted_ns / pace if pace else now_ns)
        super().admit(now_ns)

    def _ready(self, now_ns: int) -> tuple[list[Sequence], list[Sequence]]:
        if self._order is not None and len(self._sequences.at(Stage.PREFILL)) > 1:
            self._sort(Stage.PREFILL, now_ns, now_ns)
        return super()._ready(now_ns)

    def _sort(self, stage: Stage, now_ns: int, starts_ns: float) -> None:
        order = self._order
        assert order is not None
        queued = self._queued(stage)
        keys = order(queued, PromptTurn(now_ns, starts_ns, self._done.per_ns(now_ns)))
        of = {sequence.sequence_id: key for sequence, key in zip(self._sequences.at(stage), keys, strict=True)}
        self._sequences.sort(stage, lambda sequence: of[sequence.sequence_id])

    def _queued(self, stage: Stage) -> list[QueuedPrompt]:
        speed, found = self._speed, []
        assert speed is not None
        for sequence in self._sequences.at(stage):
            request = cast(CountedRequest, sequence.request)
            length, computed = sequence.length, sequence.computed
            found.append(
                QueuedPrompt(
                    request.arrival_ns,
                    request.first_token_due_ns,
                    request.prompt_tokens,
                    speed.prompt_ns(length - computed, length**2 - computed**2),
                    resumed=computed > sequence.cached_tokens or sequence.output_tokens > 0,
                    batch=request.yields,
                    flow=request.service_class,
                )
            )
        return found

    def begin(self, batch: Batch, now_ns: int) -> StepReport:
        """Begin a step as `Core.begin` does. With ordered prompts, the pace includes work done while others wait."""
        if self._order is not None and batch.work.prefill_tokens:
            roster = self._sequences
            waits = len(roster.at(Stage.QUEUED_PROMPT)) + len(roster.at(Stage.PREFILL)) > 1
            if waits and not self._prompts_wait:
                self._done.resume(now_ns)
            if waits:
                assert self._speed is not None
                done_ns = self._speed.prompt_ns(batch.work.prefill_tokens, batch.work.squared)
                self._done.left(round(done_ns), now_ns)
            self._prompts_wait = waits
        return super().begin(batch, now_ns)

    def cached_tokens(self, keys: list[bytes]) -> int:
        """Return the tokens at the prompt's start whose KV is cached here."""
        return len(self._pool.match(keys)) * self._capabilities.block_size_tokens

    @property
    def fetching(self) -> int:
        """Sequences that await their KV, or the token sampled by the worker that computed their prompt."""
        return len(self._sequences.at(Stage.FETCHING))

    @property
    def prefilling(self) -> int:
        """Admitted sequences whose prompts are not fully computed."""
        return len(self._sequences.at(Stage.PREFILL))

    def decoding_load(self) -> EngineLoad | None:
        """Return the load if nothing waits and no prompt is being computed, else None."""
        roster = self._sequences
        if roster.waiting or roster.at(Stage.PREFILL):
            return None
        return EngineLoad(
            running=len(roster.at(Stage.DECODE)),
            waiting=0,
            waiting_prefill_tokens=0,
            awaiting_kv=len(roster.at(Stage.FETCHING)),
            free_kv_blocks=self._pool.available,
        )

    def queued_decodes(self) -> tuple[int, int]:
        """Return (sequences, tokens) that arrived with KV but have no room for it yet."""
        queued = self._sequences.at(Stage.QUEUED_TRANSFER)
        return len(queued), sum(sequence.length for sequence in queued)

    def plan_or_coast(self, now_ns: int) -> Batch | DecodeSteps | None:
        """Plan as `Core.plan` does. If the next steps only decode, return them together instead."""
        decodes, prompts = self._ready(now_ns)
        if not prompts and len(decodes) == len(self._sequences.at(Stage.DECODE)):
            steps = self._coasting_steps(decodes)  # type: ignore[arg-type]
            if steps >= MIN_COAST_STEPS:
                self._pace.prompt_tokens(decodes, (), now_ns)  # reset the pace, since no prompt waits
                return DecodeSteps(decodes, steps)  # type: ignore[arg-type]
        return self._compose(decodes, prompts, now_ns)

    def plan_decoding(self, decoding: list[CountedSequence], now_ns: int) -> Batch | None:
        """Plan the step that was due when these sequences began to decode, ignoring sequences that have become ready
        since.
        """
        return self._compose(decoding, [], now_ns)  # type: ignore[arg-type]

    def _coasting_steps(self, decoding: list[CountedSequence]) -> int:
        """Return the number of decode steps that can pass without a decision, an ending sequence, or a missing
        block.
        """
        roster = self._sequences
        if not decoding or roster.waiting:
            return 0
        block_size = self._capabilities.block_size_tokens
        each = self._pool.available // len(decoding) * block_size
        most = decoding[0].ends_at - decoding[0].length - 1
        for sequence in decoding:
            if not sequence.sampled_here or sequence.handing_over or sequence.aborting or not sequence.has_room:
                return 0
            left = sequence.ends_at - sequence.length - 1
            most = min(most, left)
        if most > each:  # otherwise the space of each sequence does not matter
            room = min(sequence.room_tokens - sequence.length for sequence in decoding)
            most = max(each, min(most, room))
        return most

    def coast(self, decoding: list[CountedSequence], steps: int) -> None:
        """Apply `steps` decode steps that pass at once."""
        block_size, pool = self._capabilities.block_size_tokens, self._pool
        for sequence in decoding:
            sequence.coast(steps)
            if not sequence.has_room:
                blocks = pool.allocate(-(-sequence.length // block_size) - len(sequence.blocks))
                assert blocks is not None
                sequence.grow(blocks)
            sequence.register_full_blocks(pool)

    def free_blocks_after(self, decoding: list[CountedSequence], steps: int) -> int:
        """Return the blocks that remain free after `steps` such steps."""
        block_size = self._capabilities.block_size_tokens
        grown = 0
        for sequence in decoding:
            more = -(-(sequence.length + steps) // block_size) - len(sequence.blocks)
            if more > 0:
                grown += more
        return self._pool.available - grown

    @property
    def free_blocks(self) -> int:
        """The number of blocks that could be allocated now."""
        return self._pool.available

    def stepping(self, going_on: bool, now_ns: int) -> None:
        """Record that steps which pass at once begin or end now."""
        self._kv_wait.stepping(going_on, now_ns)

    def _take_token(self, sequence: Sequence, token: Sampled, now_ns: int) -> None:
        assert isinstance(sequence, CountedSequence)
        sequence.sampled_here = sequence.request.phase is not EnginePhase.PREFILL
        super()._take_token(sequence, token, now_ns)
