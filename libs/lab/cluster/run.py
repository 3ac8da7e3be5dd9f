"""One run: a trace through a cluster, from its first arrival until the last request has ended."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from libs.contracts.errors import QueueFull
from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.cost import StepCost
from libs.lab.cluster.frames import Coasted, ToGateway
from libs.lab.cluster.host.shape import WorkerShape
from libs.lab.cluster.host.spent import Spent
from libs.lab.cluster.time import PS_PER_NS, START_PS, VirtualTime
from libs.lab.cluster.worker import LabWorker
from libs.lab.cluster.wrong import Wrong
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.roles import Assignment, Role

SETTLE_NS: Final = 100_000_000
"""From the start of the cluster to the trace's first moment: links are up, credits handed out."""
FIRST_EPOCH: Final = 1


class BooksDoNotBalance(Exception):
    """The simulation has lost or made up something: its figures are worth nothing."""


class PlannedLoss(NamedTuple):
    """A worker that dies with all that it holds."""

    at_s: float
    """From the trace's start."""
    worker: int
    back_after_s: float
    """Until it is started again, empty, in the role that it had."""


class PlannedMove(NamedTuple):
    """A worker that takes another role at its time, whatever a planner thinks of it."""

    at_s: float
    """From the trace's start."""
    worker: int
    role: Role
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class LabSetup:
    """A cluster, and what its clients want."""

    shape: WorkerShape
    roles: Sequence[tuple[Role, int]]
    """(role, budget) of each worker at first."""
    ttft_limit_ns: Callable[[TraceRequest], int]
    tpot_limit_ns: int
    overtime_ns: int = 0
    """After the last arrival the run goes on for so long at most; 0: until all have ended."""
    most_output_tokens: Callable[[TraceRequest], int] = lambda request: max(
        request.max_output_tokens, request.output_tokens
    )
    """That a client allows."""
    closed_loop: bool = False
    """Whether a later turn of a session comes its think time after the turn before has ended, instead of when it came
    in the trace. It comes also where that turn failed: its client goes on with what it has."""
    losses: Sequence[PlannedLoss] = ()
    moves: Sequence[PlannedMove] = ()
    refused: frozenset[int] = frozenset()
    """Numbers of requests that are turned away as they arrive."""
    wrong: Wrong = field(default_factory=Wrong)


@dataclass(slots=True)
class LabResult:
    """What a run brought."""

    answers: list[LabAnswer]
    spent: list[Spent]
    workers: list[LabWorker]
    virtual_ps: int
    events: int
    role_moves: int
    moved_sequences: int


class RequestTaker(Protocol):
    """Where requests arrive."""

    ended: int
    """Requests that have."""
    handed_over: int
    """Sequences that went on elsewhere with their KV."""

    @property
    def heeds_tokens(self) -> bool:
        """Whether steps are to pass one by one."""
        ...

    def start(self) -> None:
        """The cluster stands."""
        ...

    def arrive(self, answer: LabAnswer, keys: Sequence[bytes], tpot_target_ns: int) -> None:
        """A request has come."""
        ...

    def deliver(self, worker: LabWorker, frame: ToGateway) -> None:
        """A worker's frame has come."""
        ...

    def coasted(self, worker: LabWorker, coasted: Coasted) -> None:
        """A worker's tokens have come."""
        ...

    def lost(self, worker: LabWorker) -> None:
        """A worker is dead."""
        ...

    def returned(self, worker: LabWorker) -> None:
        """It was started again."""
        ...


MakeGateway = Callable[[Sequence[LabWorker], VirtualTime], RequestTaker]


class Run:
    """A trace on a cluster."""

    def __init__(self, trace: Trace, setup: LabSetup, make_gateway: MakeGateway) -> None:
        self._trace = trace
        self._setup = setup
        self.time = VirtualTime()
        self.workers = [
            LabWorker(
                index,
                setup.wrong.shape(index, setup.shape),
                Assignment(setup.shape.model, role, budget, FIRST_EPOCH),
                self.time,
                StepCost(setup.wrong.steps(index, setup.shape.step_time)),
            )
            for index, (role, budget) in enumerate(setup.roles)
        ]
        self.gateway = make_gateway(self.workers, self.time)
        self.answers: list[LabAnswer] = []
        self._keys = _Keys(trace.block_tokens)
        self._next_turns = _next_turns(trace) if setup.closed_loop else {}
        later = set(self._next_turns.values())
        self._in_time = [place for place in range(len(trace.requests)) if place not in later]
        """Requests that arrive when they did in the trace."""
        self._stop_ps = 0

    def run(self, on_progress: Callable[[int], None] = lambda ended: None) -> LabResult:
        """Until all have ended, or the overtime is over. Raises BooksDoNotBalance."""
        peers = {worker.id: worker for worker in self.workers}
        for worker in self.workers:
            worker.start(self.gateway, peers)
        self.gateway.start()
        for loss in self._setup.losses:
            self._lose(loss)
        for move in self._setup.moves:
            self._move(move)
        self._arrive_at(0)
        total = len(self._trace.requests)

        def going_on() -> bool:
            if self.time.events % 4096 == 0:
                on_progress(self.gateway.ended)
            return self.gateway.ended < total and not (self._stop_ps and self.time.now_ps > self._stop_ps)

        self.time.run(going_on)
        self._settle_worker_books()
        return self._result()

    def _lose(self, loss: PlannedLoss) -> None:
        worker, back_after_ns = self.workers[loss.worker], round(loss.back_after_s * 1e9)
        at_ps = START_PS + (SETTLE_NS + round(loss.at_s * 1e9)) * PS_PER_NS
        self.time.at_ps(at_ps, lambda: worker.die(back_after_ns))

    def _move(self, move: PlannedMove) -> None:
        worker = self.workers[move.worker]
        at_ps = START_PS + (SETTLE_NS + round(move.at_s * 1e9)) * PS_PER_NS
        self.time.at_ps(at_ps, lambda: worker.down or worker.set_role(move.role, move.budget_tokens))

    def _arrive_at(self, index: int) -> None:
        """Have the next one come of those that arrive as in the trace."""
        if index < len(self._in_time):
            place = self._in_time[index]
            at_ps = START_PS + (SETTLE_NS + self._trace.requests[place].arrival_ns) * PS_PER_NS
            self.time.at_ps(at_ps, lambda: self._arrive(place, index + 1))
        else:
            self._go_on_after(self.time.now_ps)

    def _arrive(self, place: int, next_index: int = 0) -> None:
        request, setup = self._trace.requests[place], self._setup
        answer = LabAnswer(
            request, self.time, self.time.now_ps, setup.ttft_limit_ns(request), setup.tpot_limit_ns,
            setup.most_output_tokens(request),
        )  # fmt: skip
        if (turn := self._next_turns.get(place)) is not None:
            answer.on_end = lambda: self._answered(turn)
        self.answers.append(answer)
        if request.number in setup.refused:
            answer.fail(QueueFull("turned away", retry_after_s=0.0))
            self.gateway.ended += 1
        else:
            self.gateway.arrive(answer, self._keys.of(request), setup.tpot_limit_ns)
        if next_index:
            self._arrive_at(next_index)

    def _answered(self, turn: int) -> None:
        """The client thinks, and takes its next turn."""
        at_ps = self.time.now_ps + self._trace.requests[turn].think_ns * PS_PER_NS
        self.time.at_ps(at_ps, lambda: self._arrive(turn))
        if self._stop_ps:
            self._go_on_after(at_ps)

    def _go_on_after(self, arrival_ps: int) -> None:
        if self._setup.overtime_ns:
            self._stop_ps = max(self._stop_ps, arrival_ps + self._setup.overtime_ns * PS_PER_NS)

    def _settle_worker_books(self) -> None:
        """Let steps that run end, so that all time is accounted for."""
        self.time.run(lambda: any(worker.busy for worker in self.workers) if not self._stop_ps else False)
        for worker in self.workers:
            worker.close_books()

    def _never_came(self) -> Iterator[LabAnswer]:
        """Turns that still waited for the one before as the run ended."""
        arrived = {answer.request.number for answer in self.answers} if self._next_turns else set()
        for place in self._next_turns.values():
            request, setup = self._trace.requests[place], self._setup
            if request.number not in arrived:
                limit_ns = setup.ttft_limit_ns(request)
                yield LabAnswer(request, self.time, self.time.now_ps, limit_ns, setup.tpot_limit_ns)

    def _result(self) -> LabResult:
        self.answers += list(self._never_came())
        return LabResult(
            self.answers,
            [worker.spent for worker in self.workers],
            self.workers,
            self.time.now_ps - START_PS,
            self.time.events,
            sum(worker.counts.moves for worker in self.workers),
            self.gateway.handed_over,
        )


def _next_turns(trace: Trace) -> dict[int, int]:
    """Place of the turn that follows, by place."""
    sessions: dict[int, list[int]] = {}
    for place, request in enumerate(trace.requests):
        if request.session:
            sessions.setdefault(request.session, []).append(place)
    found: dict[int, int] = {}
    for places in sessions.values():
        places.sort(key=lambda place: trace.requests[place].turn)  # where arrivals are out of order
        found.update(pairwise(places))
    return found


class _Keys:
    """Block keys of prompts, each made once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[int, bytes] = {}

    def of(self, request: TraceRequest) -> Sequence[bytes]:
        """Of its full blocks."""
        if not request.hash_ids:
            return ()
        known = self._known
        full = request.input_tokens // self._block_tokens
        keys = []
        for hash_id in request.hash_ids[:full]:
            key = known.get(hash_id)
            if key is None:
                key = known[hash_id] = hash_id.to_bytes(8, "big", signed=True)
            keys.append(key)
        return keys


def check(result: LabResult) -> None:
    """Raises BooksDoNotBalance, naming what does not add up."""
    for answer in result.answers:
        if answer.outcome is LabOutcome.COMPLETED and answer.tokens != answer.request.output_tokens:
            raise BooksDoNotBalance(
                f"request {answer.request.number}: {answer.tokens} tokens came of {answer.request.output_tokens}"
            )
    for worker, spent in zip(result.workers, result.spent, strict=True):
        if spent.total_ps != result.virtual_ps:
            raise BooksDoNotBalance(f"{worker.id}: {spent.total_ps} ps accounted for of {result.virtual_ps}")
        if fault := worker.core.pool_fault():
            raise BooksDoNotBalance(f"{worker.id}: {fault}")
