"""One experiment, made of a trace, a cluster, a policy and an SLO, and its report."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any, Final

from libs.contracts.errors import InvalidRequest
from libs.dispatch.ports import Tenancy
from libs.lab.cluster.books import LabAnswer
from libs.lab.cluster.gateway import Borrowed, LabGateway
from libs.lab.cluster.host.shape import InjectedErrors, WorkerShape
from libs.lab.cluster.push import PushGateway
from libs.lab.cluster.run import LabResult, LabSetup, MakeGateway, PlannedLoss, PlannedMove, Run, check
from libs.lab.hardware import Hardware
from libs.lab.policies import Policy
from libs.lab.rivals.port import LearningRouter, RivalSetting, Slo
from libs.lab.slo import IdealWork, Score, SloSpec, is_lost, score
from libs.lab.traces.request import Trace, TraceRequest
from libs.policy.gateway.binding import POLICIES
from libs.policy.gateway.order import WaitBounds
from libs.policy.roles import Role
from libs.policy.speed import Speed
from libs.policy.step_time import StepTimeModel
from libs.policy.worker.saturation import knee_of

# The block size for traces without prefixes: fine enough for any prompt, coarse enough to be quick.
DEFAULT_BLOCK_TOKENS: Final = 64
MOST_CHUNK_TOKENS: Final = 8192
MAX_SEQUENCES: Final = 256
LINK_GBPS: Final = 400.0
"""The bandwidth for KV per GPU of a worker, assuming one network card per GPU, as in nodes with H100 and later."""
HOP_MS: Final = 1.0
"""The time for one message between gateway and worker, including its waits at either end, as measured on an idle
suite.
"""
LOOKUP_MS: Final = 1.0
"""The time from a request's arrival until the block index has reported the cached prefixes."""
PATIENCE: Final = WaitBounds(max_wait_ms=600_000, no_workers_wait_ms=30_000)
COLLECT_AFTER_OBJECTS: Final = 200_000
# The lab shows how late requests are, rather than how many a gateway would refuse.
MAX_WAITING: Final = 1_000_000


def gpu_link_gbps(hardware: Hardware) -> float:
    """Return the bandwidth for KV of each GPU, as measured or the lab's own."""
    return LINK_GBPS if hardware.link_gbps is None else hardware.link_gbps / hardware.profile.gpus


@dataclass(frozen=True, slots=True)
class Experiment:
    """All parameters that determine the result of a run."""

    trace: Trace
    hardware: Hardware
    workers: int
    slo: SloSpec
    seed: int = 1
    interference: float | None = None
    """A replacement for the interference of the profile."""
    link_gbps: float = LINK_GBPS
    hop_ms: float = HOP_MS
    lookup_ms: float = LOOKUP_MS
    max_sequences: int = MAX_SEQUENCES
    chunk_tokens: int = 0
    """The maximum number of prompt tokens in a step; 0 means the smallest chunk that saturates the device."""
    overtime_s: float = 600.0
    """The longest time for which the run may continue after the last arrival."""
    warm_up_s: float = 0.0
    """Requests that arrive in these first seconds are served but not scored."""
    tail_s: float = 0.0
    """Requests of these last seconds are not scored either. They keep the cluster busy while the scored ones finish."""
    closed_loop: bool = False
    """True if later turns of a session wait for the previous answer and the think time."""
    losses: Sequence[PlannedLoss] = ()
    moves: Sequence[PlannedMove] = ()
    refused: frozenset[int] = frozenset()
    """The numbers of the requests that are rejected on arrival."""
    wrong: InjectedErrors = field(default_factory=InjectedErrors)
    """The errors injected into the cluster's own figures."""
    allowed_tokens: int = 0
    """The output limit of clients if the trace has none; 0 means the exact length, as an oracle would know it."""
    stepwise: bool = False
    give_up_below: float = 0.0
    """The share of good requests, and of good work, below which the run may end once both are certain to stay below
    it.
    """
    limit_step_time: StepTimeModel | None = None
    """The step times of the isolated prompts in TTFT limits such as 3x; None takes those of the hardware."""
    tenants: Tenancy | None = None
    """The tenants that share queue and decode places under the live dispatcher; None treats all requests alike."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InvalidRequest(f"{self.workers} workers serve nothing: name at least one with --workers")
        if not self.trace.requests:
            raise InvalidRequest(f"trace {self.trace.name} has no requests")
        for loss in self.losses:
            if not 0 <= loss.worker < self.workers:
                raise InvalidRequest(f"there is no worker {loss.worker} to lose, but 0 to {self.workers - 1}")
        blocks = self.kv_blocks
        longest = max(self.trace.requests, key=lambda each: each.input_tokens + each.output_tokens)
        tokens = longest.input_tokens + longest.output_tokens
        if tokens > blocks * self.block_tokens:
            raise InvalidRequest(
                f"request {longest.number} has {tokens} tokens, and one worker's KV holds {blocks * self.block_tokens}:"
                " take a device with more memory, or a larger --tp"
            )
        shortest = min(each.input_tokens for each in self.trace.requests)
        isolated, limit_ns = self.work.prompt_ns(shortest), self.ttft_limit_ns(shortest)
        if isolated > limit_ns:
            raise InvalidRequest(
                f"SLO {self.slo.text!r} cannot be met: even the shortest prompt takes {isolated / 1e9:.3f} s by itself,"
                f" and {limit_ns / 1e9:.3f} s are allowed; allow more, or take a faster device"
            )
        alone_ns = self.speed.decode_ns(1, shortest)
        if alone_ns > self.slo.tpot_ns:
            raise InvalidRequest(
                f"SLO {self.slo.text!r} cannot be met: one sequence alone takes {alone_ns / 1e6:.1f} ms a token;"
                " allow more, or take a faster device"
            )

    @property
    def step_time(self) -> StepTimeModel:
        """The step-time model shared by all workers."""
        model = self.hardware.profile.step_time
        return model if self.interference is None else replace(model, interference=self.interference)

    @property
    def block_tokens(self) -> int:
        """The tokens of a KV block, taken from the trace if it has prefixes."""
        return self.trace.block_tokens or DEFAULT_BLOCK_TOKENS

    @property
    def kv_blocks(self) -> int:
        """KV blocks of one worker; 0 if the model does not fit."""
        found = self.hardware.profile
        return max(found.kv_memory_bytes // found.kv_bytes_per_token // self.block_tokens, 0)

    def most_output_tokens(self, request: TraceRequest) -> int:
        """Return the output tokens that the request's client allows, bounded by one worker's KV memory."""
        allowed = request.max_output_tokens or min(
            self.allowed_tokens, self.kv_blocks * self.block_tokens - request.input_tokens
        )
        return max(allowed, request.output_tokens)

    @property
    def link_bytes_per_s(self) -> float:
        """The bandwidth of one worker, over all of its GPUs."""
        return self.link_gbps * self.hardware.profile.gpus * 1e9 / 8

    @property
    def speed(self) -> Speed:
        chunk = self.chunk_tokens or _knee(self.step_time)
        kv_token_ns = self.hardware.profile.kv_bytes_per_token / self.link_bytes_per_s * 1e9
        return Speed(self.step_time, chunk, kv_token_ns, measured=True)

    @property
    def work(self) -> IdealWork:
        """The work of requests in a cluster without friction."""
        return IdealWork(self.speed, self.slo.tpot_ns, self.max_sequences)

    def ttft_limit_ns(self, tokens: int) -> int:
        """Return the TTFT limit of a prompt of this length."""
        speed = self.speed
        if self.limit_step_time is not None:
            speed = replace(speed, step_time=self.limit_step_time)
        return self.slo.ttft_limit_ns(speed.prompt_ns(tokens, tokens**2))

    def shape(self, policy: Policy) -> WorkerShape:
        """Return the shape of each worker under a policy."""
        found = self.hardware.profile
        return WorkerShape(
            model=found.name,
            step_time=self.step_time,
            block_tokens=self.block_tokens,
            kv_blocks=self.kv_blocks,
            kv_block_bytes=found.kv_bytes_per_token * self.block_tokens,
            max_sequences=self.max_sequences,
            chunk_tokens=self.speed.chunk_tokens,
            link_bytes_per_s=self.link_bytes_per_s,
            hop_ns=round(self.hop_ms * 1e6),
            guard=policy.guard,
            prompt_order=None if policy.ours else policy.prompt_order,
            credits=policy.rival is None or policy.ours,
            stepwise=self.stepwise,
        )


@dataclass(frozen=True, slots=True)
class LabReport:
    policy: str
    roles: str
    """The split of roles at the start, e.g. "9:7"."""
    seed: int
    score: Score
    goodput_rps_per_gpu: float
    gpu_seconds: dict[str, float]
    role_moves: int
    moved_sequences: int
    wall_s: float
    virtual_s: float
    events: int

    def as_json(self) -> dict[str, Any]:
        """Return a flat record, as printed by `fulcrum lab run --json`."""
        found = asdict(self)
        return {"policy": found.pop("policy"), "seed": found.pop("seed"), **found.pop("score"), **found}


def run(
    experiment: Experiment, policy: Policy, on_progress: Callable[[int], None] = lambda ended: None
) -> tuple[LabReport, LabResult]:
    """Run the experiment under a policy; raise BooksDoNotBalance if the simulation itself is inconsistent."""
    started = time.perf_counter()
    shape, work = experiment.shape(policy), experiment.work
    isolated: dict[int, int] = {}

    def ttft_limit_ns(request: TraceRequest) -> int:
        tokens = request.input_tokens
        if tokens not in isolated:
            isolated[tokens] = experiment.ttft_limit_ns(tokens)
        return isolated[tokens]

    cluster = RivalSetting(
        experiment.workers,
        experiment.speed,
        experiment.max_sequences,
        experiment.kv_blocks,
        experiment.block_tokens,
        _typical(experiment),
    )
    roles = policy.first_roles(cluster)
    setup = LabSetup(
        shape,
        roles,
        ttft_limit_ns,
        experiment.slo.tpot_ns,
        round(experiment.overtime_s * 1e9),
        closed_loop=experiment.closed_loop,
        losses=experiment.losses,
        most_output_tokens=experiment.most_output_tokens,
        moves=experiment.moves,
        refused=experiment.refused,
        wrong=experiment.wrong,
        gives_up=partial(_is_hopeless, experiment, work) if experiment.give_up_below else None,
    )
    gateway = _gateway(policy, cluster, experiment)
    with _seldom_collecting():
        result = Run(experiment.trace, setup, gateway).run(on_progress)
    check(result)
    scored = score(_measured(experiment, result.answers), work)
    gpus = experiment.hardware.profile.gpus
    virtual_s = result.virtual_ps / 1e12
    spent = {
        name: sum(getattr(each, f"{name}_ps") for each in result.spent) * gpus / 1e12
        for name in ("prefill", "decode", "kv_wait", "idle", "starved")
    }
    report = LabReport(
        policy=policy.name,
        roles=_split(roles),
        seed=experiment.seed,
        score=scored,
        goodput_rps_per_gpu=scored.good / virtual_s / (experiment.workers * gpus),
        gpu_seconds=spent,
        role_moves=result.role_moves,
        moved_sequences=result.moved_sequences,
        wall_s=time.perf_counter() - started,
        virtual_s=virtual_s,
        events=result.events,
    )
    return report, result


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    # A run creates millions of small objects but hardly any cycles. Searching for cycles would take a twentieth of its
    # time.
    usual = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@cache
def _knee(step_time: StepTimeModel) -> int:
    """Return the prefill chunk that a worker would measure at its start."""
    return knee_of(step_time, MOST_CHUNK_TOKENS)[0]


def _measured(experiment: Experiment, answers: Sequence[LabAnswer]) -> list[LabAnswer]:
    """Return the answers between warm-up and tail. Requests that never arrived are in the trace but not among the
    answers.
    """
    first_ns, last_ns = _span_ns(experiment)
    return [answer for answer in answers if first_ns <= answer.request.arrival_ns <= last_ns]


def _counted(experiment: Experiment) -> list[TraceRequest]:
    """Return the requests of the trace between warm-up and tail."""
    first_ns, last_ns = _span_ns(experiment)
    return [request for request in experiment.trace.requests if first_ns <= request.arrival_ns <= last_ns]


def _span_ns(experiment: Experiment) -> tuple[float, float]:
    """Return the times in the trace between which arrivals are scored."""
    requests = experiment.trace.requests
    return (
        requests[0].arrival_ns + experiment.warm_up_s * 1e9,
        requests[-1].arrival_ns - experiment.tail_s * 1e9,
    )


def _is_hopeless(experiment: Experiment, work: IdealWork, answers: Sequence[LabAnswer], now_ps: int) -> bool:
    """Return whether too few requests and too little work can still be good, however the run continues."""
    late = [answer for answer in _measured(experiment, answers) if is_lost(answer, now_ps)]
    counted = _counted(experiment)
    if len(late) <= (1 - experiment.give_up_below) * len(counted):
        return False
    lost_ns = sum(work.ns(each.request.input_tokens, each.request.output_tokens) for each in late)
    all_ns = sum(work.ns(each.input_tokens, each.output_tokens) for each in counted)
    return lost_ns > (1 - experiment.give_up_below) * all_ns


def _typical(experiment: Experiment) -> Slo:
    """Return the SLO of a request of mean lengths."""
    requests = experiment.trace.requests
    mean = sum(each.input_tokens for each in requests) // len(requests)
    return Slo(experiment.ttft_limit_ns(mean), experiment.slo.tpot_ns)


def _gateway(policy: Policy, cluster: RivalSetting, experiment: Experiment) -> MakeGateway:
    rival = policy.rival
    mover = rival.mover(cluster) if rival is not None and policy.ours else None
    borrowed = Borrowed(mover, cluster.slo) if mover is not None else None
    if rival is None or policy.ours:
        return lambda workers, virtual: LabGateway(
            workers,
            POLICIES["predicted-ttft"](),
            virtual,
            patience=PATIENCE,
            max_waiting=MAX_WAITING,
            tpot_ns=cluster.slo.tpot_ns,
            planned=policy.planned,
            borrowed=borrowed,
            late_last=policy.late_last,
            wrong=experiment.wrong,
            on_look=policy.on_look,
            lookup_ns=round(experiment.lookup_ms * 1e6),
            tenants=experiment.tenants,
        )
    router = rival.router(cluster)
    return lambda workers, virtual: PushGateway(
        workers,
        virtual,
        rival=rival,
        router=router,
        mover=rival.mover(cluster),
        learner=router if isinstance(router, LearningRouter) else None,
        sequence_mover=rival.sequence_mover(cluster),
        slo=cluster.slo,
    )


def _split(roles: list[tuple[Role, int]]) -> str:
    prefill = sum(role is Role.PREFILL for role, _ in roles)
    return f"{prefill}:{len(roles) - prefill}"
