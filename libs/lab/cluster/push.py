"""The gateway of rivals, which sends each request to a worker's queue on arrival.

The decisions of routers and movers are in `libs/lab/rivals`. A request takes one hop to the router, which sees the
queues at that time. KV is pulled once a prompt is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.contracts.errors import NoWorkers
from libs.dispatch.generation import ApiFinishReason
from libs.dispatch.ports import (
    AttemptEvent,
    Failed,
    Prefilled,
    SequenceFinished,
    SequenceHandedOver,
    SequenceRefused,
)
from libs.engine.kv_port import KvHandle
from libs.engine.port import EnginePhase
from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.sequence import GREEDY, Coasted, CountedRequest, CountedTokens, ToGateway, ToWorker
from libs.lab.cluster.time import PS_PER_NS, VirtualTime
from libs.lab.cluster.watch import Watch
from libs.lab.cluster.worker import LabWorker
from libs.lab.rivals.port import (
    LearningRouter,
    Move,
    Rival,
    RivalMover,
    RivalRouter,
    SeenRequest,
    SeenSequence,
    SeenWorker,
    SequenceMover,
    Slo,
)
from libs.policy.roles import Role

MAX_ATTEMPTS: Final = 64
"""The maximum number of attempts of one request at workers that had changed roles or were lost."""
_CHAIN_ROOT: Final = b"lab"


@dataclass(eq=False, slots=True)
class _Pushed:
    """A request in progress and the workers involved in it."""

    answer: LabAnswer
    keys: Sequence[bytes]
    tpot_target_ns: int
    seen: SeenRequest
    worker: int = -1
    """The index of the worker that has the request."""
    sequence_id: int = 0
    source: tuple[int, int] | None = None
    """(worker, sequence id) that holds the blocks of the computed prompt."""
    handle: KvHandle | None = None
    attempts: int = 0
    bound: int = -1
    """The decode worker, if it was chosen on arrival."""
    decodes: bool = False
    """True once the request is at the worker that decodes it."""
    moves_to: int = -1
    """The worker to which the request is moving with its KV."""


class PushGateway:
    """A gateway that carries out a rival's decisions."""

    def __init__(
        self,
        workers: Sequence[LabWorker],
        time: VirtualTime,
        *,
        rival: Rival,
        router: RivalRouter,
        mover: RivalMover | None,
        learner: LearningRouter | None,
        sequence_mover: SequenceMover | None,
        slo: Slo,
    ) -> None:
        """Create the gateway. `slo` is that of a typical request, for the mover. `learner` is the router, if it
        learns.
        """
        self._binds_at_arrival = rival.binds_at_arrival
        self._prompt_only = rival.prompt_only
        self._workers = workers
        self._router = router
        self._mover = mover
        self._learner = learner
        self._sequence_mover = sequence_mover
        self._cost = rival.move_cost
        self._draining: dict[int, Move] = {}
        self._time = time
        self._watch = Watch(workers, time, slo, keep_steps=mover is not None and mover.wants_steps)
        self._on: dict[tuple[int, int], _Pushed] = {}
        self._ids = 0
        self._stranded: list[_Pushed] = []
        """Requests that no worker accepts at present."""
        self._hop_ps = workers[0].shape.hop_ns * PS_PER_NS
        self.ended = 0
        self.handed_over = 0

    def start(self) -> None:
        """Start consulting the movers at their intervals."""
        if self._mover is not None:
            self._time.in_ps(self._mover.every_ns * PS_PER_NS, self._look)
        if self._sequence_mover is not None:
            self._time.in_ps(self._sequence_mover.every_ns * PS_PER_NS, self._look_at_sequences)

    # ------------------------------------------------------------ requests

    def arrive(self, answer: LabAnswer, keys: Sequence[bytes], tpot_target_ns: int) -> None:
        def route() -> None:
            seen = self._watch.arrived(answer, list(keys))
            self._prompt(_Pushed(answer, keys, tpot_target_ns, seen))

        self._time.at_ps(self._time.now_ps + self._hop_ps, route)

    def _prompt(self, pushed: _Pushed) -> None:
        """Send the request, with the tokens generated so far, to a worker that computes its prompt."""
        pushed.source = pushed.handle = None
        self._unbind(pushed)
        views = self._watch.workers()
        if not any(view.ready and (view.role is Role.PREFILL or view.budget_tokens) for view in views):
            self._stranded.append(pushed)
            return
        index = self._router.prompt(pushed.seen, views, self._time.now_ns())
        phase = EnginePhase.PREFILL if self._prompt_only(views[index]) else EnginePhase.BOTH
        if self._binds_at_arrival and phase is EnginePhase.PREFILL and any(map(_decodes, views)):
            pushed.bound = self._router.decode(pushed.seen, index, views, self._time.now_ns())
            self._watch.bound(pushed.bound, pushed.seen.input_tokens)
        self._submit(pushed, index, phase)

    def _decode(self, pushed: _Pushed) -> None:
        index = pushed.bound
        self._unbind(pushed)
        views = self._watch.workers()
        if index < 0 or not _decodes(views[index]):
            if not any(map(_decodes, views)):
                self._stranded.append(pushed)
                return
            assert pushed.source is not None
            index = self._router.decode(pushed.seen, pushed.source[0], views, self._time.now_ns())
        self._submit(pushed, index, EnginePhase.DECODE)

    def _unbind(self, pushed: _Pushed) -> None:
        """Cancel the binding of a request that has reached its decode worker or will decode elsewhere."""
        if pushed.bound >= 0:
            self._watch.bound(pushed.bound, pushed.seen.input_tokens, times=-1)
            pushed.bound = -1

    def _submit(self, pushed: _Pushed, index: int, phase: EnginePhase) -> None:
        self._ids += 1
        answer, worker = pushed.answer, self._workers[index]
        request = answer.request
        pushed.worker, pushed.sequence_id = index, self._ids
        pushed.decodes, pushed.moves_to = phase is not EnginePhase.PREFILL, -1
        self._on[index, self._ids] = pushed
        submit = CountedRequest(
            sequence_id=self._ids,
            request_id=str(request.number),
            phase=phase,
            token_ids=CountedTokens(request.input_tokens + answer.tokens),  # type: ignore[arg-type]
            prompt_tokens=request.input_tokens,
            max_output_tokens=answer.most_output_tokens,
            sampling=GREEDY,
            chain_root=_CHAIN_ROOT,
            kv=pushed.handle if phase is EnginePhase.DECODE else None,
            tpot_target_ns=pushed.tpot_target_ns,
            first_token_due_ns=answer.arrival_ps // PS_PER_NS + answer.ttft_limit_ns,
            output_tokens=request.output_tokens,
            keys=pushed.keys,
            arrival_ns=answer.arrival_ps // PS_PER_NS,
            service_class=request.service_class,
            kind=f"{request.tenant}/{request.service_class}",
        )
        self._send(worker, ToWorker(submits=[submit]))

    def _send(self, worker: LabWorker, frame: ToWorker) -> None:
        worker.receive(frame)

    # ------------------------------------------------------------ callbacks from workers

    heeds_tokens: Final = False

    def deliver(self, worker: LabWorker, frame: ToGateway) -> None:
        for sequence_id in frame.tokens:
            pushed = self._on.get((worker.index, sequence_id))
            if pushed is not None:
                self._token(pushed)
        for event in frame.events:
            pushed = self._on.get((worker.index, event.sequence_id))
            if pushed is not None:
                self._on_event(worker, pushed, event)
        if worker.index in self._draining:
            self._flip_if_drained(worker)

    def _token(self, pushed: _Pushed) -> None:
        pushed.answer.token(0, None)
        if pushed.answer.tokens == 1 and self._learner is not None:
            self._learner.first_token(pushed.seen.number, pushed.answer.ttft_ns)
        self._release(pushed, but=pushed.sequence_id)

    def _release(self, pushed: _Pushed, but: int = 0) -> None:
        """Release the blocks at the worker that computed the prompt."""
        if pushed.source is not None and pushed.source[1] != but:
            index, sequence_id = pushed.source
            pushed.source = None
            self._send(self._workers[index], ToWorker(aborts=[sequence_id]))

    def _on_event(self, worker: LabWorker, pushed: _Pushed, event: AttemptEvent) -> None:
        key = worker.index, event.sequence_id
        if isinstance(event, Prefilled):
            del self._on[key]
            pushed.answer.cached_tokens = pushed.answer.cached_tokens or event.cached_tokens
            if pushed.answer.tokens >= pushed.answer.request.output_tokens:
                self._send(worker, ToWorker(aborts=[event.sequence_id]))
                self._end(pushed)
                return
            pushed.source, pushed.handle = key, event.blocks.source  # type: ignore[assignment]
            self._decode(pushed)
        elif isinstance(event, SequenceHandedOver):
            del self._on[key]
            pushed.source, pushed.handle = key, event.blocks.source  # type: ignore[assignment]
            self.handed_over += 1
            pushed.bound = pushed.moves_to
            self._watch.bound(pushed.bound, pushed.seen.input_tokens)
            self._decode(pushed)
        elif isinstance(event, SequenceFinished):
            del self._on[key]
            pushed.answer.cached_tokens = pushed.answer.cached_tokens or event.cached_tokens
            self._end(pushed)
        elif isinstance(event, SequenceRefused | Failed):
            del self._on[key]
            self._again(pushed)

    def _again(self, pushed: _Pushed) -> None:
        self._release(pushed)
        pushed.attempts += 1
        if pushed.attempts > MAX_ATTEMPTS:
            pushed.answer.fail(NoWorkers("no worker kept it", retry_after_s=1.0))
            self.ended += 1
            return
        self._prompt(pushed)

    def _end(self, pushed: _Pushed) -> None:
        self._release(pushed)
        self._unbind(pushed)
        pushed.answer.finish(ApiFinishReason.STOP)
        self._watch.ended(pushed.answer)
        if self._learner is not None:
            answer = pushed.answer
            self._learner.ended(pushed.seen.number, answer.tpot_ns if answer.tokens > 1 else 0.0)
        self.ended += 1

    def coasted(self, worker: LabWorker, coasted: Coasted) -> None:
        """Record the same number of tokens for each of these sequences."""
        for sequence_id in coasted.sequences:
            pushed = self._on.get((worker.index, sequence_id))
            if pushed is not None:
                pushed.answer.coasted(coasted.coast, coasted.steps, self._hop_ps)

    # ------------------------------------------------------------ roles

    def _look(self) -> None:
        mover = self._mover
        assert mover is not None
        for move in mover.moves(self._watch.seen()):
            self._move(move)
        self._time.in_ps(mover.every_ns * PS_PER_NS, self._look)

    def _look_at_sequences(self) -> None:
        mover = self._sequence_mover
        assert mover is not None
        for worker in self._workers:  # steps that pass at once end here, so that their tokens are counted
            if not worker.down:
                worker.enter()
                worker.leave()
        running = {
            pushed.seen.number: pushed
            for pushed in self._on.values()
            if pushed.decodes and pushed.answer.tokens and pushed.moves_to < 0
        }
        seen = [_seen_sequence(pushed) for pushed in running.values()]
        for number, to in mover.sequence_moves(self._watch.workers(), seen):
            pushed = running[number]
            pushed.moves_to = to
            self._send(self._workers[pushed.worker], ToWorker(hand_overs=[pushed.sequence_id]))
        self._time.in_ps(mover.every_ns * PS_PER_NS, self._look_at_sequences)

    def _flip_if_drained(self, worker: LabWorker) -> None:
        """Change the role of a draining worker that has neither sequences nor blocks for other workers."""
        if any(index == worker.index for index, _ in self._on):
            return
        if any(pushed.source is not None and pushed.source[0] == worker.index for pushed in self._on.values()):
            return
        move = self._draining.pop(worker.index)

        def ready() -> None:
            self._watch.draining.discard(worker.index)
            if not worker.down:
                worker.set_role(move.role, move.budget_tokens)
            self._retry()

        self._time.in_ps(self._cost.start_ns * PS_PER_NS, ready)

    def _move(self, move: Move) -> None:
        worker = self._workers[move.index]
        if worker.down:
            return
        if self._cost.drains:
            self._draining[move.index] = move
            self._watch.draining.add(move.index)
            self._flip_if_drained(worker)
            return
        if self._cost.restarts:
            there = self._take_back(worker)
            worker.restart(move.role, move.budget_tokens, self._cost.start_ns)
            for pushed in there:
                self._again(pushed)
            # Blocks that waited there are gone, as their readers will find out.
        else:
            worker.set_role(move.role, move.budget_tokens)
        self._time.at_ps(self._time.now_ps + self._cost.start_ns * PS_PER_NS, self._retry)

    def _take_back(self, worker: LabWorker) -> list[_Pushed]:
        """Return and forget all requests of a worker that will no longer report on them."""
        there = [pushed for (index, _), pushed in self._on.items() if index == worker.index]
        self._on = {key: pushed for key, pushed in self._on.items() if key[0] != worker.index}
        return there

    def lost(self, worker: LabWorker) -> None:
        """Restart the requests of a lost worker elsewhere."""
        for pushed in self._take_back(worker):
            self._again(pushed)

    def returned(self, worker: LabWorker) -> None:
        """Retry requests that had found no worker."""
        self._retry()

    def _retry(self) -> None:
        stranded, self._stranded = self._stranded, []
        for pushed in stranded:
            if pushed.handle is not None:
                self._decode(pushed)
            else:
                self._prompt(pushed)


def _decodes(view: SeenWorker) -> bool:
    """Return whether sequences may be sent to the worker to decode."""
    return view.ready and view.role is Role.MIXED


def _seen_sequence(pushed: _Pushed) -> SeenSequence:
    answer = pushed.answer
    return SeenSequence(
        pushed.seen.number,
        pushed.worker,
        answer.request.input_tokens + answer.tokens,
        answer.tokens,
        answer.tpot_ns if answer.tokens > 1 else 0.0,
        answer.tpot_limit_ns,
    )
