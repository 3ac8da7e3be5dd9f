"""The sequences of one engine, by where each of them is: queues in the order of admission, and what runs. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain
from typing import Final

from libs.engine.reports import StepReport
from libs.engine.sequence import Sequence, Stage
from libs.policy.step_time import StepWork

QUEUED: Final = (Stage.QUEUED_PREEMPTED, Stage.QUEUED_TRANSFER, Stage.QUEUED_PROMPT)
"""In the order of admission."""
HOLDING: Final = (Stage.FETCHING, Stage.PREFILL, Stage.DECODE)
"""Stages in which sequences hold blocks."""


class Roster:
    """Every sequence is in one stage from `add` to `remove`."""

    def __init__(self) -> None:
        self._all: dict[int, Sequence] = {}
        """Sequences by id, in the order in which they came."""
        self._at: Mapping[Stage, dict[int, Sequence]] = {stage: {} for stage in Stage}
        self._views = {stage: there.values() for stage, there in self._at.items()}
        self._waiting = 0
        self._queued_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._all

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def __getitem__(self, sequence_id: int) -> Sequence:
        return self._all[sequence_id]

    def get(self, sequence_id: int) -> Sequence | None:
        """The sequence of that id, if there is one."""
        return self._all.get(sequence_id)

    def at(self, stage: Stage) -> Collection[Sequence]:
        """Those in a stage, in the order in which they came to it."""
        return self._views[stage]

    # ------------------------------------------------------------------ where they go

    def add(self, sequence: Sequence, stage: Stage) -> None:
        """A sequence has come."""
        self._all[sequence.sequence_id] = sequence
        self.move(sequence, stage)

    def move(self, sequence: Sequence, stage: Stage) -> None:
        """It is somewhere else from now on."""
        self._leave(sequence)
        if stage is Stage.QUEUED_PROMPT:
            self._queued_prompt_tokens += sequence.length
        if stage in QUEUED:
            self._waiting += 1
        sequence.stage = stage
        self._at[stage][sequence.sequence_id] = sequence

    def sort(self, stage: Stage, key: Callable[[Sequence], tuple[float, ...]]) -> None:
        """Put those in a stage into another order."""
        there = self._at[stage]
        ordered = sorted(there.items(), key=lambda item: key(item[1]))
        there.clear()
        there.update(ordered)

    def remove(self, sequence: Sequence) -> None:
        """It has ended."""
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

    # ------------------------------------------------------------------ whose turn it is

    def head(self, stage: Stage) -> Sequence | None:
        """Next in a queue; the youngest is preempted first, so the oldest may have come last."""
        queue = self._at[stage]
        if not queue:
            return None
        if stage is not Stage.QUEUED_PREEMPTED:
            first = next((sequence for sequence in queue.values() if not sequence.request.yields), None)
            return first or next(iter(queue.values()))
        return next(sequence for sequence_id, sequence in self._all.items() if sequence_id in queue)

    def running(self) -> list[Sequence]:
        """Those that compute prompt or tokens: the oldest first, and last those that yield."""
        running = self._at[Stage.PREFILL].keys() | self._at[Stage.DECODE].keys()
        oldest_first = [sequence for sequence_id, sequence in self._all.items() if sequence_id in running]
        return sorted(oldest_first, key=lambda sequence: sequence.request.yields)

    def computing(self) -> Iterator[Sequence]:
        """The same in no order."""
        return chain(self.at(Stage.PREFILL), self.at(Stage.DECODE))

    def holding(self) -> Iterator[Sequence]:
        """Those that hold blocks."""
        return chain.from_iterable(map(self.at, HOLDING))

    # ------------------------------------------------------------------ depths

    @property
    def waiting(self) -> int:
        """Sequences in the queues."""
        return self._waiting

    @property
    def waiting_prefill_tokens(self) -> int:
        """Prompt tokens still to compute."""
        partly = chain(self.at(Stage.PREFILL), self.at(Stage.QUEUED_PREEMPTED))
        return self._queued_prompt_tokens + sum([sequence.pending for sequence in partly])

    @property
    def waiting_prefill_squares(self) -> int:
        """The sum for them: each prompt's length squared less the square of what it has computed, summed."""
        waiting = map(self.at, (Stage.QUEUED_PROMPT, Stage.PREFILL, Stage.QUEUED_PREEMPTED))
        return sum([sequence.length**2 - sequence.computed**2 for sequence in chain.from_iterable(waiting)])

    def report(self, work: StepWork, start_ns: int, end_ns: int) -> StepReport:
        """A step that computes `work`, beside what waits now; `end_ns` 0: it has only begun."""
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
