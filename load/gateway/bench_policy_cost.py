"""`make bench-policy-cost`: what a gateway's decision takes by queue length, and the planner's by workers: CPU time.

A gateway: the dispatcher over sixteen workers of the lab's kind, with a number of requests in its queue; one comes, one
credit is free, and one goes. Beside it the same with nothing but first come, first served: no deadlines, one tenant.
The planner: `assign` for one model of some number of workers, half of them in each role, while prompts press.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from libs.dispatch.generation import Generation, RequestTimes
from libs.dispatch.router import Router
from libs.dispatch.waiting import WaitingQueue
from libs.lab.cluster.sequence import CountedTokens
from libs.perfmodel.profiles import profile
from libs.policy.gateway.routing import POLICIES
from libs.policy.gateway.view import WorkerView
from libs.policy.planner.role_planning import Memory, PlannedWorker, assign
from libs.policy.pressure.splits import WorkerProfile, Workload
from libs.policy.roles import Role
from libs.policy.speed import Speed

MODEL: Final = "llama"
STEPS: Final = profile("llama-70b-tp4-h100").step_time
SPEED: Final = Speed(STEPS, 2048, 1e3, measured=True)
WORKERS: Final = 16
TENANTS: Final = 20
QUEUES: Final = (10, 100, 1_000, 10_000)
FLEETS: Final = (16, 100, 1_000)
MS: Final = 1_000_000


class Context:
    """What the queue reads of a request's context."""

    def __init__(self, deadline_ns: int, tenant: str) -> None:
        self.ttft_deadline_unix_ns, self.tenant, self.service_class = deadline_ns, tenant, "online"


def generation(number: int, now_ns: int, *, ours: bool) -> Generation:
    """A request that has just come, of one of `TENANTS` where tenants take turns."""
    context = Context(now_ns + 2_000 * MS if ours else 0, f"t{number % TENANTS}" if ours else "t")
    found = Generation(
        request_id=str(number), model=MODEL, prompt=b"", prompt_tokens=500 + number * 37 % 3000, max_output_tokens=100,
        sampling=cast(Any, None), context=cast(Any, context), end_token_ids=frozenset(), sink=cast(Any, None),
        timeline=RequestTimes(now_ns), output=cast(Any, CountedTokens(0)),
    )  # fmt: skip
    found.placement.queued(number)
    found.timeline.queued_ns = now_ns
    return found


def views() -> list[WorkerView]:
    """Half prefill, half mixed; there is one prefill credit in all."""
    half = WORKERS // 2

    def view(number: int) -> WorkerView:
        mixed = number >= half
        return WorkerView(
            id=f"w{number}",
            model=MODEL,
            kv_kind="kv",
            takes_prefill=not mixed,
            takes_decode=mixed,
            takes_both=mixed,
            prefill_credits=int(not number),
            decode_credits=4 if mixed else 0,
            load=number,
            speed=SPEED,
            prompt_tokens=1 << 20 if mixed else 0,
            decode_sequences=10,
            kv_tokens=20_000,
            free_kv_tokens=100_000,
        )

    return [view(number) for number in range(WORKERS)]


def decision_us(length: int, *, ours: bool, times: int) -> list[float]:
    """One comes and one goes, again and again; the queue is `length` long throughout."""
    queue, router, there = WaitingQueue(length + 1), Router(POLICIES["predicted-ttft"]()), views()
    now_ns = 1_000_000 * MS
    for number in range(length):
        queue.add(generation(number, now_ns - (length - number) * MS, ours=ours), now_ns)
    queue.judge(there)
    found = []
    for number in range(length, length + times):
        now_ns += MS
        came = generation(number, now_ns, ours=ours)
        began = time.thread_time_ns()
        queue.add(came, now_ns)
        queue.judge(there)
        waiting = queue.in_order(now_ns, there)
        bindings = router.round(
            waiting, there, now_ns, quiet=frozenset(), drop_stale_kv=lambda each: None, barred=frozenset()
        )
        for binding in bindings:
            queue.bound(queue[binding.sequence_id], now_ns)
        queue.demand(MODEL, now_ns)
        found.append((time.thread_time_ns() - began) / 1e3)
        assert len(bindings) == 1
    return found


def planner_us(workers: int, times: int) -> list[float]:
    """One decision about one model."""
    engine = WorkerProfile(STEPS, 2048, 256, 400_000)
    half = workers // 2
    prefill = [PlannedWorker(f"w{number}", Role.PREFILL, 0, True, number, 0) for number in range(half)]
    mixed = [PlannedWorker(f"w{number}", Role.MIXED, 2048, True, 0, number) for number in range(half, workers)]
    found = []
    for number in range(times):
        work = Workload(workers * (0.6 + number % 7 / 10), workers * 8, workers * 8 * 2000, 50 * MS)
        began = time.thread_time_ns()
        assign(engine, work, [*prefill, *mixed], Memory(), 10_000 * MS)
        found.append((time.thread_time_ns() - began) / 1e3)
    return found


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """p50 and p99."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)]


def measured(call: Callable[[], list[float]]) -> tuple[float, float]:
    """p50 and p99 of a second look, no garbage collected meanwhile."""
    call()
    gc.collect()
    gc.disable()
    try:
        return quantiles(call())
    finally:
        gc.enable()


def main() -> None:
    """Print two tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=300)
    times = parser.parse_args().times
    gateway, planner = [], []
    head = f"{'queue':>7} {'fcfs p50':>9} {'p99':>8} {'ours p50':>9} {'p99':>8} {'more':>7}"
    print(f"gateway, {WORKERS} workers, us\n{head}")
    for length in QUEUES:
        old = measured(lambda: decision_us(length, ours=False, times=times))  # noqa: B023 (called at once)
        new = measured(lambda: decision_us(length, ours=True, times=times))  # noqa: B023
        gateway.append({"queue": length, "fcfs_us": old, "ours_us": new})
        print(f"{length:>7} {old[0]:>9.0f} {old[1]:>8.0f} {new[0]:>9.0f} {new[1]:>8.0f} {new[0] - old[0]:>+7.0f}")
    print(f"\nplanner, us\n{'workers':>7} {'p50':>9} {'p99':>8}")
    for workers in FLEETS:
        found = measured(lambda: planner_us(workers, times))  # noqa: B023
        planner.append({"workers": workers, "us": found})
        print(f"{workers:>7} {found[0]:>9.0f} {found[1]:>8.0f}")
    print(json.dumps({"bench": "policy-cost", "gateway": gateway, "planner": planner}))


if __name__ == "__main__":
    main()
