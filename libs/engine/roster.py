"""The sequences of one engine by stage, with the queues in admission order. Pure."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final

from libs.engine.kv_blocks import BlockPool
from libs.engine.port import PromptImage
from libs.engine.reports import StepReport
from libs.engine.sequence import Sequence, Stage
from libs.policy.step_time import StepWork

# The queues in the order in which their sequences are admitted.
QUEUED: Final = (Stage.QUEUED_PREEMPTED, Stage.QUEUED_TRANSFER, Stage.QUEUED_PROMPT)
# The stages in which sequences hold blocks.
HOLDING: Final = (Stage.FETCHING, Stage.PREFILL, Stage.DECODE)


def unless_others_wait(prompts: Iterable[Sequence]) -> list[Sequence]:
    """Return the prompts that do not yield, or all prompts if every one yields.

    A prompt that yields would make a shared step longer for the others.
    """
    every = list(prompts)
    first = [sequence for sequence in every if not sequence.request.yields and sequence.has_room]
    return [sequence for sequence in every if not sequence.request.yields or sequence.request.kv] if first else every


class Roster:
    """The set of an engine's sequences. Each is in exactly one stage from `add` to `remove`."""

    def __init__(self) -> None:
        self._all: dict[int, Sequence] = {}
        """The sequences by id, in order of arrival."""
        self._at: Mapping[Stage, dict[int, Sequence]] = {stage: {} for stage in Stage}
        self._views = {stage: there.values() for stage, there in self._at.items()}
        self._waiting = 0
        # Kept up to date with each change, because a worker reports its depths after every step.
        self._queued_prompt_tokens = 0
        self._queued_prompt_squares = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._all

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._all[sequence_id]

    def get(self, sequence_id: int) -> Sequence | None:
        return self._all.get(sequence_id)

    def at(self, stage: Stage) -> Collection[Sequence]:
        """Return the sequences in a stage, in the order in which they entered it."""
        return self._views[stage]

    # ------------------------------------------------------------------ stages

    def add(self, sequence: Sequence, stage: Stage) -> None:
        self._all[sequence.sequence_id] = sequence
        self.move(sequence, stage)

    def move(self, sequence: Sequence, stage: Stage) -> None:
        self._leave(sequence)
        if stage is Stage.QUEUED_PROMPT:
            self._queued_prompt_tokens += sequence.length
            self._queued_prompt_squares += sequence.length**2
        if stage in QUEUED:
            self._waiting += 1
        sequence.stage = stage
        self._at[stage][sequence.sequence_id] = sequence

    def sort(self, stage: Stage, key: Callable[[Sequence], tuple[float, ...]]) -> None:
        there = self._at[stage]
        ordered = sorted(there.items(), key=lambda item: key(item[1]))
        there.clear()
        there.update(ordered)

    def remove(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.stage = None
        del self._all[sequence.sequence_id]

    def _leave(self, sequence: Sequence) -> None:
        if sequence.stage is None:
            return
        del self._at[sequence.stage][sequence.sequence_id]
        if sequence.stage in QUEUED:
            self._waiting -= 1
        if sequence.stage is Stage.QUEUED_PROMPT:
            self._queued_prompt_tokens -= sequence.length
            self._queued_prompt_squares -= sequence.length**2

    # ------------------------------------------------------------------ order

    def head(self, stage: Stage) -> Sequence | None:
        # The youngest sequence is preempted first, so the oldest of this queue may have entered it last.
        queue = self._at[stage]
        if not queue:
            return None
        if stage is not Stage.QUEUED_PREEMPTED:
            first = next((sequence for sequence in queue.values() if not sequence.request.yields), None)
            return first or next(iter(queue.values()))
        return next(sequence for sequence_id, sequence in self._all.items() if sequence_id in queue)

    def running(self) -> list[Sequence]:
        """Return the sequences that compute prompts or tokens, oldest first. Sequences that yield come last."""
        running = self._at[Stage.PREFILL].keys() | self._at[Stage.DECODE].keys()
        oldest_first = [sequence for sequence_id, sequence in self._all.items() if sequence_id in running]
        return sorted(oldest_first, key=lambda sequence: sequence.request.yields)

    def computing(self) -> Iterator[Sequence]:
        """Iterate over the sequences that compute prompts or tokens, in no particular order."""
        return chain(self.at(Stage.PREFILL), self.at(Stage.DECODE))

    def holding(self) -> Iterator[Sequence]:
        """Iterate over the sequences that hold blocks."""
        return chain.from_iterable(map(self.at, HOLDING))

    # ------------------------------------------------------------------ depths

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def waiting_prefill_tokens(self) -> int:
        """The number of prompt tokens still to compute."""
        return self._queued_prompt_tokens + sum([each.pending for each in self._begun_prompts()])

    @property
    def waiting_prefill_squares(self) -> int:
        """The sum over waiting prompts of length squared less the square of the computed length."""
        return self._queued_prompt_squares + sum([each.length**2 - each.computed**2 for each in self._begun_prompts()])

    def waiting_images(self) -> list[PromptImage]:
        """Return the distinct images of prompts that have tokens still to compute."""
        prompts = (each for each in chain(self.at(Stage.QUEUED_PROMPT), self._begun_prompts()) if each.request.images)
        found = {image.span.digest: image for each in prompts for image in each.images_left}
        return list(found.values())

    def _begun_prompts(self) -> Iterator[Sequence]:
        """Iterate over waiting prompts that may be partly computed, whose tokens are therefore counted one by one."""
        return chain(self.at(Stage.PREFILL), self.at(Stage.QUEUED_PREEMPTED))

    def report(self, work: StepWork, start_ns: int, end_ns: int) -> StepReport:
        """Return the report of a step that computes `work`. `end_ns` is 0 for a step that has only started."""
        return StepReport(
            start_unix_ns=start_ns,
            end_unix_ns=end_ns,
            prefill_tokens=work.prefill_tokens,
            prefill_sequences=work.prefill_sequences,
            prefill_context_tokens=work.prefill_context_tokens,
            decode_sequences=work.decode_sequences,
            decode_kv_tokens=work.decode_kv_tokens,
            waiting=self.waiting,
            waiting_prefill_tokens=self.waiting_prefill_tokens,
            prefill_squared_tokens=work.prefill_squared_tokens,
        )


def grow(running: list[Sequence], pool: BlockPool) -> list[Sequence]:
    """Allocate blocks for the tokens of running sequences, oldest first. Return the sequences that were preempted.

    If leases and transfers hold all other blocks, the oldest sequence waits. A prompt that a receiver pulls while it is
    computed is not preempted, since the receiver's handle would keep the blocks in use.
    """
    victims, preempted = [sequence for sequence in running[1:] if sequence.streamed is None], []
    for sequence in running:
        while not (sequence.has_room or sequence in preempted):
            blocks = pool.allocate(sequence.blocks_now - len(sequence.blocks))
            if blocks is not None:
                sequence.grow(blocks)
            elif victims:
                victim = victims.pop()
                pool.release(victim.preempt())
                preempted.append(victim)
            else:
                return preempted
        if sequence in preempted:
            break
    return preempted
