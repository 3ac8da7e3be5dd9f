"""`make bench-models-live`: serve many models on few simulated GPUs of a whole suite, under generated requests.

Time is compressed. Arrivals, step times and load times are `SPEED` times as fast, and so are the planner's turn and
window. The network, the processes and the planner's other periods have their real speed. A client that gets 503 repeats
its request after Retry-After. Two predictions are checked. The wait in each answer's header is compared with the time
to its first token, minus that of the model's answers without a wait. Retry-After is compared with the second try.
"""

import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from libs.lab.models.generate import generate_usage
from libs.lab.models.usage import UsageLog, use_by_window
from libs.perfmodel.profiles import profile
from libs.testing.suites.suite import RunningSuite
from load.measure import bench_parser
from load.setup import bench_suite

# Steps of some 50 ms, so that two cores are enough for all processes.
PROFILE: Final = "smollm2-135m-cpu"
WAIT_HEADER: Final = "x-fulcrum-expected-wait-ms"
MAX_TRIES: Final = 6
REQUEST_TIMEOUT_S: Final = 180.0
POLL_S: Final = 0.5
# The fields of the planner's report that are recorded.
KEPT: Final = ("active_now", "switches", "cold_starts", "switched_s", "at_once", "reserve_gpus", "windows")
MINUTE_S: Final = 60.0
NEAR_S: Final = 0.5
# A wait counts as predicted if its error is within `NEAR_S` or this share.
NEAR_SHARE: Final = 0.25


@dataclass(slots=True)
class Outcome:
    model: str
    at_s: float
    statuses: list[int] = field(default_factory=list)
    expected_s: float = 0.0
    """The wait that the answer's header predicted; 0 for none."""
    first_s: float = 0.0
    """The seconds from sending the answered try to its first token."""
    tokens: int = 0
    wanted: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error and self.tokens == self.wanted


MODELS: Final = 40
GPUS: Final = 8
# The factor by which requests are sent faster than generated.
SPEED: Final = 6.0
# The requests a second of one model, and the mean seconds that a request runs.
RATE_RPS, EXEC_S = 0.012, 8.0
TURN_S: Final = 10.0
COLD_COST_GPU_S: Final = 300.0
# The memory of each worker for sleeping models.
HOST_GB: Final = 64
# Every duration is compressed by `SPEED`.
SETTINGS: Final = {
    "FULCRUM_PLANNER_MODE": "auto",
    "FULCRUM_PLANNER_MODELS_TURN_S": str(TURN_S / SPEED),
    "FULCRUM_PLANNER_MODELS_WINDOW_S": str(max(MINUTE_S / SPEED, 1.0)),
    "FULCRUM_PLANNER_MODELS_COLD_COST_GPU_S": str(COLD_COST_GPU_S / SPEED),
    "FULCRUM_WORKER_SIM_PROFILE": PROFILE,
    "FULCRUM_WORKER_SIM_SPEEDUP": str(SPEED),
    "FULCRUM_WORKER_HOST_MEMORY_MB": str(HOST_GB * 1000),
    "FULCRUM_WORKER_TELEMETRY_MS": "300",
    "FULCRUM_GATEWAY_SILENT_AFTER_MS": "5000",
    "FULCRUM_GATEWAY_MAX_SILENT_MS": "20000",
}


async def ask(client: httpx.AsyncClient, url: str, found: Outcome) -> None:
    """Send a request. Repeat it after 503 or 429, as long as the response has Retry-After."""
    body = {"model": found.model, "prompt": "a b c d", "max_tokens": found.wanted, "stream": True, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    for _ in range(MAX_TRIES):
        found.error, began_s = "", time.monotonic()
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                found.statuses.append(answer.status_code)
                if answer.status_code == httpx.codes.OK:
                    found.expected_s = float(answer.headers.get(WAIT_HEADER, 0)) / 1000
                    await _read(answer, found, began_s)
                    return
                found.error = (await answer.aread()).decode()[:200]
                back_s = float(answer.headers.get("retry-after", 0))
        except httpx.HTTPError as error:
            found.statuses.append(0)
            found.error, back_s = repr(error), 0.0
        if not back_s:
            return
        await asyncio.sleep(back_s)


async def _read(answer: httpx.Response, found: Outcome, began_s: float) -> None:
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        value = json.loads(line[6:])
        if value.get("choices") and not found.first_s:
            found.first_s = time.monotonic() - began_s
        if "error" in value:
            found.error = json.dumps(value["error"])
        if value.get("usage"):
            found.tokens = value["usage"]["completion_tokens"]


async def play(url: str, log: UsageLog) -> list[Outcome]:
    """Send all requests of the log at their times, and return their outcomes."""
    step_ns = profile(PROFILE).step_time.decode_fixed_ns + profile(PROFILE).step_time.decode_sequence_ns
    outcomes, tasks = [], []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:
        began_s = time.monotonic()
        for at_s, place, exec_s in zip(log.t_s.tolist(), log.model.tolist(), log.exec_s.tolist(), strict=True):
            await asyncio.sleep(max(began_s + at_s / SPEED - time.monotonic(), 0.0))
            tokens = max(round(exec_s / (step_ns / 1e9)), 1)
            found = Outcome(log.models[place], at_s, wanted=min(tokens, 4_000))
            outcomes.append(found)
            tasks.append(asyncio.create_task(ask(client, url, found)))
        await asyncio.gather(*tasks)
    return outcomes


async def watch(planner: str, seen: list[dict[str, Any]]) -> None:
    """Record the planner's report of the pool until cancelled."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            try:
                answer = (await client.get(f"{planner}/v1/models")).json()
            except httpx.HTTPError:
                answer = {}
            if "models" in answer:
                states = Counter(each["state"] for each in answer["models"])
                seen.append({"states": dict(states), **{key: answer[key] for key in KEPT}})
            await asyncio.sleep(POLL_S)


def figures(outcomes: Sequence[Outcome], seen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    statuses = Counter(str(status) for each in outcomes for status in each.statuses)
    warm = [each.first_s for each in outcomes if each.is_whole and not each.expected_s and len(each.statuses) == 1]
    warm_s = statistics.median(warm) if warm else 0.0
    cold = [each for each in outcomes if each.is_whole and each.expected_s]
    waits = [(each.expected_s, max(each.first_s - warm_s, 0.0)) for each in cold]
    near = sum(abs(reported - came) <= max(NEAR_S, NEAR_SHARE * came) for reported, came in waits)
    again = [each for each in outcomes if httpx.codes.SERVICE_UNAVAILABLE in each.statuses]
    failed = [each for each in outcomes if not each.is_whole]
    last = seen[-1] if seen else {}
    switched_s = float(last.get("switched_s") or 0.0)
    expected = [each["at_once"]["expected"] for each in seen if each["at_once"]]
    busy_s = sum(each["active_now"] for each in seen) * POLL_S
    return {
        "requests": len(outcomes),
        "models": MODELS,
        "gpus": GPUS,
        "compressed": SPEED,
        "whole": len(outcomes) - len(failed),
        "lost": len(failed),
        "not_found": statuses.get("404", 0),
        "asked_to_come_back": len(again),
        "came_back_once_was_enough": sum(each.statuses == [503, 200] for each in again),
        "statuses": dict(statuses),
        "cold": len(cold),
        "cold_share": round(len(cold) / max(len(outcomes), 1), 3),
        "warm_first_token_s": round(warm_s, 4),
        "wait_stated_s": _spread([reported for reported, _ in waits]),
        "wait_came_s": _spread([came for _, came in waits]),
        "stated_less_came_s": _spread([reported - came for reported, came in waits]),
        "as_predicted_share": round(near / max(len(waits), 1), 3),
        "cold_starts": last.get("cold_starts"),
        "switches": last.get("switches"),
        "switched_s": round(switched_s, 1),
        "served_per_switched_s": round(busy_s / switched_s, 2) if switched_s else None,
        "active_mean": _mean([each["active_now"] for each in seen]),
        "predicted_at_once_mean": _mean(expected),
        "errors": [f"{each.model}: {each.error or f'{each.tokens} of {each.wanted} tokens'}" for each in failed[:10]],
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), 2) if values else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = sorted(values)
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    return {name: round(found[min(int(share * len(found)), len(found) - 1)], 3) for name, share in shares.items()}


async def run(suite: RunningSuite, log: UsageLog) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []
    watching = asyncio.create_task(watch(str(suite.ready["planner"]), seen))
    outcomes = await play(suite.gateway, log)
    watching.cancel()
    return figures(outcomes, seen)


def main() -> int:
    """Print the figures. Return 1 if a request was lost or a model was not found."""
    options = bench_parser(__doc__, minutes=(30.0, "that are generated"), seed=7).parse_args()
    spec = f"gamma:models={MODELS},rate={RATE_RPS},exec={EXEC_S},seconds={options.minutes * MINUTE_S:g}"
    log = generate_usage(spec, seed=options.seed)
    use = use_by_window(log, MINUTE_S)
    print(
        f"{len(log.t_s)} requests to {MODELS} models in {options.minutes:g} generated minutes, played"
        f" {SPEED:g} times as fast on {GPUS} simulated GPUs; {use.mean_models.mean():.1f} models in"
        f" use on average, {use.peak_models.max()} at most", file=sys.stderr,
    )  # fmt: skip
    names = [word for name in log.models for word in ("--model", name)]
    shape = ("--engine", "sim", "--pool", str(GPUS), "--workers-per-process", "4", *names)
    with bench_suite(*shape, env=SETTINGS) as suite:
        found = asyncio.run(run(suite, log))
    for name, value in found.items():
        print(f"{name}: {json.dumps(value)}")
    print(json.dumps(found))
    return 1 if found["lost"] or found["not_found"] else 0


if __name__ == "__main__":
    sys.exit(main())
