"""What a tenant that asks for ten times its share costs another, in virtual time on the live queue.

Two tenants share a cluster of simulated GPUs. One asks for less than its half of what the cluster serves; the other for
its half, then for ten times as much. Compared is the first one's TTFT, beside a queue that knows no tenants. The
cluster, the dispatcher and the queue are the live code (libs/lab). With `--places N` a worker decodes N sequences at
once, so that places to decode are short in place of prompts.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import structlog

from libs.dispatch.ports import OneForAll
from libs.lab.cluster.books import LabAnswer
from libs.lab.experiment import MAX_SEQUENCES, Experiment, run
from libs.lab.hardware import by_name
from libs.lab.policies import policy_named
from libs.lab.slo import parse_slo
from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace

HARDWARE: Final = "llama3.1-70b-h100-tp4-aic"
WORKERS: Final = 4
POLICIES: Final = {"by tenant": "fulcrum:2:2", "one tenant": "fulcrum:2:2", "first come": "fulcrum-fcfs:2:2"}
"""Queues: as it is; with both under one tenant's name; and what was before tenants and deadlines counted."""
SLO: Final = parse_slo("ttft=2s,tpot=50ms")
SECONDS: Final = 80.0
WARM_UP_S: Final = 20.0
WANTED: Final = 0.9
MAX_RATE: Final = 40
MODEST_CLASS: Final = "modest"
MODEST: Final = 0.4
"""Of what the cluster serves, that the first tenant asks for; its fair share is half."""
FLOODS: Final = (0.5, 5.0)
"""Likewise the second: its share, and ten times it."""


class KnownTenants(OneForAll):
    """Knows tenants, as a gateway with keys does."""

    told_apart = True


def trace(rate_rps: float, tenant: str, seed: int, seconds: float = SECONDS) -> Trace:
    """Chats of one tenant's."""
    made = generate(f"gamma:cv=1,rate={rate_rps},seconds={seconds},isl=1500,osl=150,spread=0.5", seed=seed)
    return replace(made, requests=[replace(each, tenant=tenant) for each in made.requests])


def merged(one: Trace, other: Trace) -> Trace:
    """Both, in the order of arrival."""
    every = sorted([*one.requests, *other.requests], key=lambda each: each.arrival_ns)
    return replace(one, requests=[replace(each, number=place) for place, each in enumerate(every)])


def pair(rates_rps: tuple[float, float], names: tuple[str, str], seed: int = 1, seconds: float = SECONDS) -> Trace:
    """A modest tenant, whose requests are of class "modest", and a flood."""
    modest, flood = (
        trace(rate_rps, name, seed + place, seconds)
        for place, (rate_rps, name) in enumerate(zip(rates_rps, names, strict=True))
    )
    return merged(
        replace(modest, requests=[replace(each, service_class=MODEST_CLASS) for each in modest.requests]), flood
    )


def ttft_ms(traces: Sequence[Trace], policy: str, max_sequences: int = MAX_SEQUENCES) -> tuple[float, float, float]:
    """TTFT p50 and p99 in ms of the modest tenant's requests of all traces, and the share that was answered."""
    own: list[LabAnswer] = []
    for requests in traces:
        experiment = Experiment(
            requests, by_name(HARDWARE), WORKERS, SLO, overtime_s=1.0, max_sequences=max_sequences,
            tenants=KnownTenants(),
        )  # fmt: skip
        _, result = run(experiment, policy_named(policy, WORKERS))
        own += [
            each for each in result.answers
            if each.request.service_class == MODEST_CLASS and each.request.arrival_ns > WARM_UP_S * 1e9
        ]  # fmt: skip
    waits = sorted((each.first_ps - each.arrival_ps) / 1e9 for each in own if each.first_ps)
    if not waits:
        return float("nan"), float("nan"), 0.0
    return waits[len(waits) // 2], waits[int(0.99 * len(waits))], len(waits) / len(own)


def goodput(rate_rps: float) -> float:
    """Share of requests within the SLO at a rate."""
    one = Experiment(
        trace(rate_rps, "", 1), by_name(HARDWARE), WORKERS, SLO, warm_up_s=WARM_UP_S, tail_s=5.0, overtime_s=30.0
    )
    return run(one, policy_named(POLICIES["by tenant"], WORKERS))[0].score.slo_attainment


def capacity_rps() -> float:
    """The highest whole number of requests a second of which nine in ten are within the SLO."""
    rate = 16
    while goodput(rate + 1) >= WANTED and rate < MAX_RATE:
        rate += 1
    return float(rate)


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=float, default=0.0, help="requests a second; 0: found first")
    parser.add_argument("--modest", type=float, default=MODEST, help="of it, that the first tenant asks for")
    parser.add_argument("--places", type=int, default=MAX_SEQUENCES, help="sequences that a worker decodes at once")
    parser.add_argument("--seeds", type=int, default=1, help="traces that are taken together")
    arguments = parser.parse_args()
    capacity = arguments.capacity or capacity_rps()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    found: dict[str, dict[str, float]] = {}
    for queue, policy in POLICIES.items():
        for flood in FLOODS:
            names = ("modest", "flood") if queue == "by tenant" else ("all", "all")
            rates_rps = arguments.modest * capacity, flood * capacity
            traces = [pair(rates_rps, names, seed) for seed in range(1, 10 * arguments.seeds, 10)]
            p50, p99, answered = ttft_ms(traces, policy, arguments.places)
            found[f"{queue}, {flood:g}x"] = {"p50_ms": p50, "p99_ms": p99, "answered": answered}
            print(f"{queue:12} other asks {flood:3g} of capacity: TTFT p50 {p50:7.0f} ms, p99 {p99:7.0f} ms, "
                  f"{answered:.1%} answered", flush=True)  # fmt: skip
    print(json.dumps({"capacity_rps": capacity, **found}))


if __name__ == "__main__":
    main()
