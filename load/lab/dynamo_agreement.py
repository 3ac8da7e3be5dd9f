"""`python -m load.lab.dynamo_agreement`: how often our port of Dynamo's planner decides as the wheel's own Python.

By hand, in an environment of its own: ai-dynamo and ai-dynamo-runtime 1.6.1 without their dependencies, then numpy,
pandas, scikit-learn, pmdarima, prophet, filterpy, pydantic, msgspec, prometheus-client, prometheus-api-client, aiohttp,
pyyaml and kubernetes below 33. Both get the same random telemetry, look by look.

The wheel asks aisimulate_core, a library in Rust, for the time of a step. `--estimator aisimulate` leaves that to it:
the release that the wheel wants is a stub that fetches the library from another index, but its pre-release
0.13.0.dev202610270000000085 is a whole wheel (without dependencies it is enough). `--estimator wheel`, the default,
puts the regressions in its place that the wheel itself still ships (prefill.py, decode.py).

The wheel may leave one GPU of a pinned budget idle; such a decision counts as the same where both move the same number
of replicas, and by itself as `exact` only where nothing was idle. stdout: one line a setting, then one JSON object.
"""

import argparse
import json
import logging
import random
import sys
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from libs.lab.rivals.dynamo_performance import EngineLimits, EngineState, Pass
from libs.lab.rivals.dynamo_planner import DynamoPlanner, ReplicaCounts, ServiceTargets
from libs.lab.rivals.dynamo_predictors import PredictorName

LIMITS: Final = EngineLimits(chunk_tokens=8192, max_sequences=256, kv_tokens=400_000)
TARGETS: Final = ServiceTargets(ttft_s=1.0, itl_s=0.05)
WORKERS: Final = 16
LOOKS_AN_INTERVAL: Final = 6
"""Fewer than the 36 of the shipped intervals, so that the throughput loop decides often."""
SETTINGS: Final[tuple[tuple[str, PredictorName], ...]] = (
    ("load", "constant"),
    ("throughput", "constant"),
    ("throughput", "kalman"),
    ("both", "constant"),
    ("both", "kalman"),
)


@dataclass
class _Config:
    """Stands for aisimulate_core's ForwardPassPerfModelConfig; only the worker's type is read back."""

    model: str = ""
    system: str = ""
    backend: str = ""
    worker_type: str = ""
    estimation_mode: str = ""
    tp: int = 1
    pp: int = 1
    estimator_config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_legacy_engine_config(cls, *_: object) -> "_Config":
        return cls()


class _StepModel:
    """Stands for aisimulate_core's RustForwardPassPerfModel: the wheel's own regressions behind its interface."""

    def __init__(self, worker_type: str) -> None:
        models = import_module("dynamo.planner.core.perf_model")
        self._prefill = worker_type == "prefill"
        self._model = (models.PrefillRegressionModel if self._prefill else models.DecodeRegressionModel)(64)

    @classmethod
    def best_available(cls, config: dict[str, Any]) -> "_StepModel":
        return cls(config["worker_type"])

    def tune_with_fpms(self, iterations: list[list[dict[str, Any]]]) -> None:
        metrics = import_module("dynamo.common.forward_pass_metrics")
        convert = import_module("msgspec").convert
        for ranks in iterations:
            for rank in ranks:
                self._model.add_observation(convert(rank, metrics.ForwardPassMetrics))

    def diagnostics(self) -> dict[str, Any]:
        ready = self._model.has_sufficient_data()
        return {"readiness": "ready" if ready else "cold", "retained_observations": self._model.num_observations}

    def estimate_forward_pass_time_ms(self, ranks: list[dict[str, Any]]) -> float | None:
        if not self._model._ensure_fitted():
            return None
        scheduled = ranks[0]["scheduled_requests"]
        if self._prefill:
            return float(self._model._predict_wall_time(scheduled["sum_prefill_tokens"])) * 1000
        kv_tokens = scheduled["sum_decode_kv_tokens"]
        return float(self._model._predict_2d(scheduled["num_decode_requests"], kv_tokens)) * 1000


class Wheel:
    """The wheel's planner state and predictors, with telemetry and decisions in this project's types."""

    def __init__(self, loops: str, predictor: PredictorName) -> None:
        planner_config = import_module("dynamo.planner.config.planner_config")
        self._types = import_module("dynamo.planner.core.types")
        self._metrics = import_module("dynamo.common.forward_pass_metrics")
        config = planner_config.PlannerConfig(
            mode="disagg",
            optimization_target="sla",
            enable_load_scaling=loops != "throughput",
            enable_throughput_scaling=loops != "load",
            load_predictor=predictor,
            ttft_ms=TARGETS.ttft_s * 1000,
            itl_ms=TARGETS.itl_s * 1000,
            min_gpu_budget=WORKERS,
            max_gpu_budget=WORKERS,
        )
        engine = self._types.EngineCapabilities(
            num_gpu=1,
            max_num_batched_tokens=LIMITS.chunk_tokens,
            max_num_seqs=LIMITS.max_sequences,
            max_kv_tokens=LIMITS.kv_tokens,
        )
        capabilities = self._types.WorkerCapabilities(prefill=engine, decode=engine)
        self._state = import_module("dynamo.planner.core.state_machine").PlannerScalingState(config, capabilities)
        self._predict = import_module("dynamo.planner.plugins.builtins.local_planner").BuiltinLoadPredict(
            config, capabilities
        )

    def look(
        self, prefill: list[EngineState], decode: list[EngineState], traffic: tuple[float, ...] | None, loops: str
    ) -> ReplicaCounts:
        """Replicas after a look."""
        current = ReplicaCounts(len(prefill), len(decode))
        seen = self._types.FpmObservations(
            prefill={(f"p{index:02}", 0): self._telemetry(each) for index, each in enumerate(prefill)},
            decode={(f"d{index:02}", 0): self._telemetry(each) for index, each in enumerate(decode)},
        )
        self._state.begin_tick()
        counts = self._types.WorkerCounts(ready_num_prefill=current.prefill, ready_num_decode=current.decode)
        self._state.observe_worker_counts(counts)
        self._state.observe_fpm(seen)
        decision = None
        if traffic is not None and loops != "load":
            decision = self._throughput(traffic)
        if loops != "throughput":
            decision = self._state.advance_load(seen)
        if decision is None:
            return current
        return ReplicaCounts(
            current.prefill if decision.num_prefill is None else decision.num_prefill,
            current.decode if decision.num_decode is None else decision.num_decode,
        )

    def _throughput(self, traffic: tuple[float, ...]) -> Any:
        requests, input_tokens, output_tokens, interval_s = traffic
        observed = self._types.TrafficObservation(interval_s, requests, input_tokens, output_tokens)
        self._predict._observe_traffic(observed)
        predicted = self._predict._predict_load()
        return self._state.advance_throughput_from_prediction(
            observed,
            predicted_num_req=predicted[0],
            predicted_isl=predicted[1],
            predicted_osl=predicted[2],
            predicted_kv_hit_rate=None,
        )

    def _telemetry(self, engine: EngineState) -> Any:
        last = engine.last
        return self._metrics.ForwardPassMetrics(
            version=self._metrics.FPM_VERSION,
            wall_time=last.wall_s,
            scheduled_requests=self._metrics.ScheduledRequestMetrics(
                num_prefill_requests=last.prefill_sequences,
                sum_prefill_tokens=last.prefill_tokens,
                num_decode_requests=last.decode_sequences,
                sum_decode_kv_tokens=last.decode_kv_tokens,
            ),
            queued_requests=self._metrics.QueuedRequestMetrics(
                num_prefill_requests=int(engine.queued_prefill_tokens > 0),
                sum_prefill_tokens=engine.queued_prefill_tokens,
                num_decode_requests=engine.decode_sequences - last.decode_sequences,
                sum_decode_kv_tokens=engine.decode_kv_tokens - last.decode_kv_tokens,
            ),
        )


def random_engines(chance: random.Random, prefill: int, decode: int, load: float) -> Any:
    """(prefill, decode) engines under a load of about 0 to 2; a few prefill engines are idle."""

    def prefill_engine() -> EngineState:
        queued = int(chance.uniform(0.7, 1.3) * load * 22_000)
        if chance.random() < 0.05:
            return EngineState(Pass(), queued)
        tokens = chance.randint(200, LIMITS.chunk_tokens)
        wall_s = (0.004 + tokens * 4e-5) * chance.gauss(1, 0.05)
        return EngineState(Pass(wall_s, prefill_sequences=chance.randint(1, 4), prefill_tokens=tokens), queued)

    def decode_engine() -> EngineState:
        batch = min(int(chance.uniform(0.4, 1.2) * load * 120), LIMITS.max_sequences)
        if not batch:
            return EngineState(Pass())
        kv_tokens = batch * chance.randint(500, 2500)
        wall_s = (0.012 + batch * 5e-5 + kv_tokens * 1.2e-7) * chance.gauss(1, 0.05)
        waiting = chance.randint(0, 8) if load > 1 else 0
        step = Pass(wall_s, decode_sequences=batch, decode_kv_tokens=kv_tokens)
        return EngineState(step, 0, batch + waiting, kv_tokens + waiting * 1500)

    return [prefill_engine() for _ in range(prefill)], [decode_engine() for _ in range(decode)]


def agreement(loops: str, predictor: PredictorName, looks: int, seed: int) -> dict[str, float]:
    """Shares of looks at which both decide the same, of those that decide and of those at which either moves."""
    chance = random.Random(seed)
    wheel, port = Wheel(loops, predictor), DynamoPlanner(LIMITS, TARGETS, predictor)
    decided = same = exact = moved = moved_alike = 0
    prefill_load = 1.0
    for look in range(looks):
        prefill_load = min(max(prefill_load + chance.gauss(0, 0.4), 0.0), 2.0)
        decode_load = min(max(2 - prefill_load + chance.gauss(0, 0.4), 0.0), 2.0)
        count = chance.randint(1, WORKERS - 1)
        prefill, _ = random_engines(chance, count, 0, prefill_load)
        _, decode = random_engines(chance, 0, WORKERS - count, decode_load)
        traffic = None
        if look % LOOKS_AN_INTERVAL == LOOKS_AN_INTERVAL - 1:
            requests = float(chance.randint(0, 1) and chance.randint(50, 6000))
            lengths = (chance.uniform(200, 12_000), chance.uniform(20, 800)) if requests else (0.0, 0.0)
            traffic = (requests, *lengths, 30.0)
        theirs = wheel.look(prefill, decode, traffic, loops)
        ours = _port_look(port, prefill, decode, traffic, loops)
        current = ReplicaCounts(len(prefill), len(decode))
        if loops == "throughput" and traffic is None:
            continue
        decided += 1
        alike = current.pinned(theirs) == ours
        moves = current != theirs or current != ours
        same += alike
        exact += theirs == ours
        moved += moves
        moved_alike += alike and moves
    shares = {"same": same / decided, "exact": exact / decided, "same_of_moved": moved_alike / max(moved, 1)}
    return {"looks": decided, "moved": moved, **shares}


def _port_look(
    port: DynamoPlanner,
    prefill: list[EngineState],
    decode: list[EngineState],
    traffic: tuple[float, ...] | None,
    loops: str,
) -> ReplicaCounts:
    current = wanted = ReplicaCounts(len(prefill), len(decode))
    port.observe([each.last for each in prefill], [each.last for each in decode])
    if traffic is not None and loops != "load":
        requests, input_tokens, output_tokens, interval_s = traffic
        wanted = port.throughput(
            current,
            requests=requests,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            interval_s=interval_s,
        )
        port.set_floor(wanted)
    if loops != "throughput":
        wanted = port.load(prefill, decode)
    return current.pinned(wanted)


def main() -> None:
    """Prints the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--estimator", choices=("wheel", "aisimulate"), default="wheel")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.estimator == "wheel":
        sdk: Any = ModuleType("aisimulate_core.sdk")
        sdk.ForwardPassPerfModelConfig, sdk.RustForwardPassPerfModel = _Config, _StepModel
        sys.modules |= {"aisimulate_core": ModuleType("aisimulate_core"), "aisimulate_core.sdk": sdk}
    shares = {}
    for loops, predictor in SETTINGS:
        found = agreement(loops, predictor, options.looks, options.seed)
        shares[f"{loops}, {predictor}"] = found
        print(
            f"{loops:>10} {predictor:>8}: {found['same']:.2%} of {found['looks']} looks,"
            f" {found['same_of_moved']:.2%} of {found['moved']} with moves"
        )
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
