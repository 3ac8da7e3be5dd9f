"""A worker's device, which runs the engine core's steps singly or many at once and accounts for its time."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, Protocol

from libs.engine.reports import EngineLoad, StepReport
from libs.engine.runner import Batch, Sampled
from libs.lab.cluster.core import DecodeSteps, LabCore
from libs.lab.cluster.host.shape import RunCounts, WorkerShape
from libs.lab.cluster.sequence import ANY_TOKEN, CountedSequence
from libs.lab.cluster.time import PS_PER_NS, Coast, StepDurations, VirtualTime
from libs.policy.step_time import StepTimeModel, StepWork, split_step_ns
from libs.policy.worker.assignment import Staying

# Each step has 0.8 of the weight of the next, so older steps would not change the mean by a single bit.
WEIGHED_STEPS: Final = 256


class Rest(Enum):
    """Categories of time in which a worker computes nothing."""

    IDLE = "idle"
    STARVED = "starved"
    """A prompt is being computed elsewhere; this time is part of idle."""
    KV_WAIT = "kv_wait"
    """Blocks that are ready at their source are in transit."""


@dataclass(slots=True)
class PhaseTotals:
    """Times by category. The first four add up to the total, and starved is a part of idle."""

    prefill_ps: int = 0
    decode_ps: int = 0
    kv_wait_ps: int = 0
    idle_ps: int = 0
    starved_ps: int = 0

    @property
    def total_ps(self) -> int:
        return self.prefill_ps + self.decode_ps + self.kv_wait_ps + self.idle_ps

    def step(self, model: StepTimeModel, work: StepWork, duration_ps: int) -> None:
        """Add the time of a step, split by phase."""
        prefill_ps, decode_ps = split_step_ns(model, work, duration_ps)
        self.prefill_ps += prefill_ps
        self.decode_ps += decode_ps

    def rested(self, what: Rest, duration_ps: int) -> None:
        """Add time in which no step ran."""
        if what is Rest.KV_WAIT:
            self.kv_wait_ps += duration_ps
            return
        self.idle_ps += duration_ps
        if what is Rest.STARVED:
            self.starved_ps += duration_ps


class RecentDecodes:
    """The latest decode steps, whose mean is the same for single steps and coasts."""

    def __init__(self) -> None:
        self._runs: deque[tuple[Coast, int]] = deque(maxlen=WEIGHED_STEPS)
        self._mean_s: float | None = 0.0

    def stepped(self, coast: Coast, steps: int) -> None:
        """Add `steps` further steps of a coast."""
        self._runs.append((coast, steps))
        self._mean_s = None

    def mean_s(self) -> float:
        """Return the running mean that a live worker would have; 0 before the first step."""
        if self._mean_s is None:
            staying = Staying()
            for duration_ns in self._durations_ns():
                staying = staying.stepped(duration_ns / 1e9)
            self._mean_s = staying.tpot_s
        return self._mean_s

    def _durations_ns(self) -> list[int]:
        """Return the durations of the latest steps, oldest first."""
        found: list[int] = []
        for coast, steps in reversed(self._runs):
            first = max(steps - (WEIGHED_STEPS - len(found)), 0)
            ends_ns = [coast.end_ps(step) // PS_PER_NS for step in range(first, steps + 1)]
            found += [ends_ns[place] - ends_ns[place - 1] for place in range(len(ends_ns) - 1, 0, -1)]
            if len(found) == WEIGHED_STEPS:
                break
        return found[::-1]


_SAMPLED: Final = Sampled(ANY_TOKEN)


class Listener(Protocol):
    """The callbacks of the device to its worker."""

    @property
    def submits_taken(self) -> int:
        """The number of submits that the worker has received so far."""
        ...

    def may_coast(self) -> bool:
        """Return whether many steps may pass at once now."""
        ...

    def stepped(self, report: StepReport) -> None:
        """Handle the end of a single step, after which the device is free."""
        ...

    def coasted(self, decoding: list[CountedSequence], coast: Coast, steps: int) -> None:
        """Handle `steps` steps that have passed at once; the last of them has ended by now."""
        ...

    def coast_ended(self) -> None:
        """Handle the end of the last of many steps, after which the device is free."""
        ...


@dataclass(slots=True)
class _Running:
    """The single step in progress on a device."""

    batch: Batch
    start_ps: int
    duration_ps: int


@dataclass(slots=True)
class _Coasting:
    """Steps in progress that pass at once."""

    decoding: list[CountedSequence]
    coast: Coast
    most: int


@dataclass(slots=True)
class _Passed:
    """Steps that have passed at once, and the state before the first of them."""

    coast: Coast
    steps: int
    end_ps: int
    running: int
    fetching: int
    free_blocks: int
    rooms: list[tuple[int, int]]
    """Pairs of tokens and blocks, one for each sequence."""
    submits: int

    def load_after(self, steps: int, block_tokens: int) -> EngineLoad:
        """Return the queue depths after `steps` of these steps."""
        grown = sum([max(-(-(length + steps) // block_tokens) - blocks, 0) for length, blocks in self.rooms])
        return EngineLoad(
            running=self.running,
            waiting=0,
            waiting_prefill_tokens=0,
            awaiting_kv=self.fetching,
            free_kv_blocks=self.free_blocks - grown,
        )


class Device:
    """The device of one worker. Its core is replaced when the worker restarts."""

    def __init__(self, shape: WorkerShape, time: VirtualTime, cost: StepDurations, core: LabCore) -> None:
        self.core = core
        self.spent = PhaseTotals()
        self.counts = RunCounts()
        self.recent = RecentDecodes()
        self.rest = Rest.IDLE
        """The category of time that passes while nothing is computed."""
        self.recent_steps: list[tuple[StepWork, int]] | None = None
        """Pairs of work and duration in ns since the last `take_recent_steps`, or None if they are not collected. Steps
        that passed at once count as one.
        """
        self._model = shape.step_time
        self._time = time
        self._cost = cost
        self._block_tokens, self._hop_ps = shape.block_tokens, shape.hop_ps
        self._passed: deque[_Passed] = deque()
        """Runs of steps that ended less than a hop ago, or that gateways have yet to request."""
        self._listener: Listener | None = None
        self._running: _Running | None = None
        self._coasting: _Coasting | None = None
        self._accounted_ps = time.now_ps

    def start(self, listener: Listener) -> None:
        """Set the listener, to which the device reports from now on."""
        self._listener = listener

    @property
    def free(self) -> bool:
        return self._running is None and self._coasting is None

    @property
    def coasting(self) -> bool:
        return self._coasting is not None

    @property
    def steps_singly(self) -> bool:
        return self._running is not None

    @property
    def longest_coasting_ps(self) -> int:
        """The duration of the longest of the steps that pass at once; 0 if there are none."""
        coasting = self._coasting
        return 0 if coasting is None else coasting.coast.first_ps + (coasting.most - 1) * coasting.coast.growth_ps

    @property
    def last_coasted_ps(self) -> int:
        """The end of the latest completed step of a coast; 0 if there is none."""
        coasting = self._coasting
        if coasting is None:
            return 0
        steps = min(coasting.coast.steps_by(self._time.now_ps), coasting.most)
        return coasting.coast.end_ps(steps) if steps else 0

    def passed_load(self, before_ps: int) -> tuple[EngineLoad, int] | None:
        """Return the load at a time within a completed coast, and the submits taken by then.

        The frame of a coast is sent only after its last step. For times outside a coast the result is None.
        """
        while self._passed and self._passed[0].end_ps <= before_ps:
            self._passed.popleft()
        if not self._passed:
            return None
        passed = self._passed[0]
        steps = passed.coast.steps_by(before_ps)
        return (passed.load_after(steps, self._block_tokens), passed.submits) if steps > 0 else None

    def coasted_load(self, before_ps: int) -> EngineLoad | None:
        """Return the load after the last step that ended by then; None unless steps pass at once.

        Single steps report it in frames. Only the free blocks change in steps that pass at once.
        """
        coasting = self._coasting
        if coasting is None:
            return None
        steps = min(coasting.coast.steps_by(before_ps), coasting.most)
        if steps <= 0:
            return None
        return EngineLoad(
            running=len(coasting.decoding),
            waiting=0,
            waiting_prefill_tokens=0,
            awaiting_kv=self.core.fetching,
            free_kv_blocks=self.core.free_blocks_after(coasting.decoding, steps),
        )

    def take_recent_steps(self) -> list[tuple[StepWork, int]]:
        """Return and clear the steps since the last call."""
        steps, self.recent_steps = self.recent_steps or [], []
        return steps

    # ------------------------------------------------------------ time

    def account(self, *, touched: bool = False) -> None:
        """Account for the time up to an event that happens now, cutting off steps that pass at once.

        `touched` states whether the event concerns sequences that may be decoding.
        """
        if self._coasting is not None:
            self._cut(self._coasting, touched=touched)
        elif self._running is None:
            self.account_rest()

    def account_rest(self) -> None:
        """Account for the time up to now as time without a step."""
        now_ps = self._time.now_ps
        self.spent.rested(self.rest, now_ps - self._accounted_ps)
        self._accounted_ps = now_ps

    def give_up(self) -> None:
        """Abandon the step in progress, whose time is lost."""
        self.account(touched=True)
        self._passed.clear()
        if self._running is not None:
            running, self._running = self._running, None
            self.spent.step(self._model, running.batch.work, self._time.now_ps - running.start_ps)
            self._accounted_ps = self._time.now_ps

    def close_books(self) -> None:
        """Account for all time up to now, including that of a step in progress."""
        self.account()
        now_ps = self._time.now_ps
        if self._running is not None:
            running, self._running = self._running, None
            self.spent.step(self._model, running.batch.work, now_ps - running.start_ps)
        elif self._coasting is not None:
            self._coasting = None
            self.spent.decode_ps += now_ps - self._accounted_ps
        self._accounted_ps = now_ps

    # ------------------------------------------------------------ steps

    def step(self, *, may_coast: bool = True) -> None:
        """Begin the next step, or many at once, at the time up to which the device has been accounted for."""
        assert self._listener is not None
        start_ns = self._accounted_ps // PS_PER_NS
        if may_coast and self._listener.may_coast():
            batch = self.core.plan_or_coast(start_ns)
            if isinstance(batch, DecodeSteps):
                self._begin_coast(batch)
                return
        else:
            batch = self.core.plan(start_ns)
        self._begin_step(batch)

    def _begin_step(self, batch: Batch | None) -> None:
        if batch is None:
            return
        work, start_ps = batch.work, self._accounted_ps
        self.core.begin(batch, start_ps // PS_PER_NS)
        duration_ps = self._cost.step_ps(work)
        self._running = _Running(batch, start_ps, duration_ps)
        self._time.at_ps(start_ps + duration_ps, partial(self._end_step, self._running))

    def _end_step(self, running: _Running) -> None:
        if self._running is not running:
            return  # the worker was restarted in the meantime
        assert self._listener is not None
        self._running = None
        self._accounted_ps = self._time.now_ps
        work = running.batch.work
        self.spent.step(self._model, work, running.duration_ps)
        if self.recent_steps is not None:
            self.recent_steps.append((work, running.duration_ps // PS_PER_NS))
        if work.decode_sequences:
            self.recent.stepped(Coast(running.start_ps, running.duration_ps, 0), 1)
        self.counts.steps += 1
        self.counts.decode_tokens += work.decode_sequences
        self.counts.prompt_tokens += work.prefill_tokens
        sampled = {chunk.sequence_id: _SAMPLED for chunk in running.batch.chunks if chunk.sample}
        self._listener.stepped(self.core.apply(running.batch, sampled, self._time.now_ns()))

    def _begin_coast(self, decoding: DecodeSteps) -> None:
        sequences = decoding.sequences
        kv_tokens = sum(sequence.length for sequence in sequences)
        self.core.stepping(True, self._accounted_ps // PS_PER_NS)
        self._coast(
            _Coasting(sequences, self._cost.coast(self._accounted_ps, len(sequences), kv_tokens), decoding.steps)
        )

    def _coast(self, coasting: _Coasting) -> None:
        self._coasting = coasting
        self._time.at_ps(coasting.coast.end_ps(coasting.most), partial(self._end_coast, coasting))

    def _end_coast(self, coasting: _Coasting) -> None:
        if self._coasting is coasting:
            assert self._listener is not None
            self._pass(coasting, coasting.most)
            self._listener.coast_ended()

    def _cut(self, coasting: _Coasting, *, touched: bool) -> None:
        """Apply the steps that have ended by now; the current one continues.

        If its own sequences are `touched`, it continues as a single step, which handles such changes.
        """
        coast = coasting.coast
        steps = coast.steps_by(self._time.now_ps)
        if steps >= coasting.most:
            self._pass(coasting, coasting.most)
            self.step(may_coast=False)
        elif touched:
            self._pass(coasting, steps)
            start_ns = self._accounted_ps // PS_PER_NS
            self._begin_step(self.core.plan_decoding(coasting.decoding, start_ns))
        elif steps:
            self._pass(coasting, steps)
            self.core.stepping(True, self._accounted_ps // PS_PER_NS)
            first_ps = coast.first_ps + steps * coast.growth_ps
            rest = Coast(self._accounted_ps, first_ps, coast.growth_ps)
            self._coast(_Coasting(coasting.decoding, rest, 1))
        elif coasting.most > 1:
            self._coast(_Coasting(coasting.decoding, coast, 1))

    def _pass(self, coasting: _Coasting, steps: int) -> None:
        self._coasting = None
        end_ps = coasting.coast.end_ps(steps)
        self.core.stepping(False, end_ps // PS_PER_NS)
        self._accounted_ps = end_ps
        if not steps:
            return
        assert self._listener is not None
        decoding = coasting.decoding
        self._keep(coasting, steps, end_ps)
        if self.recent_steps is not None:  # one entry represents all of them
            kv_tokens = sum(sequence.length for sequence in decoding)
            step_ns = (end_ps - coasting.coast.start_ps) // steps // PS_PER_NS
            self.recent_steps.append((StepWork(decode_sequences=len(decoding), decode_kv_tokens=kv_tokens), step_ns))
        self.core.coast(decoding, steps)
        self.spent.decode_ps += end_ps - coasting.coast.start_ps
        self.counts.steps += steps
        self.counts.decode_tokens += steps * len(decoding)
        self.recent.stepped(coasting.coast, steps)
        self._listener.coasted(decoding, coasting.coast, steps)

    def _keep(self, coasting: _Coasting, steps: int, end_ps: int) -> None:
        """Keep the steps for gateways, which learn of each one a hop later."""
        assert self._listener is not None
        passed = self._passed
        while passed and passed[0].end_ps + self._hop_ps <= self._time.now_ps:
            passed.popleft()
        rooms = [(sequence.length, len(sequence.blocks)) for sequence in coasting.decoding]
        core, submits = self.core, self._listener.submits_taken
        passed.append(
            _Passed(coasting.coast, steps, end_ps, len(rooms), core.fetching, core.free_blocks, rooms, submits)
        )
