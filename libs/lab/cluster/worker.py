"""A worker in virtual time: the engine core, with credits, roles and moves as in `libs/worker`.

It models step times, queues, blocks, prefix reuse, preemption, KV transfers, network hops, role moves that drain,
and the death of workers. It does not model variance between equal steps, the host's own CPU time, or network
failures.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from libs.contracts.protocol import RESTING_SIGN_OF_LIFE_MS, SIGN_OF_LIFE_MS
from libs.engine.config import EngineConfig
from libs.engine.port import Capabilities, EngineIdentity
from libs.engine.reports import EngineLoad, StepReport
from libs.lab.cluster.core import LabCore
from libs.lab.cluster.host.device import Device, RecentDecodes, Rest
from libs.lab.cluster.host.duties import GATEWAY, Duties, LabOutbox
from libs.lab.cluster.host.fetching import Fetching
from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.sequence import ANY_TOKEN, Coasted, CountedSequence, ToGateway, ToWorker
from libs.lab.cluster.time import PS_PER_NS, START_PS, Coast, StepDurations, VirtualTime
from libs.policy.roles import Assignment, Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepWork
from libs.policy.worker.credits import Credits
from libs.policy.worker.handing_over import TransferSpeed

_MS: Final = 1_000_000 * PS_PER_NS
BEAT_PS: Final = SIGN_OF_LIFE_MS * _MS
REST_PS: Final = RESTING_SIGN_OF_LIFE_MS * _MS
"""The interval between frames of an idle worker. They change nothing, so they are not sent here."""
# The default of live workers, which send a changed load with their telemetry.
TELEMETRY_PS: Final = 100 * _MS


class Beat:
    """The heartbeats of one worker. While it decodes, every step reports the load, so none are needed."""

    def __init__(self, time: VirtualTime, device: Device, send_load: Callable[[], None]) -> None:
        """Create the heartbeats. `send_load` sends a frame and calls `reported`."""
        self._send_load = send_load
        self._time = time
        self._device = device
        self._reported_ps = time.now_ps
        self._reported: EngineLoad | None = None
        self._beats = False
        """True if the next heartbeat is scheduled."""
        self._ticks = False
        """True if a comparison with the last reported load is scheduled."""

    def reported(self, load: EngineLoad, at_ps: int) -> None:
        """Record a load that a frame carried or would have carried."""
        self._reported, self._reported_ps = load, at_ps

    def watch(self, *, reported: bool) -> None:
        """Schedule heartbeats after an event at the worker; `reported` is true if a frame carries the event."""
        if not (reported or self._ticks):
            self._ticks = True
            passed_ps = self._time.now_ps - START_PS
            self._time.at_ps(START_PS + (passed_ps // TELEMETRY_PS + 1) * TELEMETRY_PS, self._tick)
        if not self._beats and self._has_work and not self._steps_report:
            self._beats = True
            self._reported_ps += (self._time.now_ps - self._reported_ps) // REST_PS * REST_PS
            self._time.at_ps(self._reported_ps + BEAT_PS, self._beat)

    @property
    def _has_work(self) -> bool:
        """Return whether sequences, or blocks that wait to be pulled, are present."""
        return self._device.core.holds_blocks

    @property
    def _steps_report(self) -> bool:
        """Return whether steps pass at once and none of them takes longer than the permitted silence."""
        return 0 < self._device.longest_coasting_ps < BEAT_PS

    def _beat(self) -> None:
        self._beats = False
        if not self._has_work or self._steps_report:
            return
        due_ps = max(self._reported_ps, self._device.last_coasted_ps) + BEAT_PS
        if due_ps <= self._time.now_ps:
            self._send_load()
            due_ps = self._time.now_ps + BEAT_PS
        self._beats = True
        self._time.at_ps(due_ps, self._beat)

    def _tick(self) -> None:
        self._ticks = False
        if self._device.last_coasted_ps > self._reported_ps:
            return  # that step has already reported the load
        if self._reported is None or _depths(self._device.core.load()) != _depths(self._reported):
            self._send_load()


def _depths(load: EngineLoad) -> tuple[int, ...]:
    """Return the queue depths that gateways use."""
    return (
        load.running,
        load.waiting,
        load.waiting_prefill_tokens,
        load.waiting_prefill_squares,
        load.awaiting_kv,
        load.free_kv_blocks,
    )


class WorkerListener(Protocol):
    """The callbacks of a worker to its gateway."""

    @property
    def heeds_tokens(self) -> bool:
        """Return whether any token may trigger a decision now, in which case steps pass one by one."""
        ...

    def deliver(self, worker: "LabWorker", frame: ToGateway) -> None:
        """Handle a frame, which arrives one hop after it was sent."""
        ...

    def coasted(self, worker: "LabWorker", coasted: Coasted) -> None:
        """Handle the tokens of many steps, the last of which arrive now."""
        ...

    def lost(self, worker: "LabWorker") -> None:
        """Handle the death of a worker one hop ago, with the loss of everything it held."""
        ...

    def returned(self, worker: "LabWorker") -> None:
        """Handle the restart of a worker as a new incarnation without any state."""
        ...


class LabWorker:
    """One worker of the cluster. Other parts call its public methods at the moment of the event."""

    def __init__(
        self, index: int, shape: WorkerShape, assignment: Assignment, time: VirtualTime, cost: StepDurations
    ) -> None:
        self.index = index
        self.id = f"w{index}"
        self.shape = shape
        self.speed = Speed(shape.step_time, shape.chunk_tokens, measured=True)
        self.incarnation = 1
        self._down = False
        self._time = time
        self._gateway: WorkerListener | None = None
        self._config = EngineConfig(None, shape.model, max_waiting=1 << 30, prefill_chunk_tokens=shape.chunk_tokens)
        self.capabilities = Capabilities(
            block_size_tokens=shape.block_tokens,
            kv_blocks=shape.kv_blocks,
            kv_block_bytes=shape.kv_block_bytes,
            max_context_tokens=1 << 30,
            max_sequences=shape.max_sequences,
            kv_layout=shape.kv_kind,
            hands_over_running_kv=True,
            streams_kv=True,
            named_kv=True,
            chunk_tokens=shape.chunk_tokens,
        )
        self._handles = 0
        self._submits = 0
        self._expiry_due_ns = 0
        self._outbox = LabOutbox(self.id, shape)
        self._device = Device(shape, time, cost, self._new_core())
        self.spent, self.counts = self._device.spent, self._device.counts
        self._duties = Duties(shape, assignment, self._device, self._outbox)
        self._fetching = Fetching(shape, time, self._device)
        self._beat = Beat(time, self._device, self._send_load)

    def start(self, gateway: WorkerListener, peers: dict[str, "LabWorker"]) -> None:
        """Connect the worker to the gateway and the other workers."""
        self._gateway = gateway
        self._device.start(self)
        self._fetching.start(self, {worker_id: peer._fetching for worker_id, peer in peers.items()})
        self._duties.attach()
        self._duties.apply()
        self.leave()

    def _new_core(self) -> LabCore:
        identity = EngineIdentity(self.id, self.incarnation, self.id)
        core = LabCore(self._config, self.capabilities, identity, handles=self._next_handle)
        if self.shape.guard:
            core.set_step_time(self.shape.step_time)
        if self.shape.prompt_order is not None:
            core.order_prompts(self.shape.prompt_order, Speed(self.shape.step_time, self.shape.chunk_tokens))
        return core

    def _next_handle(self, count: int) -> bytes:
        self._handles += 1
        return self._handles.to_bytes(count, "big")

    # ------------------------------------------------------------ state

    @property
    def core(self) -> LabCore:
        """The current engine core, which is replaced on a restart."""
        return self._device.core

    @property
    def assignment(self) -> Assignment:
        return self._duties.assignment

    @property
    def credits(self) -> Credits:
        return self._duties.credits

    @property
    def down(self) -> bool:
        return self._down

    @property
    def submits_taken(self) -> int:
        """The number of submits received from the gateway."""
        return self._submits

    @property
    def ready(self) -> bool:
        return not self._duties.draining

    @property
    def busy(self) -> bool:
        """Return whether a step runs or sequences are here."""
        return self._device.steps_singly or bool(self._duties.hosted)

    @property
    def prompts_here(self) -> int:
        """The number of prompts queued or being computed."""
        return sum(hosted.awaits_prompt for hosted in self._duties.hosted.values())

    def keep_recent_steps(self) -> None:
        self._device.recent_steps = []

    def take_recent_steps(self) -> list[tuple[StepWork, int]]:
        """Return (work, duration_ns) of each step since the last call. Steps that passed at once count as one."""
        return self._device.take_recent_steps()

    def load(self) -> EngineLoad:
        return self.core.load()

    def coasted_load(self, before_ps: int) -> EngineLoad | None:
        """Return the load within a coast, as `Device.coasted_load` does."""
        return self._device.coasted_load(before_ps)

    def reported_load(self, before_ps: int) -> tuple[EngineLoad, int] | None:
        """Return (load, submits taken) after steps that passed at once; None if frames carried them."""
        if (passed := self._device.passed_load(before_ps)) is not None:
            return passed
        load = self._device.coasted_load(before_ps)
        return (load, self._submits) if load is not None else None

    # ------------------------------------------------------------ input from the gateway

    def receive(self, frame: ToWorker) -> None:
        if self._down:
            return
        hosted, core = self._duties.hosted, self.core
        self.enter(touched=bool(frame.hand_overs) or not hosted.keys().isdisjoint(frame.aborts))
        self._duties.received(frame)
        now_ns = self._time.now_ns()
        for request in frame.submits:
            self._submits += 1
            self._duties.submit(request, now_ns)
        for sequence_id, tokens in frame.proceeds:
            if sequence_id in hosted:
                core.proceed(sequence_id, (ANY_TOKEN,) * tokens, now_ns)
        for sequence_id in frame.hand_overs:
            if sequence_id in hosted:
                core.hand_over(sequence_id, now_ns)
        for sequence_id in frame.aborts:
            self._abort(sequence_id, now_ns)
        self.leave()

    def _abort(self, sequence_id: int, now_ns: int) -> None:
        if sequence_id in self._duties.hosted:
            self._fetching.abort(sequence_id)
            self.core.abort(sequence_id, now_ns)
        elif (opaque := self._duties.left.pop(sequence_id, None)) is not None:
            self.core.release(opaque, now_ns)

    def step_singly(self) -> None:
        """Switch to single steps, because the gateway now reacts to tokens."""
        if self._device.coasting:
            self.enter()

    # ------------------------------------------------------------ roles and life

    def set_role(self, role: Role, budget_tokens: int = 0) -> bool:
        """Change the role and return whether the change was accepted. Running sequences move elsewhere or end here."""
        if (taken := self._duties.taken(role, budget_tokens)) is None:
            return False
        self.enter()
        self.counts.moves += taken.role != self.assignment.role  # a change of the budget alone is not a move
        self._duties.take(taken)
        self.leave()
        return True

    def restart(self, role: Role, budget_tokens: int, start_ns: int) -> None:
        """Drop everything, and return with another role and an empty cache after `start_ns`."""
        readers = self._fetching.readers()
        self._give_up()
        self.counts.moves += 1
        for reader, stream in readers:
            reader.lost(stream)
        self._duties.begin_as(role, budget_tokens)
        self.leave()
        self._time.in_ps(start_ns * PS_PER_NS, self._started)

    def _started(self) -> None:
        if self._down:
            return
        self.enter()
        self._duties.draining = False
        self._duties.apply()
        self.leave()

    def die(self, back_after_ns: int) -> None:
        """Lose everything, including all learned values, and restart in the same role after `back_after_ns`.

        The time until then counts as idle. A worker that is already dead keeps its original restart time.
        """
        if self._down:
            return
        assert self._gateway is not None
        readers, hop_ps = self._fetching.awaiting(), self.shape.hop_ps
        self.incarnation += 1
        self._give_up()
        self._down = self._duties.draining = True
        self._forget_all()
        self._device.rest = Rest.IDLE
        for reader, stream in readers:  # some readers may have received everything by then
            self._time.in_ps(hop_ps, partial(reader.lost, stream))
        self._time.in_ps(hop_ps, partial(self._gateway.lost, self))
        self._time.in_ps(max(back_after_ns * PS_PER_NS, hop_ps), self._come_back)

    def _come_back(self) -> None:
        assert self._gateway is not None
        self.enter()
        self._down = self._duties.draining = False
        self._duties.attach()
        self._duties.apply()
        self.leave()
        self._gateway.returned(self)

    def _give_up(self) -> None:
        """Drop all sequences and the cache. The time of a step in progress is lost."""
        self._device.give_up()
        self._fetching.give_up()
        self._duties.give_up()
        self._device.core = self._new_core()

    def _forget_all(self) -> None:
        """Reset the state of the process outside its engine."""
        self.speed = Speed(self.shape.step_time, self.shape.chunk_tokens, measured=True)
        self._submits = 0
        self._expiry_due_ns = 0
        self._outbox.restart()
        self._duties.forget()
        self._fetching.forget()
        self._device.recent = RecentDecodes()

    def close_books(self) -> None:
        """Account for all time up to now, including that of a step in progress."""
        self._device.close_books()

    # ------------------------------------------------------------ events

    def enter(self, *, touched: bool = False) -> None:
        """Begin an event: account for the time up to now, and cut off steps that pass at once.

        `touched` states whether the event concerns sequences that may be decoding.
        """
        self._device.account(touched=touched)

    def leave(self) -> None:
        """End an event and act on the core's decisions."""
        device = self._device
        while True:
            if device.free:
                device.step()
            self._fetching.begun()
            if not self._fetching.ask():
                break
        self._pass_on(None)
        reported = self._flush()
        if self.shape.credits:
            self._beat.watch(reported=reported)
        if device.free:
            device.rest = self._fetching.rest
            self._watch_leases()

    def may_coast(self) -> bool:
        """Return whether many steps may pass at once. If the end of the next step reports a new speed, that step passes
        singly.
        """
        assert self._gateway is not None
        return not (self.shape.stepwise or self._outbox.speed or self._gateway.heeds_tokens)

    def stepped(self, report: StepReport) -> None:
        """Handle the end of a single step."""
        self._pass_on(report)
        self._fetching.notify_readers()
        self.leave()

    def coast_ended(self) -> None:
        """Handle the end of the last of many steps that pass at once."""
        self.leave()

    def coasted(self, decoding: list[CountedSequence], coast: Coast, steps: int) -> None:
        """Report many steps that have passed at once. The gateway receives them a hop after the last one."""
        gateway, box, hosted = self._gateway, self._outbox, self._duties.hosted
        assert gateway is not None
        ids = [sequence.request.sequence_id for sequence in decoding]
        for sequence_id in ids:
            hosted[sequence_id].new_tokens += steps
        load = self.core.decoding_load() or self.core.load()
        coasted = Coasted(ids, coast, steps, load, self._submits, self.speed if box.speed else None)
        box.speed = False
        end_ps = coast.end_ps(steps)
        self._beat.reported(load, end_ps)
        self._time.at_ps(end_ps + self.shape.hop_ps, lambda: gateway.coasted(self, coasted))

    def received_at(self, transfers: TransferSpeed) -> None:
        """Record the transfer speed after the blocks of a sequence have arrived."""
        if transfers.differs(self.speed.kv_token_ns):
            self.speed = replace(self.speed, kv_token_ns=transfers.token_ns)
            self._outbox.speed = True

    def was_read(self, opaque: bytes) -> None:
        """Handle a handle whose blocks have all been read, and which is released."""
        self._duties.taken_over(opaque, self._time.now_ns())

    def _send_load(self) -> None:
        if not self._down:
            self._outbox.load = True
            self._flush()

    def _watch_leases(self) -> None:
        # The end of a lease may free blocks while nothing else happens here.
        expiry_ns = self.core.offers.next_expiry_ns
        if expiry_ns is None or expiry_ns == self._expiry_due_ns or not self.core.load().waiting:
            return
        self._expiry_due_ns = expiry_ns
        self._time.at(expiry_ns, self._expired)

    def _expired(self) -> None:
        if self._down:
            return
        self._expiry_due_ns = 0
        self.enter()
        self.leave()

    def _pass_on(self, step: StepReport | None) -> None:
        if (event := self._device.core.take_event(step)) is not None:
            self._duties.record_outputs(event.outputs, self._time.now_ns())

    def _flush(self) -> bool:
        """Send pending changes to the gateway, to arrive a hop from now; return whether there were any."""
        box, duties, gateway = self._outbox, self._duties, self._gateway
        has_credit = duties.has_credit()
        if not (has_credit or box.due):
            return False
        assert gateway is not None
        load = self.core.load()
        self._beat.reported(load, self._time.now_ps)
        credit = duties.credits.take(GATEWAY) if has_credit else None
        assignment = duties.assignment if box.assignment else None
        speed = self.speed if box.speed else None
        frame = ToGateway(load, self._submits, box.tokens, box.events, credit, assignment, speed)
        box.sent()
        self._time.in_ps(self.shape.hop_ps, lambda: gateway.deliver(self, frame))
        return True
