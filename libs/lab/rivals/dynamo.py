"""NVIDIA Dynamo 1.6: its KV router, and its planner's load loop, throughput loop, or both.

Planner: see `dynamo_planner`. Router: the cost in lib/kv-router/src/scheduling/selector/default.rs
(`DefaultWorkerScorer::worker_logit`, ai-dynamo/dynamo at commit 07a6c9c), with the defaults of
dynamo/common/configuration/groups/kv_router_args.py in the wheel of 1.6.1 (overlap credit 1, no decay, prefill
scale 1, temperature 0, no queue in the router), and "Disaggregated Serving" in the router's documentation for
1.6.0. The prefill router counts no decode blocks, and the decode router counts neither overlap nor prompt tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from libs.lab.rivals.dynamo_performance import EngineLimits, EngineState, Pass
from libs.lab.rivals.dynamo_planner import DynamoPlanner, ReplicaCounts, ServiceTargets
from libs.lab.rivals.dynamo_predictors import PredictorName
from libs.lab.rivals.pools import decode_pool, from_split, paired_moves, prefill_pool, sequences
from libs.lab.rivals.port import (
    Move,
    MoveCost,
    RecentRequests,
    Rival,
    RivalSetting,
    SeenCluster,
    SeenRequest,
    SeenWorker,
)

LOAD_NS: Final = 5_000_000_000
THROUGHPUT_NS: Final = 180_000_000_000
START_S: Final = 30
PROFILE_CONTEXTS: Final = (1024, 4096, 8192, 16384)
PROFILE_STEPS: Final = 4

Loops = Literal["load", "throughput", "both"]


class KvRouter:
    """Dynamo's router, which minimises the blocks to compute for prompts and the blocks held for decodes."""

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the prefill worker with the fewest prompt blocks, counting the queue and this request but not cached
        blocks.
        """

        def cost_blocks(worker: SeenWorker) -> float:
            overlap = request.cached_tokens[worker.index] // worker.block_tokens
            return max((worker.prompt_tokens + request.input_tokens) / worker.block_tokens - overlap, 0.0)

        return min(prefill_pool(workers), key=lambda each: (cost_blocks(each), each.prompts, each.index)).index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the decode worker that holds the fewest blocks."""
        pool = decode_pool(workers)
        return min(pool, key=lambda each: (-(-each.kv_tokens // each.block_tokens), sequences(each), each.index)).index


@dataclass(slots=True)
class _Traffic:
    """Sums of the traffic over several calls of the mover."""

    looks: int = 0
    arrived: int = 0
    input_tokens: float = 0.0
    ended: int = 0
    output_tokens: float = 0.0

    def add(self, interval: RecentRequests) -> None:
        self.looks += 1
        self.arrived += interval.arrived
        self.input_tokens += interval.arrived * interval.mean_input_tokens
        ended = interval.ended or int(interval.mean_output_tokens > 0)
        self.ended += ended
        self.output_tokens += ended * interval.mean_output_tokens

    @property
    def mean_input_tokens(self) -> float:
        return self.input_tokens / self.arrived if self.arrived else float("nan")

    @property
    def mean_output_tokens(self) -> float:
        return self.output_tokens / self.ended if self.ended else float("nan")


class DynamoMover:
    """Dynamo's planner as a mover: it decides every 5 s, and pauses while a replica starts or leaves."""

    every_ns = LOAD_NS
    wants_steps = True

    def __init__(self, cluster: RivalSetting, loops: Loops, predictor: PredictorName) -> None:
        limits = EngineLimits(
            cluster.speed.chunk_tokens, cluster.max_sequences, cluster.kv_blocks * cluster.block_tokens
        )
        self._planner = DynamoPlanner(
            limits, ServiceTargets(cluster.slo.ttft_ns / 1e9, cluster.slo.tpot_ns / 1e9), predictor
        )
        self._planner.observe(*profile(cluster))
        self._loops = loops
        self._traffic = _Traffic()

    def moves(self, seen: SeenCluster) -> list[Move]:
        """Run the loops, the throughput loop first if its interval has ended.

        That loop sets the load loop's floor, or decides if it runs alone.
        """
        prefill = [_prefill_engine(worker) for worker in prefill_pool(seen.workers)]
        decode = [_decode_engine(worker) for worker in decode_pool(seen.workers)]
        self._planner.observe([engine.last for engine in prefill], [engine.last for engine in decode])
        current = wanted = ReplicaCounts(len(prefill), len(decode))
        self._traffic.add(seen.interval)
        if self._loops != "load" and self._traffic.looks * LOAD_NS >= THROUGHPUT_NS:
            wanted = self._throughput(current)
            self._planner.set_floor(wanted)
        if self._loops != "throughput":
            wanted = self._planner.load(prefill, decode)
        if not all(worker.ready for worker in seen.workers):
            return []
        return paired_moves(
            seen.workers, more_prefill=wanted.prefill - current.prefill, more_decode=wanted.decode - current.decode
        )

    def _throughput(self, current: ReplicaCounts) -> ReplicaCounts:
        traffic, self._traffic = self._traffic, _Traffic()
        return self._planner.throughput(
            current,
            requests=traffic.arrived,
            input_tokens=traffic.mean_input_tokens,
            output_tokens=traffic.mean_output_tokens,
            interval_s=traffic.looks * LOAD_NS / 1e9,
        )


def profile(cluster: RivalSetting) -> tuple[list[Pass], list[Pass]]:
    """Return (prefill, decode) points of a sweep before deployment, computed by the step-time model."""
    speed, kv_tokens = cluster.speed, cluster.kv_blocks * cluster.block_tokens
    chunks = [speed.chunk_tokens * part // 16 for part in range(1, 17)]
    prefill = [
        Pass(speed.prompt_ns(tokens, tokens**2) / 1e9, prefill_sequences=1, prefill_tokens=tokens)
        for tokens in chunks
        if tokens
    ]
    decode = []
    for context, part in product(PROFILE_CONTEXTS, range(1, PROFILE_STEPS + 1)):
        batch = min(cluster.max_sequences, kv_tokens // context) * part // PROFILE_STEPS
        if batch:
            step_s = speed.decode_ns(batch, batch * context) / 1e9
            decode.append(Pass(step_s, decode_sequences=batch, decode_kv_tokens=batch * context))
    return prefill, decode


def _prefill_engine(worker: SeenWorker) -> EngineState:
    last = next(((work, ns) for work, ns in reversed(worker.steps) if work.prefill_tokens), None)
    if last is None:
        return EngineState(Pass(), worker.prompt_tokens)
    work, ns = last
    step = Pass(ns / 1e9, prefill_sequences=work.prefill_sequences, prefill_tokens=work.prefill_tokens)
    return EngineState(step, worker.prompt_tokens)


def _decode_engine(worker: SeenWorker) -> EngineState:
    last = next(((work, ns) for work, ns in reversed(worker.steps) if work.decode_sequences), None)
    step = Pass()
    if last is not None:
        work, ns = last
        step = Pass(ns / 1e9, decode_sequences=work.decode_sequences, decode_kv_tokens=work.decode_kv_tokens)
    return EngineState(step, decode_sequences=sequences(worker), decode_kv_tokens=worker.kv_tokens)


SIMPLIFIED: Final = (
    "Step times are the two linear fits that the wheel ships in Python (prefill.py, decode.py), with its buckets of "
    "samples; the installed planner asks aisimulate_core, a library in Rust, in its mode fpm_regression. "
    "docs/results/lab-fidelity.md says how often that decides differently.",
    "Queued prompt tokens include what is left of prompts that are being computed; prefix hits are taken off when a "
    "prompt is bound, not by the router's hit rate.",
    "The GPU budget is pinned exactly: where the shipped tolerance of one GPU would leave one idle, it stays.",
    "While any replica starts or leaves nothing moves. As shipped, a pinned budget has the same effect.",
    "Of a pool the highest indices are deleted first.",
    "The profile before deployment is swept over the step-time model instead of aiconfigurator's tables.",
    "The router counts a request's generated tokens as blocks held and breaks ties by load, not by chance.",
    "The throughput loop predicts with the constant or the Kalman predictor; ARIMA, the default, and Prophet search "
    "over models with libraries of their own.",
)


def dynamo(
    loops: Loops, prefill: int = 0, decode: int = 0, start_s: int = START_S, predictor: PredictorName = "kalman"
) -> Rival:
    """Return Dynamo starting from this split, or from an even one.

    `start_s` is the time until a new replica serves.
    """

    split = f":{prefill}:{decode}" if prefill or decode else ""
    start = "" if start_s == START_S else f":{start_s}"
    return Rival(
        name=f"dynamo-{loops}{split}{start}",
        source="ai-dynamo 1.6.1 (wheel): dynamo/planner/core; ai-dynamo/dynamo: lib/kv-router selector/default.rs",
        simplified=SIMPLIFIED,
        first_roles=from_split(prefill, decode),
        router=lambda _: KvRouter(),
        mover=lambda cluster: DynamoMover(cluster, loops, predictor),
        move_cost=MoveCost(restarts=True, start_ns=start_s * 1_000_000_000),
    )
