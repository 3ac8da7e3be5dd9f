"""One run of a trace through a cluster, from the first arrival until the last request has ended."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from libs.contracts.errors import QueueFull
from libs.lab.cluster.books import LabAnswer, LabOutcome
from libs.lab.cluster.host.device import PhaseTotals
from libs.lab.cluster.host.shape import InjectedErrors, WorkerShape
from libs.lab.cluster.sequence import Coasted, ToGateway
from libs.lab.cluster.time import PS_PER_NS, START_PS, StepDurations, VirtualTime
from libs.lab.cluster.worker import LabWorker
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.roles import Assignment, Role

# Time from the cluster's start to the trace's first moment, during which links connect and credits are granted.
SETTLE_NS: Final = 100_000_000
FIRST_EPOCH: Final = 1
PROGRESS_EVENTS, LOOK_EVENTS = 4096, 512
"""The numbers of events between two reports of progress, and between two checks of giving up."""


class InconsistentSimulation(Exception):
    """An inconsistency in the simulation, which invalidates its figures."""


class PlannedLoss(NamedTuple):
    """The death of a worker, with the loss of everything it holds."""

    at_s: float
    """The time in seconds from the start of the trace."""
    worker: int
    back_after_s: float
    """The seconds until the worker is started again, empty and in its former role."""


class PlannedMove(NamedTuple):
    """A change of a worker's role at a fixed time, regardless of any planner."""

    at_s: float
    """The seconds from the start of the trace."""
    worker: int
    role: Role
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class LabSetup:
    """A cluster together with its clients' behaviour."""

    shape: WorkerShape
    roles: Sequence[tuple[Role, int]]
    """The initial role and budget of each worker."""
    ttft_limit_ns: Callable[[TraceRequest], int]
    tpot_limit_ns: int
    overtime_ns: int = 0
    """The longest time that the run continues after the last arrival; 0 for no limit."""
    most_output_tokens: Callable[[TraceRequest], int] = lambda request: max(
        request.max_output_tokens, request.output_tokens
    )
    """A function that returns the output limit of the request's client."""
    closed_loop: bool = False
    """True if a later turn of a session arrives its think time after the previous one has ended, instead of at its time
    in the trace. This also applies after a failed turn, since its client continues anyway.
    """
    losses: Sequence[PlannedLoss] = ()
    moves: Sequence[PlannedMove] = ()
    refused: frozenset[int] = frozenset()
    """The numbers of the requests that are rejected on arrival."""
    wrong: InjectedErrors = field(default_factory=InjectedErrors)
    gives_up: Callable[[Sequence[LabAnswer], int], bool] | None = None
    """A function that returns whether to end the run at this time in picoseconds, given the answers so far; None to run
    to the end.
    """


@dataclass(slots=True)
class LabResult:
    """The answers and the counters of a run."""

    answers: list[LabAnswer]
    spent: list[PhaseTotals]
    workers: list[LabWorker]
    virtual_ps: int
    events: int
    role_moves: int
    moved_sequences: int


class RequestTaker(Protocol):
    """The gateway of a run, at which requests arrive."""

    ended: int
    """The number of requests that have ended."""
    handed_over: int
    """The number of sequences that moved to another worker with their KV."""

    @property
    def heeds_tokens(self) -> bool:
        """Return whether steps must pass one by one."""
        ...

    def start(self) -> None:
        """Start operation, with the whole cluster in place."""
        ...

    def arrive(self, answer: LabAnswer, keys: Sequence[bytes], tpot_target_ns: int) -> None: ...

    def deliver(self, worker: LabWorker, frame: ToGateway) -> None: ...

    def coasted(self, worker: LabWorker, coasted: Coasted) -> None: ...

    def lost(self, worker: LabWorker) -> None: ...

    def returned(self, worker: LabWorker) -> None:
        """Handle the restart of a worker that was lost."""
        ...


MakeGateway = Callable[[Sequence[LabWorker], VirtualTime], RequestTaker]


class Run:
    """The execution of a trace on a cluster."""

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
                StepDurations(setup.wrong.steps(index, setup.shape.step_time)),
            )
            for index, (role, budget) in enumerate(setup.roles)
        ]
        self.gateway = make_gateway(self.workers, self.time)
        self.answers: list[LabAnswer] = []
        self._keys = _Keys(trace.block_tokens)
        self._next_turns = _next_turns(trace) if setup.closed_loop else {}
        later = set(self._next_turns.values())
        self._in_time = [place for place in range(len(trace.requests)) if place not in later]
        """Indices of the requests that arrive at their time in the trace."""
        self._stop_ps = 0

    def run(self, on_progress: Callable[[int], None] = lambda ended: None) -> LabResult:
        """Run until all requests have ended or the overtime has passed. Raise BooksDoNotBalance."""
        peers = {worker.id: worker for worker in self.workers}
        for worker in self.workers:
            worker.start(self.gateway, peers)
        self.gateway.start()
        for loss in self._setup.losses:
            self._lose(loss)
        for move in self._setup.moves:
            self._move(move)
        self._arrive_at(0)
        total, gives_up = len(self._trace.requests), self._setup.gives_up

        def going_on() -> bool:
            if self.time.events % PROGRESS_EVENTS == 0:
                on_progress(self.gateway.ended)
            due = self.time.events % LOOK_EVENTS == 0
            if due and gives_up is not None and gives_up(self.answers, self.time.now_ps):
                self._stop_ps = self.time.now_ps
                return False
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
        """Schedule the next of the requests that arrive at their time in the trace."""
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
        """Schedule the client's next turn after its think time."""
        at_ps = self.time.now_ps + self._trace.requests[turn].think_ns * PS_PER_NS
        self.time.at_ps(at_ps, lambda: self._arrive(turn))
        if self._stop_ps:
            self._go_on_after(at_ps)

    def _go_on_after(self, arrival_ps: int) -> None:
        if self._setup.overtime_ns:
            self._stop_ps = max(self._stop_ps, arrival_ps + self._setup.overtime_ns * PS_PER_NS)

    def _settle_worker_books(self) -> None:
        """Account for all time of the workers, letting steps in progress end."""
        self.time.run(lambda: any(worker.busy for worker in self.workers) if not self._stop_ps else False)
        for worker in self.workers:
            worker.close_books()

    def _never_came(self) -> Iterator[LabAnswer]:
        """Yield answers for the turns that still waited for an earlier one at the end of the run."""
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
    """Return the index of each turn's successor by index."""
    sessions: dict[int, list[int]] = {}
    for place, request in enumerate(trace.requests):
        if request.session:
            sessions.setdefault(request.session, []).append(place)
    found: dict[int, int] = {}
    for places in sessions.values():
        places.sort(key=lambda place: trace.requests[place].turn)  # arrivals may be out of order
        found.update(pairwise(places))
    return found


class _Keys:
    """A cache of block keys, each of which is made once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[int, bytes] = {}

    def of(self, request: TraceRequest) -> Sequence[bytes]:
        """Return the keys of the prompt's full blocks."""
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
    """Raise BooksDoNotBalance, which names the inconsistency, if there is one."""
    for answer in result.answers:
        if answer.outcome is LabOutcome.COMPLETED and answer.tokens != answer.request.output_tokens:
            raise InconsistentSimulation(
                f"request {answer.request.number}: {answer.tokens} tokens came of {answer.request.output_tokens}"
            )
    for worker, spent in zip(result.workers, result.spent, strict=True):
        if spent.total_ps != result.virtual_ps:
            raise InconsistentSimulation(f"{worker.id}: {spent.total_ps} ps accounted for of {result.virtual_ps}")
        if fault := worker.core.pool_fault():
            raise InconsistentSimulation(f"{worker.id}: {fault}")
