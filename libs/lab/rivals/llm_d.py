"""llm-d: its endpoint picker, and its workload-variant autoscaler, applied to each role separately.

Read in llm-d/llm-d-autoscaling (formerly llm-d-workload-variant-autoscaler) at v0.5.1 (commit b08b1c7, February
2026): internal/engines/analyzers/saturation_v2/analyzer.go, internal/engines/pipeline/cost_aware_optimizer.go and
internal/interfaces/saturation_scaling.go. At commit 88d6832: internal/engines/analyzers/throughput (constants.go,
itl_model.go) with its developer guide, the source of the windows of its queries. Throughput is opt-in: the shipped
configuration lists only saturation. Issue 1005 is the source of the interval of 15 s. The picker's scorers and weights
(prefix 3, queue 2, KV 2) are those of the default profile of the Gateway API inference extension.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from statistics import mean
from typing import Final

from libs.lab.rivals.pools import decode_pool, from_split, paired_moves, prefill_pool, sequences
from libs.lab.rivals.port import (
    Move,
    MoveCost,
    RecentRequests,
    Rival,
    SeenCluster,
    SeenRequest,
    SeenWorker,
)
from libs.policy.roles import Role

LOOK_NS: Final = 15_000_000_000
LENGTHS_LOOKS, RATE_LOOKS, PEAK_LOOKS = 20, 4, 4
"""Windows of the Prometheus queries, in calls of the mover: 5 minutes for lengths, a minute each for arrivals and KV
use.
"""
START_S: Final = 30
PREFIX_WEIGHT: Final = 3.0
QUEUE_WEIGHT: Final = 2.0
KV_WEIGHT: Final = 2.0

KV_SATURATED: Final = 0.80
"""The use of the KV cache at which a replica counts as full."""
QUEUE_SATURATED: Final = 5
"""The number of waiting requests at which a replica's current load counts as its capacity."""
UP_UTILISATION: Final = 0.85
DOWN_UTILISATION: Final = 0.70
CAPACITY_WINDOW: Final = 10
SHORT_OUTPUT_TOKENS: Final = 100
MEDIUM_OUTPUT_TOKENS: Final = 500

ITL_WINDOW: Final = 20
ITL_SAMPLES: Final = 10
ITL_SPREAD: Final = 0.30
ITL_LEAST_USE: Final = 0.15
ITL_MOST_USE: Final = 0.85
ITL_BASE_S: Final = 0.006
"""The ITL at zero KV use until there is enough data to fit it."""
ITL_AGE_NS: Final = 1_800_000_000_000
LEAST_SLOPE_S: Final = 1e-12
SHAPE_TOLERANCE: Final = 0.20
"""The relative change of mean lengths beyond which the fit starts anew."""


def kv_use(worker: SeenWorker) -> float:
    """Return the share of the worker's KV cache that its sequences hold."""
    return min(worker.kv_tokens / (worker.kv_blocks * worker.block_tokens), 1.0)


def waiting(worker: SeenWorker) -> int:
    """Return the number of waiting requests. In role prefill the first one is being computed and does not count."""
    return max(worker.prompts - 1, 0) if worker.role == Role.PREFILL else worker.queued_decodes


class PickerRouter:
    """A router to the highest weighted score of cached prefix, short queue and free KV."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        return self._best(prefill_pool(workers), request)

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        return self._best(decode_pool(workers), request)

    def _best(self, pool: Sequence[SeenWorker], request: SeenRequest) -> int:
        queues = [waiting(each) for each in pool]
        shortest, longest = min(queues), max(queues)

        def score(worker: SeenWorker) -> tuple[float, int, int]:
            prefix = request.cached_tokens[worker.index] / request.input_tokens
            queue = (longest - waiting(worker)) / (longest - shortest) if longest > shortest else 1.0
            total = PREFIX_WEIGHT * prefix + QUEUE_WEIGHT * queue + KV_WEIGHT * (1 - kv_use(worker))
            return total, -worker.prompts - sequences(worker), -worker.index

        return max(pool, key=score).index


@dataclass(frozen=True, slots=True)
class Balance:
    """The capacity of a role and the demand on it, in tokens or tokens per second."""

    per_replica: float
    replicas: int
    """The number of replicas that are ready to serve."""
    pending: int
    demand: float

    @property
    def missing(self) -> int:
        """Replicas to add for a utilisation of 0.85, not counting those that are starting."""
        required = self.demand / UP_UTILISATION - (self.replicas + self.pending) * self.per_replica
        return ceil(required / self.per_replica) if required > 0 and self.per_replica > 0 else 0

    @property
    def spare(self) -> int:
        """Replicas that can be removed with utilisation at 0.70 at most."""
        rest = self.replicas * self.per_replica - self.demand / DOWN_UTILISATION
        return floor(rest / self.per_replica) if rest > 0 and self.per_replica > 0 else 0


@dataclass(slots=True)
class ReplicaSaturation:
    """An estimate of replica capacity in KV tokens, bounded by memory and by the load at which requests queued."""

    _held: dict[str, deque[float]] = field(default_factory=dict)
    """KV tokens held while requests queued, by bucket of output lengths."""

    def balance(self, pool: Sequence[SeenWorker], pending: int, shape: "RequestShape") -> Balance:
        """Return the balance of one role's ready replicas."""
        capacities = sorted(self._capacity(worker, shape) for worker in pool)
        middle = len(capacities) // 2
        median = capacities[middle] if len(capacities) % 2 else (capacities[middle - 1] + capacities[middle]) / 2
        demand = sum(worker.kv_tokens + waiting(worker) * shape.input_tokens for worker in pool)
        return Balance(median, len(pool), pending, demand)

    def _capacity(self, worker: SeenWorker, shape: "RequestShape") -> float:
        memory = KV_SATURATED * worker.kv_blocks * worker.block_tokens
        held = self._held.setdefault(shape.bucket, deque(maxlen=CAPACITY_WINDOW))
        if waiting(worker) >= QUEUE_SATURATED and worker.kv_tokens:
            held.append(worker.kv_tokens)
            return min(memory, worker.kv_tokens)
        if held:
            return min(memory, mean(held))
        return min(memory, shape.steady_tokens(worker) or memory)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Mean lengths of requests as Prometheus last reported them."""

    input_tokens: float = 0.0
    output_tokens: float = 0.0

    def differs(self, other: "RequestShape") -> bool:
        """Return whether either length is off by more than the tolerance."""
        pairs = ((self.input_tokens, other.input_tokens), (self.output_tokens, other.output_tokens))
        return any(abs(new - old) > SHAPE_TOLERANCE * old for old, new in pairs)

    @property
    def bucket(self) -> str:
        """The class of the mean output: short, medium or long."""
        if self.output_tokens < SHORT_OUTPUT_TOKENS:
            return "short"
        return "medium" if self.output_tokens < MEDIUM_OUTPUT_TOKENS else "long"

    @property
    def request_tokens(self) -> float:
        """The mean KV of a request over its life."""
        return self.input_tokens + self.output_tokens / 2

    def steady_tokens(self, worker: SeenWorker) -> float:
        """Return the KV that a replica holds with steps as full as the chunk allows; 0 without outputs."""
        total = self.input_tokens + self.output_tokens
        if not self.output_tokens:
            return 0.0
        steady = min(worker.speed.chunk_tokens * self.output_tokens / total, worker.max_sequences)
        return steady * self.request_tokens


@dataclass(slots=True)
class DecodeRate:
    """An estimate of decode tokens per second: ITL(k) = A·k + B by least squares over use k of the KV cache."""

    _window: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=ITL_WINDOW))
    """The tuple (time in ns, KV use, ITL in seconds) of each sample."""
    _base_s: float = ITL_BASE_S
    _shape: RequestShape = field(default_factory=RequestShape)

    def balance(
        self, pool: Sequence[SeenWorker], pending: int, shape: RequestShape, arrived_rps: float, now_ns: int
    ) -> Balance | None:
        """Return the balance of the decode role, or None without enough data."""
        self._observe(pool, shape, now_ns)
        itl_s = self._itl_s(pool)
        if itl_s is None or not shape.request_tokens or not shape.output_tokens:
            return None
        kv_tokens = mean(worker.kv_blocks * worker.block_tokens for worker in pool)
        rate = KV_SATURATED * kv_tokens / shape.request_tokens / itl_s
        return Balance(rate, len(pool), pending, arrived_rps * shape.output_tokens)

    def _observe(self, pool: Sequence[SeenWorker], shape: RequestShape, now_ns: int) -> None:
        if shape.differs(self._shape):
            self._window.clear()
            self._shape = shape
        while self._window and now_ns - self._window[0][0] > ITL_AGE_NS:
            self._window.popleft()
        for worker in pool:
            if worker.decode_step_ns and ITL_LEAST_USE <= kv_use(worker) <= ITL_MOST_USE:
                self._window.append((now_ns, kv_use(worker), worker.decode_step_ns / 1e9))

    def _itl_s(self, pool: Sequence[SeenWorker]) -> float | None:
        """Return the ITL at the KV use at which a replica counts as full."""
        points = [(use, itl_s) for _, use, itl_s in self._window]
        uses = [use for use, _ in points]
        if len(points) >= ITL_SAMPLES and max(uses) - min(uses) >= ITL_SPREAD:
            use_mean, itl_mean = mean(uses), mean(itl_s for _, itl_s in points)
            slope = sum((use - use_mean) * (itl_s - itl_mean) for use, itl_s in points)
            slope /= sum((use - use_mean) ** 2 for use in uses)
            base_s = itl_mean - slope * use_mean
            if slope > LEAST_SLOPE_S and slope * KV_SATURATED + base_s > 0:
                self._base_s = base_s
                return slope * KV_SATURATED + base_s
        now = [(kv_use(worker), worker.decode_step_ns / 1e9) for worker in pool if worker.decode_step_ns]
        squares = sum(use * use for use, _ in now)
        slope = sum((itl_s - self._base_s) * use for use, itl_s in now) / squares if squares else 0.0
        itl_s = slope * KV_SATURATED + self._base_s
        return itl_s if slope > LEAST_SLOPE_S and itl_s > 0 else None


@dataclass(slots=True)
class Recent:
    """The figures that Prometheus would return: means over time, and the highest recent use."""

    _intervals: deque[RecentRequests] = field(default_factory=lambda: deque(maxlen=LENGTHS_LOOKS))
    _kv_tokens: dict[int, deque[int]] = field(default_factory=dict)

    def look(self, seen: SeenCluster) -> None:
        self._intervals.append(seen.interval)
        for worker in seen.workers:
            held = self._kv_tokens.setdefault(worker.index, deque(maxlen=PEAK_LOOKS))
            held.append(worker.kv_tokens)
            if not worker.ready:
                held.clear()  # a new replica is a different pod

    def shape(self) -> RequestShape:
        inputs = [(each.mean_input_tokens, max(each.arrived, 1)) for each in self._intervals if each.mean_input_tokens]
        outputs = [(each.mean_output_tokens, max(each.ended, 1)) for each in self._intervals if each.mean_output_tokens]
        return RequestShape(_weighed(inputs), _weighed(outputs))

    def rate_rps(self, look_ns: int) -> float:
        """Return the arrivals per second over the rate window."""
        latest = list(self._intervals)[-RATE_LOOKS:]
        return sum(each.arrived for each in latest) * 1e9 / (len(latest) * look_ns)

    def at_peak(self, pool: Sequence[SeenWorker]) -> list[SeenWorker]:
        """Return the workers with their KV use replaced by its recent maximum."""
        return [replace(each, kv_tokens=max(self._kv_tokens[each.index])) for each in pool]


def _weighed(parts: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts) if parts else 0.0


@dataclass(slots=True)
class AutoscalerMover:
    """A mover by which a role grows if any analysis requests replicas, and shrinks by as many as all analyses can
    spare.
    """

    throughput: bool = False
    """True if the throughput analysis is applied to decode."""
    every_ns: int = LOOK_NS
    wants_steps: bool = False
    _recent: Recent = field(default_factory=Recent)
    _prefill: ReplicaSaturation = field(default_factory=ReplicaSaturation)
    _decode: ReplicaSaturation = field(default_factory=ReplicaSaturation)
    _rate: DecodeRate = field(default_factory=DecodeRate)

    def moves(self, seen: SeenCluster) -> list[Move]:
        """Move the replicas that one role lacks and the other can spare."""
        self._recent.look(seen)
        shape = self._recent.shape()
        prefills, decoders = prefill_pool(seen.workers), decode_pool(seen.workers)
        if not prefills or not decoders:
            return []
        starting = [worker.role for worker in seen.workers if not worker.ready]
        decode_pending = starting.count(Role.MIXED)
        prefill_pending = starting.count(Role.PREFILL)
        prefill = [self._prefill.balance(self._recent.at_peak(prefills), prefill_pending, shape)]
        decode = [self._decode.balance(self._recent.at_peak(decoders), decode_pending, shape)]
        if self.throughput:
            rate_rps = self._recent.rate_rps(self.every_ns)
            by_rate = self._rate.balance(decoders, decode_pending, shape, rate_rps, seen.now_ns)
            decode += [by_rate] if by_rate else []
        return paired_moves(seen.workers, more_prefill=wanted_change(prefill), more_decode=wanted_change(decode))


def wanted_change(balances: Sequence[Balance]) -> int:
    """Return the number of replicas that a role needs in addition, or can spare (below 0)."""
    missing = max(balance.missing for balance in balances)
    return missing or -min(balance.spare for balance in balances)


def llm_d(prefill: int = 0, decode: int = 0, start_s: int = START_S, *, throughput: bool = False) -> Rival:
    """Return llm-d starting from this split, or from an even one.

    `start_s` is the time until a new replica serves. `throughput` adds the analysis of decode rates, which is off
    unless a deployment enables it.
    """

    split = f":{prefill}:{decode}" if prefill or decode else ""
    start = "" if start_s == START_S else f":{start_s}"
    return Rival(
        name=f"llm-d{'-throughput' if throughput else ''}{split}{start}",
        source="llm-d/llm-d-autoscaling v0.5.1 (b08b1c7, saturation) and 88d6832 (throughput); default endpoint picker",
        simplified=(
            "llm-d scales each role up and down on its own; under a fixed number of workers a replica moves when one "
            "role misses it and the other can spare it.",
            "The ITL of a replica is the step-time model's for what it holds, not a mean over a minute.",
            "The highest use of KV in a minute is that of the looks in it.",
            "Capacity seen when queueing is remembered for each role by itself; as read it is shared.",
            "The pods' horizontal autoscaler, which delays what the analysis asks for, acts at once.",
            "Input tokens are not reduced by the prefix hit rate.",
            "Every request is disaggregated, and its decode worker is picked at the first token, not before prefill.",
            "Of a role the highest indices are deleted first.",
        ),
        first_roles=from_split(prefill, decode),
        router=lambda _: PickerRouter(),
        mover=lambda _: AutoscalerMover(throughput),
        move_cost=MoveCost(restarts=True, start_ns=start_s * 1_000_000_000),
    )
