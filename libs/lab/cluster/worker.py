"""A worker in virtual time: the engine core, with credits, roles and moves as `libs/worker` has them.

Modelled: step times, queues, blocks, prefix reuse, preemption, KV transfers, network hops, role moves that drain, death
of workers.
Not modelled: variance between equal steps, the host's own CPU time, failures of the network.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from libs.contracts.errors import InvalidRequest, KvLost, QueueFull
from libs.dispatch.generation import FinishReason as Ended
from libs.dispatch.worker_news import Failed, Finished, Happened, Leaving, Moved, Opened, Prefilled, Refused
from libs.engine.config import EngineConfig
from libs.engine.handles import Received
from libs.engine.kv_port import KvHandle
from libs.engine.port import Capabilities, EngineIdentity, EngineLoad, FinishReason, Phase, SequenceOutput, StepReport
from libs.engine.runner import Batch, Sampled
from libs.lab.cluster.core import Decoding, LabCore
from libs.lab.cluster.cost import Coast, StepCost
from libs.lab.cluster.frames import PHASES, Coasted, ToGateway, ToWorker
from libs.lab.cluster.hosted import Hosted
from libs.lab.cluster.kv_stream import MAX_FETCHES, ReceivingLink, Stream
from libs.lab.cluster.recent import RecentDecodes
from libs.lab.cluster.sequence import ANY_TOKEN, CountedRequest, CountedSequence
from libs.lab.cluster.spent import Rest, Spent
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.policy.gateway.effects import Blocks
from libs.policy.roles import Assignment, Refusal, Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel, StepWork
from libs.policy.worker import assignment as assignments
from libs.policy.worker.budget import engine_budget, role_budget
from libs.policy.worker.credits import CreditPool, Credits, Waiting
from libs.policy.worker.moving import MoveTime, Staying, sooner_moved
from libs.policy.worker.saturation import trial_work
from libs.policy.worker.slots import PromptLength, SlotFacts, slots
from libs.policy.worker.transfers import TransferSpeed

GATEWAY: Final = 1
"""The one gateway's number in a worker's credits."""
_SAMPLED: Final = Sampled(ANY_TOKEN)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What all workers of a cluster are like."""

    model: str
    step_time: StepTimeModel
    """What steps take."""
    block_tokens: int
    kv_blocks: int
    kv_block_bytes: int
    max_sequences: int
    chunk_tokens: int
    """Prompt tokens of a step at most."""
    link_bytes_per_s: float
    hop_ns: int
    """From a worker to the gateway, or another worker, and back: each way."""
    guard: bool = True
    """Whether prompts and newcomers are held to the TPOT of what decodes."""
    credits: bool = True
    """Whether work is taken only against credits; off where it queues in workers."""
    stepwise: bool = False
    """Every decision at every step: slow, and equal in all else."""

    @property
    def kv_kind(self) -> str:
        """Equal for all."""
        return f"lab/{self.model}/block{self.block_tokens}"


class Gateway(Protocol):
    """Who hears of a worker."""

    @property
    def heeds_tokens(self) -> bool:
        """Whether it may decide something at any token now: steps then pass one by one."""
        ...

    def tell(self, worker: "LabWorker", frame: ToGateway) -> None:
        """A frame has come, a hop after it was sent."""
        ...

    def coasted(self, worker: "LabWorker", coasted: Coasted) -> None:
        """So many tokens have come, the last of them now."""
        ...

    def lost(self, worker: "LabWorker") -> None:
        """It is dead, a hop ago, with all that it had."""
        ...

    def returned(self, worker: "LabWorker") -> None:
        """It was started again, as another incarnation that knows nothing."""
        ...


@dataclass(slots=True)
class Counts:
    """Of one worker, over the whole run."""

    prompt_tokens: int = 0
    """Computed, again ones included."""
    decode_tokens: int = 0
    steps: int = 0
    moves: int = 0
    """Of role."""


@dataclass(slots=True)
class _Running:
    """A step that runs."""

    batch: Batch
    start_ps: int
    duration_ps: int


@dataclass(slots=True)
class _Coasting:
    """Steps that pass at once."""

    decoding: list[CountedSequence]
    coast: Coast
    most: int


@dataclass(slots=True)
class Outbox:
    """What the gateway has yet to be told."""

    tokens: list[int] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)
    load: bool = False
    assignment: bool = True
    speed: bool = True


class LabWorker:
    """One engine of the cluster. Whoever touches it from outside calls a public method, at the moment it happens."""

    def __init__(
        self, index: int, shape: WorkerShape, assignment: Assignment, time: VirtualTime, cost: StepCost
    ) -> None:
        self.index = index
        self.id = f"w{index}"
        self.shape = shape
        self.assignment = assignment
        self.spent = Spent()
        self.counts = Counts()
        self.speed = Speed(shape.step_time, shape.chunk_tokens, measured=True)
        self._transfers = TransferSpeed(shape.block_tokens)
        self.credits = Credits()
        self.draining = False
        self.incarnation = 1
        self.down = False
        """Whether it is dead."""
        self._time = time
        self._cost = cost
        self._gateway: Gateway | None = None
        self._peers: dict[str, LabWorker] = {}
        config = EngineConfig(None, shape.model, max_waiting=1 << 30, prefill_chunk_tokens=shape.chunk_tokens)
        self.capabilities = Capabilities(
            block_size_tokens=shape.block_tokens,
            kv_blocks=shape.kv_blocks,
            kv_block_bytes=shape.kv_block_bytes,
            max_context_tokens=1 << 30,
            max_sequences=shape.max_sequences,
            kv_layout=shape.kv_kind,
            moves_running_kv=True,
            streams_kv=True,
            chunk_tokens=shape.chunk_tokens,
        )
        self._handles = 0
        self._config = config
        self.core = self._new_core()
        self.recent_steps: list[tuple[StepWork, int]] | None = None
        """(work, duration_ns) of steps since somebody took them; None: nobody does. Steps at once are one of them."""
        self._hosted: dict[int, Hosted] = {}
        self._left: dict[int, bytes] = {}
        """Handles that a gateway's sequences left, by sequence id."""
        self._link = ReceivingLink(time, _block_ps(shape), self._part_came)
        self._streams: dict[int, Stream] = {}
        self._unasked: list[CountedSequence] = []
        """Beyond `MAX_FETCHES`."""
        self._readers: dict[bytes, tuple[LabWorker, Stream]] = {}
        """Of handles here, who reads them as they fill."""
        self._submits = 0
        self._outbox = Outbox()
        self._prompts = PromptLength()
        self._waiting = Waiting("gateway")
        self._staying = Staying()
        """Without the time of a step, which `_recent` has."""
        self._recent = RecentDecodes()
        self._move_time = MoveTime()
        self._sealed: dict[bytes, tuple[int, int]] = {}
        self._budget = self._role_budget = 0
        self._running: _Running | None = None
        self._coasting: _Coasting | None = None
        self._rest = Rest.IDLE
        self._unsettled = True
        """Whether credits have changed hands, or could."""
        self._accounted_ps = time.now_ps
        self._expiry_due_ns = 0

    def start(self, gateway: Gateway, peers: dict[str, "LabWorker"]) -> None:
        """Join the cluster."""
        self._gateway, self._peers = gateway, peers
        self.credits.attach(GATEWAY)
        self._apply_assignment()
        self._leave()

    def _new_core(self) -> LabCore:
        core = LabCore(
            self._config,
            self.capabilities,
            frozenset(),
            EngineIdentity(self.id, self.incarnation, self.id),
            random_bytes=self._next_handle,
            new_sequence=CountedSequence,
        )
        if self.shape.guard:
            core.set_step_time(self.shape.step_time)
        return core

    def _next_handle(self, count: int) -> bytes:
        self._handles += 1
        return self._handles.to_bytes(count, "big")

    # ------------------------------------------------------------ what is known of it

    @property
    def submits_taken(self) -> int:
        """Of the gateway's."""
        return self._submits

    @property
    def ready(self) -> bool:
        """Whether it takes new work."""
        return not self.draining

    @property
    def prompts_here(self) -> int:
        """Prompts queued or being computed."""
        return sum(hosted.awaits_prompt for hosted in self._hosted.values())

    def take_recent_steps(self) -> list[tuple[StepWork, int]]:
        """Those since the last call."""
        steps, self.recent_steps = self.recent_steps or [], []
        return steps

    def load(self) -> EngineLoad:
        """Depths now."""
        return self.core.load()

    def coasted_load(self, before_ps: int) -> EngineLoad | None:
        """Depths as of the last step that ended by then, where steps pass at once; None elsewhere, as then frames tell.

        Only the free blocks change in such steps.
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

    # ------------------------------------------------------------ what the gateway sends

    def receive(self, frame: ToWorker) -> None:
        """A frame has come."""
        if self.down:
            return
        self._enter(touched=bool(frame.hand_overs) or not self._hosted.keys().isdisjoint(frame.aborts))
        if frame.demand is not None:
            waiting, _, deadline_ns = frame.demand
            self._waiting = Waiting(self._waiting.name, waiting, deadline_ns)
        pools, self._unsettled = self.credits, True
        pools.prefill.returned(GATEWAY, frame.returned_prefill)
        pools.decode.returned(GATEWAY, frame.returned_decode)
        pools.prefill.spent(GATEWAY, frame.spent_prefill)
        pools.decode.spent(GATEWAY, frame.spent_decode)
        now_ns = self._time.now_ns()
        for request in frame.submits:
            self._submits += 1
            self._submit(request, now_ns)
        for sequence_id, tokens in frame.proceeds:
            if sequence_id in self._hosted:
                self.core.proceed(sequence_id, (ANY_TOKEN,) * tokens, now_ns)
        for sequence_id in frame.hand_overs:
            if sequence_id in self._hosted:
                self.core.hand_over(sequence_id, now_ns)
        for sequence_id in frame.aborts:
            self._abort(sequence_id, now_ns)
        self._leave()

    def _submit(self, request: CountedRequest, now_ns: int) -> None:
        pool = self._pool(request.phase)
        has_credit = pool.use(GATEWAY) if self.shape.credits else True
        refused = self._refusal(request, has_credit=has_credit)
        if refused is None:
            try:
                self.core.submit(request, now_ns)
            except (InvalidRequest, QueueFull) as error:
                refused = Refused(request.sequence_id, Refusal.INVALID, error.message)
        if refused is not None:
            if has_credit and self.shape.credits:
                pool.free()
            self._outbox.happened.append(refused)
            return
        self._hosted[request.sequence_id] = Hosted(request, self._role_budget)
        if request.phase is Phase.PREFILL:
            self._prompts.came(request.prompt_tokens)
            self._resize()

    def _refusal(self, request: CountedRequest, *, has_credit: bool) -> Refused | None:
        code = assignments.refusal(self.assignment, PHASES[request.phase], draining=self.draining)
        if code is None and not has_credit:
            code = Refusal.NO_CAPACITY
        return None if code is None else Refused(request.sequence_id, code, code.name.lower())

    def _abort(self, sequence_id: int, now_ns: int) -> None:
        if sequence_id in self._hosted:
            stream = self._streams.pop(sequence_id, None)
            if stream is not None:
                self._link.drop(stream)
                self._source(stream).left(stream)
            self.core.abort(sequence_id, now_ns)
        elif (opaque := self._left.pop(sequence_id, None)) is not None:
            self.core.release(opaque, now_ns)

    def _pool(self, phase: Phase) -> CreditPool:
        return self.credits.prefill if phase is Phase.PREFILL else self.credits.decode

    # ------------------------------------------------------------ roles

    def set_role(self, role: Role, budget_tokens: int = 0) -> bool:
        """Take another role; whether it was taken. What runs moves elsewhere or ends here."""
        wanted = assignments.Wanted(role, budget_tokens, self.assignment.epoch)
        taken = assignments.next_assignment(self.assignment, wanted, draining=self.draining)
        if isinstance(taken, assignments.NotTaken):
            return False
        self._enter()
        self.counts.moves += 1
        self.assignment = taken
        self._apply_assignment()
        self._leave()
        return True

    def restart(self, role: Role, budget_tokens: int, start_ns: int) -> None:
        """Give up all that is here, and come back with another role and an empty cache after so long."""
        readers = list(self._readers.values())
        self._give_up()
        self.counts.moves += 1
        for reader, stream in readers:
            reader.lost(stream)
        self.draining = True
        self.assignment = Assignment(self.shape.model, role, budget_tokens, self.assignment.epoch + 1)
        self._apply_assignment()
        self._leave()
        self._time.at_ps(self._time.now_ps + start_ns * PS_PER_NS, self._started)

    def _started(self) -> None:
        if self.down:
            return
        self._enter()
        self.draining = False
        self._apply_assignment()
        self._leave()

    def die(self, back_after_ns: int) -> None:
        """Lose all that is here, with what was learned; started again after so long, in the role that it had.

        Its time until then is idle. One that is dead already stays so for as long as it was to be.
        """
        if self.down:
            return
        assert self._gateway is not None
        readers = [(each, stream) for each in self._peers.values() for stream in each.streams_from(self)]
        self.incarnation += 1
        self._give_up()
        self.down = self.draining = True
        self._forget_all()
        self._rest = Rest.IDLE
        for reader, stream in readers:  # or they have it all by then
            self._in_a_hop(partial(reader.lost, stream))
        self._in_a_hop(partial(self._gateway.lost, self))
        self._time.at_ps(self._time.now_ps + max(back_after_ns, self.shape.hop_ns) * PS_PER_NS, self._come_back)

    def _come_back(self) -> None:
        assert self._gateway is not None
        self._enter()
        self.down = self.draining = False
        self.credits.attach(GATEWAY)
        self._apply_assignment()
        self._leave()
        self._gateway.returned(self)

    def _give_up(self) -> None:
        """All sequences and the cache; a step that runs has spent its time for nothing."""
        self._enter(touched=True)
        if self._running is not None:
            running, self._running = self._running, None
            self.spent.step(self.shape.step_time, running.batch.work, self._time.now_ps - running.start_ps)
            self._accounted_ps = self._time.now_ps
        for stream in self._streams.values():
            self._link.drop(stream)
            self._source(stream).left(stream)
        self._streams.clear()
        self._unasked.clear()
        self._readers.clear()
        self._hosted.clear()
        self._left.clear()
        self.core = self._new_core()
        self._budget = -1

    def _forget_all(self) -> None:
        """What a process knows beside its engine."""
        self.credits = Credits()
        self.speed = Speed(self.shape.step_time, self.shape.chunk_tokens, measured=True)
        self._transfers = TransferSpeed(self.shape.block_tokens)
        self._submits = 0
        self._outbox = Outbox()
        self._prompts, self._staying, self._move_time = PromptLength(), Staying(), MoveTime()
        self._recent = RecentDecodes()
        self._waiting = Waiting(self._waiting.name)
        self._sealed.clear()
        self._unsettled = True
        self._expiry_due_ns = 0

    def streams_from(self, source: "LabWorker") -> list[Stream]:
        """What is on its way here from another worker."""
        return [stream for stream in self._streams.values() if self._source(stream) is source]

    def lost(self, stream: Stream) -> None:
        """The source of these blocks is gone."""
        if self._streams.get(stream.sequence.request.sequence_id) is not stream:
            return
        del self._streams[stream.sequence.request.sequence_id]
        self._link.drop(stream)
        self._enter()
        self.core.kv_failed(stream.sequence, FinishReason.KV_LOST, "its source is gone", self._time.now_ns())
        self._leave()

    def _apply_assignment(self) -> None:
        self._resize()
        self._apply_budget()
        self._outbox.assignment = True
        for hosted in self._hosted.values():
            hosted.offered = False
            self._offer(hosted)

    def _resize(self) -> None:
        step_s = max(self.speed.step_time.prefill_ns(trial_work(self.speed.chunk_tokens)), 1.0) / 1e9
        decoding = self.credits.decode.in_use
        facts = SlotFacts(
            self.shape.max_sequences, self._prompts.mean_tokens, self.speed.chunk_tokens, step_s, decoding
        )
        self._unsettled = True
        self.credits.resize(*((0, 0) if self.draining else slots(self.assignment.role, facts)))

    def _apply_budget(self) -> None:
        self._role_budget = role_budget(self.assignment)
        budget = engine_budget(self._role_budget, self._hosted.values())
        if budget != self._budget:
            self._budget = budget
            self.core.set_prefill_budget(budget)

    def _offer(self, hosted: Hosted) -> None:
        """Have the gateway look for another place for a sequence of a role that was left, where moving is sooner."""
        leaves = assignments.leaves_decode(self.assignment, draining=self.draining)
        if not leaves or not hosted.decodes or hosted.offered:
            return
        hosted.offered = True
        kv_bytes = -(-hosted.tokens // self.shape.block_tokens) * self.shape.kv_block_bytes
        staying = replace(self._staying, tpot_s=self._recent.mean_s())
        if sooner_moved(hosted.most_tokens_left, kv_bytes, staying, self._move_time):
            self._outbox.happened.append(Leaving(hosted.request.sequence_id))

    # ------------------------------------------------------------ steps

    def _enter(self, *, touched: bool = False) -> None:
        """Something happens here: time up to now is accounted for, and steps that pass at once are cut at this one.

        `touched`: it concerns sequences that may decode.
        """
        if self._coasting is not None:
            self._cut(self._coasting, touched=touched)
        elif self._running is None:
            self._account_rest()

    def _leave(self) -> None:
        """It has happened: act on what the core decided."""
        if self._running is None and self._coasting is None:
            self._step()
        self._follow()

    def _account_rest(self) -> None:
        now_ps = self._time.now_ps
        self.spent.rested(self._rest, now_ps - self._accounted_ps)
        self._accounted_ps = now_ps

    def _follow(self) -> None:
        """Start fetches, pass on what came of it, tell the gateway, say what the worker waits for."""
        self._fetch()
        self._pass_on(None)
        self._flush()
        if self._running is None and self._coasting is None:
            self._say_rest()
            self._watch_leases()

    def _say_rest(self) -> None:
        """What the worker waits for."""
        waits = self._link.moving or any(stream.ready > 0 for stream in self._streams.values())
        self._rest = Rest.KV_WAIT if waits else Rest.STARVED if self._streams else Rest.IDLE

    def _step(self, *, may_coast: bool = True) -> None:
        """Begin the next step, or many at once, at the time up to which all is accounted for."""
        start_ns = self._accounted_ps // PS_PER_NS
        if may_coast and self._may_coast():
            batch = self.core.plan_or_coast(start_ns)
            if isinstance(batch, Decoding):
                self._begin_coast(batch)
                return
        else:
            batch = self.core.plan(start_ns)
        self._begin_step(batch)

    def _may_coast(self) -> bool:
        assert self._gateway is not None
        # The end of the next step tells a new speed.
        return not (self.shape.stepwise or self._outbox.speed or self._gateway.heeds_tokens)

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
            return  # the worker was restarted meanwhile
        self._running = None
        self._accounted_ps = self._time.now_ps
        work = running.batch.work
        self.spent.step(self.shape.step_time, work, running.duration_ps)
        if self.recent_steps is not None:
            self.recent_steps.append((work, running.duration_ps // PS_PER_NS))
        if work.decode_sequences:
            self._recent.stepped(Coast(running.start_ps, running.duration_ps, 0), 1)
        self.counts.steps += 1
        self.counts.decode_tokens += work.decode_sequences
        self.counts.prompt_tokens += work.prefill_tokens
        sampled = {chunk.sequence_id: _SAMPLED for chunk in running.batch.chunks if chunk.sample}
        report = self.core.apply(running.batch, sampled, self._time.now_ns())
        self._pass_on(report)
        self._tell_readers()
        self._leave()

    def _begin_coast(self, decoding: Decoding) -> None:
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
            self._pass(coasting, coasting.most)
            self._leave()

    def step_singly(self) -> None:
        """The gateway heeds tokens from now on."""
        if self._coasting is not None:
            self._enter()

    def _cut(self, coasting: _Coasting, *, touched: bool) -> None:
        """Steps up to now have passed. The one that runs goes on; where its own sequences are `touched` it is a step
        like any other, which knows what to do about them."""
        coast = coasting.coast
        steps = coast.steps_by(self._time.now_ps)
        if steps >= coasting.most:
            self._pass(coasting, coasting.most)
            self._step(may_coast=False)
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
        decoding = coasting.decoding
        if self.recent_steps is not None:  # one stands for all of them
            kv_tokens = sum(sequence.length for sequence in decoding)
            step_ns = (end_ps - coasting.coast.start_ps) // steps // PS_PER_NS
            self.recent_steps.append((StepWork(decode_sequences=len(decoding), decode_kv_tokens=kv_tokens), step_ns))
        self.core.coast(decoding, steps)
        self.spent.decode_ps += end_ps - coasting.coast.start_ps
        self.counts.steps += steps
        self.counts.decode_tokens += steps * len(decoding)
        ids = [sequence.request.sequence_id for sequence in decoding]
        for sequence_id in ids:
            self._hosted[sequence_id].new_tokens += steps
        self._recent.stepped(coasting.coast, steps)
        load = self.core.decoding_load() or self.core.load()
        box, gateway = self._outbox, self._gateway
        speed = self.speed if box.speed else None
        box.speed = False
        coasted = Coasted(ids, coasting.coast, steps, load, self._submits, speed)
        assert gateway is not None
        self._time.at_ps(end_ps + self.shape.hop_ns * PS_PER_NS, lambda: gateway.coasted(self, coasted))

    def _watch_leases(self) -> None:
        """While nothing else happens here, the end of a lease may give room."""
        expiry_ns = self.core.next_expiry_ns
        if expiry_ns is None or expiry_ns == self._expiry_due_ns or not self.core.load().waiting:
            return
        self._expiry_due_ns = expiry_ns
        self._time.at(expiry_ns, self._expired)

    def _expired(self) -> None:
        if self.down:
            return
        self._expiry_due_ns = 0
        self._enter()
        self._leave()

    # ------------------------------------------------------------ what came of it

    def _pass_on(self, step: StepReport | None) -> None:
        event = self.core.take_event(step)
        if event is None:
            return
        ended = False
        leaves = assignments.leaves_decode(self.assignment, draining=self.draining)
        for output in event.outputs:
            hosted = self._hosted.get(output.sequence_id)
            if hosted is None:
                continue
            hosted.new_tokens += len(output.token_ids)
            if output.finish is not None:
                ended = True
                self._end(hosted, output)
            self._deliver(output)
            if leaves and output.only_tokens:
                self._offer(hosted)
        if self._budget != self._role_budget:
            self._apply_budget()
        if ended:
            self._resize()

    def _deliver(self, output: SequenceOutput) -> None:
        self._outbox.tokens.extend(output.sequence_id for _ in output.token_ids)
        if not output.only_tokens and (happened := self._event(output)) is not None:
            self._outbox.happened.append(happened)

    def _event(self, output: SequenceOutput) -> Happened | None:
        sequence_id, finish = output.sequence_id, output.finish
        if output.opened is not None:
            return Opened(sequence_id, self._blocks(output.opened))
        if finish is FinishReason.STOP or finish is FinishReason.LENGTH:
            return Finished(sequence_id, Ended(finish.value), output.cached_tokens)
        if finish is FinishReason.PREFILLED and output.handle is not None:
            return Prefilled(sequence_id, self._blocks(output.handle), output.cached_tokens)
        if finish is FinishReason.MOVED and output.handle is not None:
            return Moved(sequence_id, self._blocks(output.handle), output.cached_tokens)
        if finish in (FinishReason.KV_LOST, FinishReason.FAILED):
            return Failed(sequence_id, finish.value, output.detail, blocks_lost=finish is FinishReason.KV_LOST)
        return None

    def _blocks(self, handle: KvHandle) -> Blocks:
        return Blocks(handle, self.id, self.shape.kv_kind, once=False)

    def _end(self, hosted: Hosted, output: SequenceOutput) -> None:
        sequence_id = output.sequence_id
        del self._hosted[sequence_id]
        if self.shape.credits:
            self._pool(hosted.request.phase).free()
        if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._staying = self._staying.ended(hosted.tokens - hosted.request.prompt_tokens)
        if output.handle is not None:
            if output.finish is FinishReason.MOVED:
                kv_bytes = output.handle.blocks * self.shape.kv_block_bytes
                self._sealed[output.handle.opaque] = kv_bytes, self._time.now_ns()
            self._left[sequence_id] = output.handle.opaque

    def _flush(self) -> None:
        """Tell the gateway, a hop from now."""
        box = self._outbox
        if self._unsettled:
            self._unsettled = False
            self.credits.settle({GATEWAY: self._waiting})
        has_credit = self.credits.has_news(GATEWAY)
        if not (box.tokens or box.happened or box.load or box.assignment or has_credit):
            return
        frame = ToGateway(
            self.core.load(),
            self._submits,
            box.tokens,
            box.happened,
            self.credits.take(GATEWAY) if has_credit else None,
            self.assignment if box.assignment else None,
            self.speed if box.speed else None,
        )
        self._outbox = Outbox(assignment=False, speed=False)
        gateway = self._gateway
        assert gateway is not None
        self._in_a_hop(lambda: gateway.tell(self, frame))

    def _in_a_hop(self, call: Callable[[], None]) -> None:
        self._time.at_ps(self._time.now_ps + self.shape.hop_ns * PS_PER_NS, call)

    # ------------------------------------------------------------ KV from and for others

    def _fetch(self) -> None:
        """Ask the sources of sequences that have got their blocks."""
        for sequence in self.core.take_fetches():
            assert isinstance(sequence, CountedSequence)
            self._unasked.append(sequence)
        while self._unasked and len(self._streams) < MAX_FETCHES:
            sequence = self._unasked.pop(0)
            kv = sequence.request.kv
            assert kv is not None
            self.core.kv_asked(sequence)
            source, now_ns, found = self._peers[kv.worker_id], self._time.now_ns(), sequence.found_blocks
            try:
                held = source.core.pull(kv.opaque, now_ns)
            except KvLost as error:
                self.core.kv_failed(sequence, FinishReason.KV_LOST, error.message, now_ns)
                continue
            stream = self._streams[sequence.request.sequence_id] = Stream(sequence, held, found, now_ns, first=found)
            source.read_by(self, stream)
            self._in_a_hop(partial(self._in_a_hop, partial(self._opened, stream)))

    def read_by(self, reader: "LabWorker", stream: Stream) -> None:
        """Another worker reads a handle of this one as it fills."""
        self._readers[stream.held.opaque] = reader, stream

    def left(self, stream: Stream) -> None:
        """Its reader has gone without all of it."""
        self._readers.pop(stream.held.opaque, None)
        self.core.leave(stream.held, self._time.now_ns())

    def _tell_readers(self) -> None:
        if not self._readers:
            return
        for opaque, (reader, stream) in list(self._readers.items()):
            if stream.ready > 0 or stream.done:
                self._in_a_hop(partial(reader.more, stream))
            if stream.held.whole:
                del self._readers[opaque]

    def _opened(self, stream: Stream) -> None:
        """A hop for asking and a hop for the answer have passed."""
        stream.open = True
        self.more(stream)

    def more(self, stream: Stream) -> None:
        """Blocks are ready for this worker at their source, perhaps."""
        if stream.open and self._streams.get(stream.sequence.request.sequence_id) is stream:
            self._pull(stream)

    def _part_came(self, stream: Stream) -> None:
        if self._streams.get(stream.sequence.request.sequence_id) is stream:  # else it was aborted meanwhile
            self._pull(stream)

    def _pull(self, stream: Stream) -> None:
        """Only the last part is the engine's affair."""
        rests = self._running is None and self._coasting is None
        if rests:
            self._account_rest()
        self._link.pull(stream)
        if stream.done:
            self._enter()
            self._arrived(stream)
            self._leave()
        elif rests:
            self._say_rest()

    def _arrived(self, stream: Stream) -> None:
        del self._streams[stream.sequence.request.sequence_id]
        now_ns, blocks = self._time.now_ns(), stream.at - stream.first
        received = Received(blocks, blocks * self.shape.kv_block_bytes)
        self.core.kv_arrived(stream.sequence, received, stream.asked_ns, now_ns)
        self._transfers.arrived(blocks, now_ns - stream.asked_ns)
        if self._transfers.differs(self.speed.kv_token_ns):
            self.speed = replace(self.speed, kv_token_ns=self._transfers.token_ns)
            self._outbox.speed = True
        self._in_a_hop(partial(self._source(stream).acknowledged, stream))

    def acknowledged(self, stream: Stream) -> None:
        """The reader has all blocks of a handle."""
        if self.down:
            return
        self._enter()
        now_ns, opaque = self._time.now_ns(), stream.held.opaque
        self._readers.pop(opaque, None)
        self.core.leave(stream.held, now_ns)
        kv_bytes, sealed_ns = self._sealed.pop(opaque, (0, 0))
        if kv_bytes:
            self._move_time.observe(kv_bytes, max(now_ns - sealed_ns, 0) / 1e9)
        self.core.release(opaque, now_ns)
        self._outbox.load = True
        self._leave()

    def _source(self, stream: Stream) -> "LabWorker":
        kv = stream.sequence.request.kv
        assert kv is not None
        return self._peers[kv.worker_id]

    # ------------------------------------------------------------ at the end

    def close_books(self) -> None:
        """Account for all time up to now, that of a step that runs included."""
        self._enter()
        now_ps = self._time.now_ps
        if self._running is not None:
            running, self._running = self._running, None
            self.spent.step(self.shape.step_time, running.batch.work, now_ps - running.start_ps)
        elif self._coasting is not None:
            self._coasting = None
            self.spent.decode_ps += now_ps - self._accounted_ps
        self._accounted_ps = now_ps

    @property
    def busy(self) -> bool:
        """Whether a step runs or sequences are here."""
        return self._running is not None or bool(self._hosted)


def _block_ps(shape: WorkerShape) -> int:
    return max(round(shape.kv_block_bytes / shape.link_bytes_per_s * 1e12), 1)
