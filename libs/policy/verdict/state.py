"""The inputs of a verdict: one model's workers, their work, the resulting pressure in any roles, and the thresholds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np

from libs.policy.pressure import (
    KV_FILL,
    Split,
    Splits,
    WorkerProfile,
    Workload,
    decode_parts,
    most_decodes,
    pressed,
    prompt_speed,
    split,
)
from libs.policy.roles import Role


class Grade(IntEnum):
    """The severity of a figure, ordered so that the minimum of several grades is their conjunction."""

    CLEAR = 0
    HOLD = 1
    """The figure lies between the thresholds: a firing alert continues, and a quiet one stays quiet."""
    FIRE = 2


@dataclass(frozen=True, slots=True)
class Threshold:
    """Thresholds for a figure for which greater is worse; `clear` is below `fire`."""

    fire: float
    clear: float

    def grade(self, value: float) -> Grade:
        if value >= self.fire:
            return Grade.FIRE
        return Grade.CLEAR if value <= self.clear else Grade.HOLD


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """Workers by their present role; slow ones count for less than one, so the counts are fractional."""

    prefill: float
    mixed: float
    """Decode workers, including those with a prompt budget."""
    lending: float
    """The part of `mixed` with a prompt budget."""

    @property
    def workers(self) -> int:
        """The number of whole workers, at least one."""
        return max(round(self.prefill + self.mixed), 1)


@dataclass(frozen=True, slots=True)
class Pressures:
    """The ratio of work to capacity in each phase. Above 1, a queue grows."""

    prefill: float
    batch: float
    """The number of sequences over that of the largest batches that keep TPOT."""
    kv: float
    """The KV that sequences need over the KV that fits."""
    least: Split
    """The split of roles that leaves the least pressure on the worse phase."""
    largest_batch: int
    """The number of sequences that all decode workers together can run within TPOT."""
    kv_room_tokens: int
    """The number of tokens whose KV fits on all decode workers; 0 if there is no bound."""
    sequences: int
    """The number of sequences to decode, including prompts that may soon become such."""
    kv_tokens: int
    """The number of KV tokens that these sequences need."""

    @property
    def decode(self) -> float:
        """The greater of the batch and KV pressures."""
        return max(self.batch, self.kv)

    @property
    def cluster(self) -> float:
        """Return the pressure that the best split of roles would leave."""
        return self.least.pressure


def pressures(engine: WorkerProfile, work: Workload, standing: RoleCounts) -> Pressures:
    """Return the pressures on pools of at least one worker."""
    whole = work.with_held(prompt_speed(engine, work, standing.prefill, standing.mixed, standing.lending))
    batch, kv = decode_parts(engine, whole, standing.mixed)
    context = max(whole.kv_tokens // max(whole.decodes, 1), 1)
    return Pressures(
        prefill=as_roles_stand(engine, work, standing).prompt_pressure,
        batch=batch,
        kv=kv,
        least=least_pressed(engine, work, standing.workers),
        largest_batch=round(most_decodes(engine, work.tpot_ns, context) * standing.mixed),
        kv_room_tokens=round(engine.kv_tokens * KV_FILL * standing.mixed),
        sequences=whole.decodes,
        kv_tokens=whole.kv_tokens,
    )


def as_roles_stand(engine: WorkerProfile, work: Workload, standing: RoleCounts) -> Split:
    """Return the present split, in which workers with a prompt budget count for prompts too."""
    return split(engine, work, standing.prefill, standing.mixed, lending=standing.lending)


def least_pressed(engine: WorkerProfile, work: Workload, workers: int) -> Split:
    """Return the split of `workers` with the least pressure. Decode workers also compute prompts as far as TPOT
    allows.
    """
    prefill = np.arange(workers, dtype=np.float64)
    mixed, same = workers - prefill, 0.0 * prefill
    decodes, kv_tokens = work.decodes + same, work.kv_tokens + same
    prompts, decodes = pressed(engine, work, decodes, kv_tokens, prefill=prefill, mixed=mixed, lent=mixed)
    return Splits(prefill, mixed, prompts, decodes).at(int(np.maximum(prompts, decodes).argmin()))


def fewest_workers(engine: WorkerProfile, work: Workload, workers: int, most: int) -> int | None:
    """Return the smallest number above `workers`, at most `most`, for which some roles leave a pressure of at most 1.

    None means that there is no such number.
    """
    low, high = workers + 1, most
    if high < low or least_pressed(engine, work, high).pressure > 1:
        return None
    while low < high:
        middle = (low + high) // 2
        if least_pressed(engine, work, middle).pressure <= 1:
            high = middle
        else:
            low = middle + 1
    return low


# Prompts are expected to keep arriving at the present rate for this long beyond the deadline of one that arrives now. A
# longer time would mistake bursts for a lasting rate; a shorter one would show a shortage only once prompts are late.
AHEAD_NS: Final = 10_000_000_000
# The nearest horizon: a prompt due within a moment does not need a thousand workers.
LEAST_NS: Final = 250_000_000


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompt work of a model, in nanoseconds of one prefill worker."""

    waiting: tuple[tuple[float, float], ...]
    """Pairs of (ns until the deadline, work) for waiting prompts that can be in time."""
    rate: float
    """Arriving work in ns per ns: the number of workers that it keeps busy."""
    limit_ns: float
    """The usual time from the arrival of a prompt to its deadline."""


def workers_needed(prompts: Prompts) -> tuple[float, float]:
    """Return (workers, horizon in ns) for the horizon that needs the most workers.

    The need at horizon h is the work due by h, waiting or expected, divided by h. Waiting work that is already late
    needs no workers of its own and uses the spare capacity. Between two deadlines the need only falls or moves
    monotonically towards `rate`, so only deadlines and the farthest horizon are checked.
    """
    best, at_ns = 0.0, prompts.limit_ns
    for horizon_ns in _horizons(prompts):
        waiting_work = sum(work for left_ns, work in prompts.waiting if left_ns <= horizon_ns)
        need = (waiting_work + prompts.rate * max(horizon_ns - prompts.limit_ns, 0.0)) / horizon_ns
        if need > best:
            best, at_ns = need, horizon_ns
    return best, at_ns


def _horizons(prompts: Prompts) -> Iterable[float]:
    yield from (max(left_ns, LEAST_NS) for left_ns, _ in prompts.waiting)
    yield max(prompts.limit_ns, LEAST_NS) + AHEAD_NS


# Above 1, work grows into a queue.
PRESSURE: Final = Threshold(1.0, 0.85)
# Learned step times are accurate to a tenth; a host with all cores busy adds a half.
SLOWNESS: Final = Threshold(1.8, 1.4)
KV_WAIT: Final = Threshold(0.2, 0.1)
"""The share of a worker's time in which no step runs while ready KV is in transit to it."""
KV_AWAITED: Final = Threshold(0.75, 0.4)
"""The share of a worker's time in which ready KV is in transit to it, whether or not steps run."""
# KV that arrives sooner after it is ready delays nobody, however often that happens.
KV_AWAITED_S: Final = Threshold(0.5, 0.25)
CPU_WAIT: Final = Threshold(0.25, 0.15)
"""The share of its time in which a worker waits for a CPU. From `fire` its delays accuse neither the worker nor a
link.
"""
# Below this wait per prefill worker there is no queue: prompts are computed as they come.
LEAST_WAIT_S: Final = 0.1
# Below this pressure, the rate of the last seconds may be chance, so it counts only with a queue.
CLEAR_PRESSURE: Final = 1.3
QUEUED_S: Final = 0.75
"""The wait per prefill worker that makes a pressure below CLEAR_PRESSURE count."""
# Sequences stay for seconds, so their number scatters less than the rate of prompts: by a tenth if a hundred decode.
CLEAR_DECODES: Final = 1.1
"""The decode pressure below which a few additional sequences may be chance."""


def in_hand_ns(engine: WorkerProfile, prefill: float) -> float:
    """Return the waiting prompt work, in time of one worker, up to which there is no backlog.

    It is the work of the prefill workers' next step.
    """
    return max(engine.chunk_tokens / engine.chunk_speed, LEAST_WAIT_S * 1e9) * max(prefill, 1.0)


LEAST_PROMPT_NS: Final = 1_000_000_000
"""The minimum time in steps of prompts for a measurement of their speed."""
LEAST_YIELD: Final = 0.5
"""The bound on a measured share of the assumed speed; lower values come from steps with little to do."""


def prompt_yield(tokens: float, took_ns: float, speed: float) -> float:
    """Return the speed of prompts in recent steps as a share of that of full steps; `speed` is in tokens per ns.

    Steps are not full if prompts do not fit together. The share is 1 if too little was computed.
    """
    if took_ns < LEAST_PROMPT_NS or not tokens or not speed:
        return 1.0
    return min(max(tokens / took_ns / speed, LEAST_YIELD), 1.0)


MOST_ENCODE: Final = 0.9
"""The bound on the measured share of encoding; higher values come from moments with few prompts."""


def prompts_part(encode_share: float) -> float:
    """Return the part of a prefill worker's time that encoding leaves to prompts."""
    return 1 - min(encode_share, MOST_ENCODE)


@dataclass(frozen=True, slots=True)
class VerdictLimits:
    """The thresholds of causes and the times for which they must hold."""

    pressure: Threshold = PRESSURE
    slowness: Threshold = SLOWNESS
    kv_wait: Threshold = KV_WAIT
    kv_awaited: Threshold = KV_AWAITED
    kv_awaited_s: Threshold = KV_AWAITED_S
    cpu_wait: Threshold = CPU_WAIT
    for_ns: int = 600_000_000
    """The time for which a cause must last before it is named."""
    slight_for_ns: int = 2_000_000_000
    """The time for which a slight cause must last: prompt pressure below CLEAR_PRESSURE, or decode pressure below
    CLEAR_DECODES.
    """
    # A slow worker has already been observed in two steps that took 0.4 s or more together.
    slow_for_ns: int = 200_000_000
    clear_ns: int = 3_000_000_000
    """The time for which a cause must be gone before it ends."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker that accepts work, over the last two seconds."""

    id: str
    role: Role
    budget_tokens: int
    sequences: int
    """Sequences that the worker decodes or holds to decode."""
    kv_tokens: int
    """The number of KV tokens that the worker's sequences hold."""
    prompt_tokens: int
    """The number of prompt tokens that wait at the worker."""
    slowness: float | None
    """The ratio of the worker's step times to its peers' for equal steps; None if it ran too few."""
    kv_wait: float
    """The share of time in which no step ran while ready KV was in transit to the worker."""
    kv_awaited: float
    """The share of time in which ready KV was in transit to the worker, whether or not steps ran."""
    held_by_link: float
    """The mean number of sequences that waited for ready KV in transit."""
    kv_awaited_s: float = 0.0
    """The mean, over the samples of the window, of the time for which the KV that is awaited longest had been ready."""
    cpu_wait: float | None = None
    """The share of time in which a thread of the worker was ready to run but had no CPU; None if it is not reported."""

    @property
    def takes(self) -> str:
        if self.role is Role.PREFILL:
            return "prefill"
        return "mixed" if self.lends else "decode"

    @property
    def lends(self) -> bool:
        return self.role is Role.MIXED and self.budget_tokens > 0

    @property
    def speed(self) -> float:
        """The number of workers that this worker counts for, below 1 if it is slow."""
        slow = self.slowness or 1.0
        return 1 / slow if slow >= SLOWNESS.fire else 1.0


def role_counts(workers: Iterable[WorkerState]) -> RoleCounts:
    """Sum the speeds of workers by role."""
    prefill = mixed = lending = 0.0
    for each in workers:
        if each.role is Role.PREFILL:
            prefill += each.speed
        else:
            mixed += each.speed
            lending += each.speed * each.lends
    return RoleCounts(prefill, mixed, lending)


class PromisedFigure(StrEnum):
    """A figure that an action promises and that is scored once the action is followed."""

    PRESSURE = "pressure"
    BACKLOG = "backlog"
    """The seconds until the waiting prompts are done."""
    TTFT = "ttft"
    """TTFT p95 in ms of requests that arrive once the backlog is gone."""
    TPOT = "tpot"
    """TPOT p95 in ms of the same requests."""


@dataclass(frozen=True, slots=True)
class PromiseMargin:
    """The margin of a promise, learned from earlier ones."""

    over: float = 1.0
    """The 90th percentile of the observed over the predicted figure, at least 1."""
    under: float = 1.0
    """The 90th percentile of the predicted over the observed figure, at least 1."""
    kept: int = 0
    of: int = 0
    """The number of recent promises, of which `kept` held; 0 while there are too few to judge."""


NO_MARGIN: Final = PromiseMargin()


@dataclass(frozen=True, slots=True)
class Promise:
    """A predicted figure and the range in which it is promised to lie."""

    then: float
    least: float
    most: float

    def widened(self, margin: PromiseMargin) -> "Promise":
        """Return the promise with its range widened according to earlier outcomes."""
        return Promise(self.then, min(self.least, self.then / margin.under), max(self.most, self.then * margin.over))


Margins = Mapping[tuple[str, PromisedFigure], PromiseMargin]
"""Margins by the role that workers take and the figure promised."""


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """A worker that accepts work and should report but does not."""

    id: str
    takes: str
    """The listed role: prefill or decode."""
    silent_s: float


@dataclass(frozen=True, slots=True)
class PodLabel:
    """The label that gives the pods of a Kubernetes namespace their role."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model with enough known for a verdict."""

    model: str
    engine: WorkerProfile
    work: Workload
    standing: RoleCounts
    workers: Sequence[WorkerState]
    pressures: Pressures
    """The pressures on the workers as they are."""
    healthy: Pressures
    """The pressures as they would be without slow workers or links that hold up sequences."""
    horizon_ns: float
    """The horizon at which waiting and expected prompts need the most workers."""
    waiting_tokens: int
    """Prompt tokens of interactive requests, at workers and gateways."""
    running: int
    """Sequences that decode, without those of batch jobs."""
    held: int
    """Sequences that do not decode yet but could soon."""
    queued: int
    """Requests at gateways that wait for a decode place and whose prompts could not be computed soon either."""
    at_rest: bool
    """True if no request of the model runs, waits or arrives."""
    ttft_ns: int
    """The TTFT target that prompts are compared with, as decodes are with `work.tpot_ns`."""
    prompts_error: float = 0.0
    """Relative standard error of the prompts' pressure; few requests per second leave their rate uncertain."""
    arrival_rate: float = 0.0
    """Prompt work that arrives, as the number of workers it keeps busy."""
    arrival_error: float = 0.0
    """The standard error of `arrival_rate`, as a share of it."""
    prompt_speed: float = 0.0
    """The prompt tokens per nanosecond of one prefill worker, for prompts of such lengths; 0 if unknown."""
    prompt_yield: float = 1.0
    """The measured speed of prompts while some wait, as a share of `prompt_speed`."""
    encode_share: float = 0.0
    """The share of the prefill workers' prefill time in which they encode images."""
    prompt_encode_ns: float = 0.0
    """The time that one worker takes to encode the images of a mean prompt."""
    prompt_tokens: float = 0.0
    """The mean length of recent prompts without their cached part; 0 if unknown."""
    output_tokens: float = 0.0
    """The mean length of recent answers; 0 if unknown."""
    margins: Margins = field(default_factory=dict)
    acts: bool = False
    """True if a planner moves the workers by itself, so that no change of roles is advised."""
    foreign: bool = False
    """True for observed servers, which take no commands."""
    pod_label: PodLabel | None = None
    """The label with the role of observed servers that are pods."""
    roles_fixed: bool = False
    """True if no worker can change its role, for example if all servers do both phases."""
    silent: Sequence[SilentWorker] = ()
    by_role: Mapping[str, int] = field(default_factory=dict)
    """Workers that accept work, by role, including silent ones."""

    @property
    def prefill(self) -> int:
        return round(self.standing.prefill)

    @property
    def backlog_s(self) -> float:
        """The time that the prefill workers need for all waiting prompts."""
        return self.work.waiting_ns / 1e9 / max(self.standing.prefill, 1)

    @property
    def has_backlog(self) -> bool:
        return self.work.waiting_ns > in_hand_ns(self.engine, self.standing.prefill)

    @property
    def mixed(self) -> int:
        return round(self.standing.mixed)

    @property
    def lending(self) -> int:
        """The number of decode workers that also compute prompts."""
        return round(self.standing.lending)


@dataclass(frozen=True, slots=True)
class UnknownState:
    """A model with too little known for a verdict."""

    model: str
    why: str
    at_rest: bool
    silent: Sequence[SilentWorker] = ()
    by_role: Mapping[str, int] = field(default_factory=dict)
