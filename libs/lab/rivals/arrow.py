"""Arrow, as shipped in xllm-service: prompts spill over to decode instances, and instances change sides at once.

Read at commit c8033e0 (April 2026) of jd-opensource/xllm-service: `InstanceMgr::select_instance_pair_on_slo`,
`flip_prefill_to_decode`, `flip_decode_to_prefill` and `update_request_metrics` in
xllm_service/scheduler/managers/instance_mgr.cpp, xllm_service/common/time_predictor.cpp, and the targets' defaults
in xllm_service/common/global_gflags.cpp (TTFT 1,000 ms, TPOT 50 ms). The paper is arXiv 2505.11916 (Wu et al.,
2025). Where the two differ, this follows the shipped code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from libs.lab.rivals.pools import decode_pool, from_split, prefill_pool, sequences
from libs.lab.rivals.port import (
    Move,
    Rival,
    SeenCluster,
    SeenRequest,
    SeenWorker,
    Slo,
)
from libs.policy.roles import Role

LOOK_NS: Final = 50_000_000
"""The mover's interval. The real service decides at each request instead."""


def tpot_with_one_more_ns(worker: SeenWorker, input_tokens: float) -> float:
    """Return the TPOT with one more request of `input_tokens`: a + b·batch + c·tokens."""
    return worker.speed.decode_ns(sequences(worker) + 1, worker.kv_tokens + input_tokens)


def least(workers: Sequence[SeenWorker], input_tokens: float) -> tuple[SeenWorker, float]:
    """Return the worker whose TPOT stays lowest with one more request, and that TPOT in ns."""
    tpots = ((each, tpot_with_one_more_ns(each, input_tokens)) for each in workers)
    return min(tpots, key=lambda pair: (pair[1], pair[0].index))


@dataclass(frozen=True, slots=True)
class ArrowRouter:
    """A router by predicted prefill backlog and predicted TPOT."""

    target: Slo

    def prompt(self, request: SeenRequest, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the prefill instance with the least backlog; if that exceeds the TTFT target, a sufficiently idle
        decode instance.
        """
        source = min(prefill_pool(workers), key=lambda each: (each.backlog_ns, each.index))
        decoders = decode_pool(workers)
        if source.backlog_ns <= self.target.ttft_ns or not decoders:
            return source.index
        first = self._first_that_meets(decoders, request)
        lowest, tpot_ns = least(decoders, request.input_tokens)
        idle_enough = tpot_ns < self.target.tpot_ns * (len(decoders) - 1) / len(decoders)
        spills = first is not lowest and idle_enough and lowest.backlog_ns < source.backlog_ns
        return lowest.index if spills and lowest.budget_tokens else source.index

    def decode(self, request: SeenRequest, source: int, workers: Sequence[SeenWorker], now_ns: int) -> int:
        """Return the first instance that stays within the TPOT target, or the one with the lowest TPOT."""
        decoders = decode_pool(workers)
        first = self._first_that_meets(decoders, request)
        return (first or least(decoders, request.input_tokens)[0]).index

    def _first_that_meets(self, decoders: Sequence[SeenWorker], request: SeenRequest) -> SeenWorker | None:
        target_ns = self.target.tpot_ns
        meets = (each for each in decoders if tpot_with_one_more_ns(each, request.input_tokens) <= target_ns)
        return next(meets, None)


@dataclass(slots=True)
class ArrowMover:
    """A mover that flips one prefill instance when no decode instance meets TPOT, and decode instances once they are
    empty.
    """

    target: Slo
    budget_tokens: int
    """The prompt budget of decode instances, for prompts that spill over to them."""
    every_ns: int = LOOK_NS
    wants_steps: bool = False
    _decoded: set[int] = field(default_factory=set)
    """Indices of the decode instances that had sequences at the previous call."""

    def moves(self, seen: SeenCluster) -> list[Move]:
        """Move emptied decode instances to prefill, then at most one prefill instance to decode."""
        prefills, decoders = prefill_pool(seen.workers), decode_pool(seen.workers)
        emptied = self._emptied(decoders)
        self._decoded = {each.index for each in decoders if sequences(each)}
        moves = [Move(each.index, Role.PREFILL, 0, "decode emptied") for each in emptied]
        left = [each for each in decoders if each not in emptied]
        if self._wants_decoder(prefills, left, len(prefills) + len(emptied), seen) and len(prefills) > 1:
            flips = min(prefills, key=lambda each: (each.backlog_ns, each.index))
            moves.append(Move(flips.index, Role.MIXED, self.budget_tokens, "no decode meets TPOT"))
        return moves

    def _emptied(self, decoders: Sequence[SeenWorker]) -> list[SeenWorker]:
        empty = [each for each in decoders if each.index in self._decoded and not sequences(each) and not each.prompts]
        return empty[: len(decoders) - 1]

    def _wants_decoder(
        self, prefills: Sequence[SeenWorker], decoders: Sequence[SeenWorker], prefill_count: int, seen: SeenCluster
    ) -> bool:
        if not seen.interval.arrived or not prefills or not decoders:
            return False
        if least(decoders, seen.interval.mean_input_tokens)[1] <= self.target.tpot_ns:
            return False
        mean_ns = sum(each.backlog_ns for each in prefills) / prefill_count
        return mean_ns < self.target.ttft_ns * (prefill_count - 1) / prefill_count or len(decoders) < prefill_count


def arrow(prefill: int = 0, decode: int = 0) -> Rival:
    """Return Arrow starting from this split, or from an even one if no numbers are given."""
    return Rival(
        name=f"arrow:{prefill}:{decode}" if prefill or decode else "arrow",
        source="jd-opensource/xllm-service, commit c8033e0: instance_mgr.cpp, time_predictor.cpp, global_gflags.cpp",
        simplified=(
            "Its TTFT and TPOT predictors are the step-time model, not fits to profiled points rounded to whole "
            "milliseconds; a backlog shrinks with each step instead of when a prompt is done.",
            "A prompt that spilled over decodes where it was computed; the service decodes it at another instance.",
            f"Flips are decided every {LOOK_NS // 1_000_000} ms for the interval's mean prompt, at most one from "
            "prefill to decode, not at each request.",
            "The first instance that meets TPOT is the first by index, not by when it joined the pool.",
        ),
        first_roles=from_split(prefill, decode, None),
        router=lambda cluster: ArrowRouter(cluster.slo),
        mover=lambda cluster: ArrowMover(cluster.slo, cluster.speed.chunk_tokens),
        binds_at_arrival=True,
    )
