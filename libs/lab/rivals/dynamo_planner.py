"""Dynamo's planner with a fixed number of GPUs: the replicas that each loop requests for the two pools. Pure.

Read in ai-dynamo 1.6.1 (wheel), dynamo/planner/core: load_scaling.py (`_prefill_load_decision`,
`_decode_load_decision`, `_scale_decision`, `_advance_load_disagg`), throughput_scaling.py (`_throughput_disagg`,
`_compute_prefill_replicas`, `_compute_decode_replicas`), state_machine.py and budget.py
(`guard_disagg_scaling_budget`, `fit_directional_budget_pair`). Optimisation target "sla", mode "disagg", and
`min_gpu_budget` = `max_gpu_budget`, its own setting for a fixed number of GPUs.

Under that setting a pool grows only by what the other gives up: `guard_disagg_scaling_budget` blocks any other
proposal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from libs.lab.rivals.dynamo_performance import DecodeModel, EngineLimits, EngineState, Pass, PrefillModel
from libs.lab.rivals.dynamo_predictors import PredictorName, TrafficForecast

DOWN_SENSITIVITY: Final = 0.8
"""The share of a target that a pool with one engine fewer may use."""
MAX_REPLICA_CHANGE: Final = 8
"""The largest change of a pool by one interval's forecast."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """The numbers of prefill and decode replicas."""

    prefill: int
    decode: int

    def pinned(self, wanted: "ReplicaCounts") -> "ReplicaCounts":
        """Return `wanted` limited to exchanges between the pools, which keep the total constant."""
        up = wanted.prefill - self.prefill
        moved = min(abs(up), abs(wanted.decode - self.decode)) if up * (wanted.decode - self.decode) < 0 else 0
        moved = moved if up > 0 else -moved
        return ReplicaCounts(self.prefill + moved, self.decode - moved)


@dataclass(frozen=True, slots=True)
class ServiceTargets:
    ttft_s: float
    itl_s: float


class DynamoPlanner:
    """Both loops of the planner; the caller chooses which of them run. Observations come first, then a decision."""

    def __init__(self, limits: EngineLimits, targets: ServiceTargets, predictor: PredictorName) -> None:
        self._limits = limits
        self._targets = targets
        self._prefill = PrefillModel(limits)
        self._decode = DecodeModel(limits)
        self._forecast = TrafficForecast(predictor)
        self._floor = ReplicaCounts(1, 1)

    def observe(self, prefill: Sequence[Pass], decode: Sequence[Pass]) -> None:
        """Add the last step of each engine, or points of a profile."""
        for step in prefill:
            self._prefill.observe(step)
        for step in decode:
            self._decode.observe(step)

    def load(self, prefill: Sequence[EngineState], decode: Sequence[EngineState]) -> ReplicaCounts:
        """Return the replicas for the present load: one more, one fewer or as many, and no fewer than the floor."""
        current = ReplicaCounts(len(prefill), len(decode))
        wanted = ReplicaCounts(
            max(current.prefill + self._prefill_change(prefill), self._floor.prefill, 1),
            max(current.decode + self._decode_change(decode), self._floor.decode, 1),
        )
        return current.pinned(wanted)

    def throughput(
        self, current: ReplicaCounts, *, requests: float, input_tokens: float, output_tokens: float, interval_s: float
    ) -> ReplicaCounts:
        """Return the replicas that the next interval needs, given the traffic of the last one. NaN means unknown."""
        self._forecast.add(requests, input_tokens, output_tokens)
        predicted, input_tokens, output_tokens = self._forecast.next()
        rates = self._capacity_rps(input_tokens, output_tokens)
        if rates is None:
            return current
        demand_rps = predicted / interval_s
        wanted = ReplicaCounts(
            _capped(ceil(demand_rps / rates[0]), current.prefill), _capped(ceil(demand_rps / rates[1]), current.decode)
        )
        total = current.prefill + current.decode
        # A floor below the present count is accepted. Above it, the pool gets only replicas that the other one gives
        # up.
        return wanted if wanted.prefill + wanted.decode <= total else current.pinned(wanted)

    def set_floor(self, floor: ReplicaCounts) -> None:
        """Set the lower limit of the load loop."""
        self._floor = floor

    def _capacity_rps(self, input_tokens: float, output_tokens: float) -> tuple[float, float] | None:
        if input_tokens <= 0 or output_tokens <= 0:
            return None
        prefill = self._prefill.capacity_rps(input_tokens, self._targets.ttft_s)
        decode = self._decode.capacity_rps(input_tokens, output_tokens, self._targets.itl_s)
        return (prefill, decode) if prefill and decode else None

    def _prefill_change(self, engines: Sequence[EngineState]) -> int:
        if not self._prefill.ready or not engines:
            return 0
        shrunk = len(engines) / (len(engines) - 1) if len(engines) > 1 else 1.0
        over, spare = True, len(engines) > 1
        for engine in engines:
            ttft_s, own_s = self._prefill.ttft_s(engine), self._prefill.ttft_s(engine, 0.0)
            after_s = self._prefill.ttft_s(engine, shrunk)
            if ttft_s is None or own_s is None or after_s is None:
                return 0
            over = over and ttft_s > self._targets.ttft_s
            spare = spare and after_s - own_s < (self._targets.ttft_s - own_s) * DOWN_SENSITIVITY
        return 1 if over else -1 if spare else 0

    def _decode_change(self, engines: Sequence[EngineState]) -> int:
        if not self._decode.ready or not engines:
            return 0
        shrunk = len(engines) / (len(engines) - 1) if len(engines) > 1 else 1.0
        over, spare = True, len(engines) > 1
        for engine in engines:
            itl_s, after_s = self._decode.itl_s(engine), self._decode.itl_s(engine, shrunk)
            if itl_s is None or after_s is None:
                return 0
            over = over and itl_s > self._targets.itl_s
            holds = int(engine.decode_kv_tokens * shrunk) < self._limits.kv_tokens
            spare = spare and holds and after_s < self._targets.itl_s * DOWN_SENSITIVITY
        return 1 if over else -1 if spare else 0


def _capped(replicas: int, current: int) -> int:
    return max(1, min(max(replicas, current - MAX_REPLICA_CHANGE), current + MAX_REPLICA_CHANGE))
