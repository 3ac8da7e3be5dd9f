"""`make soak-planner`: send random spikes to a whole suite whose processes and stores are killed and frozen at random.

Every answer is compared with the one from an undisturbed suite. A request is lost if no gateway answers it within a
minute, however often its client repeats it. It is doubled if it gets another number of tokens, and wrong if it gets
another text. The bench prints a table and one JSON object as its last line. It exits with 1 if a request was lost,
doubled or wrong, if a worker moved more often than its rest allows, or if memory grew.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import psutil

from libs.policy.planner.role_planning import LEAST_PAY_BACK_NS
from libs.runtime.tasks import TaskOwner
from libs.testing.suites.processes import kill, pid_of
from libs.testing.suites.suite import RunningSuite
from load.measure import bench_parser, resident_mib
from load.setup import bench_suite

PREFILL, DECODE, SPARE, GATEWAYS = 2, 2, 1, 2
VICTIMS: Final = ("planner", "planner", "gateway-2", "redis", "kafka", "metrics", "prefill-2", "decode-2")
FREEZES: Final = ("prefill-1", "decode-1", "planner")
FREEZE_S: Final = (0.3, 3.0)
HOUR_S, CI_S = 3_600, 300
# Every other prompt is long with a short answer. The others are short with a long answer.
PROMPTS: Final = 40
# The share of arrivals that are spikes, either of long prompts only or of long answers only.
SPIKE_SHARE: Final = 0.04
# The number of requests in a spike. Long answers fill the slots of all decode workers several times.
SPIKE: Final = (30, 80)
ANSWER_S: Final = 60.0
AGAIN_S: Final = 0.25
# The upper bound of open requests. The other requests of a spike wait in the client.
MAX_OPEN: Final = 96
WATCH_S: Final = 0.5
REPORT_INTERVAL_S: Final = 30.0
# The upper bound of growth in one life of a process over at least a minute. More is a leak.
GROWTH_MIB_PER_MIN: Final = 8.0
LEAST_LIFE_S: Final = 60.0
WARM_S: Final = 20.0
ENV: Final = {
    "FULCRUM_PLANNER_MODE": "auto",
    "FULCRUM_PLANNER_START_UP_S": "3",
    "FULCRUM_WORKER_SIM_PROFILE": "llama-8b-h100",
    "FULCRUM_WORKER_SIM_SPEEDUP": "0.2",
    "FULCRUM_WORKER_MAX_SEQUENCES": "8",
}


@dataclass(slots=True)
class SoakResult:
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    retries: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    spikes: int = 0
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    rss: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Samples (seconds since the start, MiB) by (process, pid)."""


class Soak:
    def __init__(self, suite: RunningSuite, seed: int) -> None:
        self.suite = suite
        self.chance = random.Random(seed)
        self.gateways: list[str] = list(suite.ready["gateways"])
        self.found = SoakResult()
        self.expected: dict[int, str] = {}
        self.open = asyncio.Semaphore(MAX_OPEN)
        self.began_s = time.monotonic()

    async def run(self, seconds: float) -> SoakResult:
        """Collect reference answers, inject faults until the time is over, then wait for the open requests."""
        async with httpx.AsyncClient(timeout=ANSWER_S) as http:
            for number in range(PROMPTS):
                self.expected[number] = await self._ask(http, number)
            self.found = SoakResult()
            self.began_s = time.monotonic()
            trouble = TaskOwner()
            trouble.spawn("faults", self._fault_forever())
            trouble.spawn("watch", self._watch_forever(http))
            trouble.spawn("report", self._report_forever(seconds))
            asking: set[asyncio.Task[None]] = set()
            try:
                while time.monotonic() - self.began_s < seconds:
                    await asyncio.sleep(self.chance.expovariate(4.0))
                    self._ask_some(http, asking)
                    if trouble.error is not None:  # a soak without faults tests nothing
                        raise trouble.error
            finally:
                await trouble.close()
            await asyncio.gather(*asking)
        return self.found

    def _ask_some(self, http: httpx.AsyncClient, asking: set[asyncio.Task[None]]) -> None:
        """Start one request, or a spike of them."""
        numbers = [self.chance.randrange(PROMPTS)]
        if self.chance.random() < SPIKE_SHARE:
            first = self.chance.randrange(2)
            numbers = self.chance.choices(range(first, PROMPTS, 2), k=self.chance.randint(*SPIKE))
            self.found.spikes += 1
        for number in numbers:
            task = asyncio.create_task(self._check(http, number))
            asking.add(task)
            task.add_done_callback(asking.discard)

    async def _check(self, http: httpx.AsyncClient, number: int) -> None:
        async with self.open:
            try:
                async with asyncio.timeout(ANSWER_S):
                    text = await self._ask(http, number)
            except TimeoutError:
                self.found.lost.append(f"{number} at {time.monotonic() - self.began_s:.1f} s")
                return
        self.found.answered += 1
        if text != self.expected[number]:
            self.found.wrong.append(f"{number}: {text[:60]!r} in place of {self.expected[number][:60]!r}")

    async def _ask(self, http: httpx.AsyncClient, number: int) -> str:
        """Send a request like a client behind a load balancer, to another gateway if one is away or refuses."""
        long = number % 2 == 0
        tokens = 8 if long else 64
        body = {
            "model": self.suite.ready["model"],
            "prompt": f"number {number}: " + "word " * (1200 if long else 40),
            "max_tokens": tokens,
            "temperature": 0,
            "seed": number,
        }
        for turn in range(10_000):
            url = self.gateways[(number + turn) % len(self.gateways)]
            try:
                answer = await http.post(f"{url}/v1/completions", json=body)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == httpx.codes.OK:
                reported = answer.json()
                if reported["usage"]["completion_tokens"] != tokens:
                    self.found.doubled.append(f"{number}: {reported['usage']}")
                return str(reported["choices"][0]["text"])
            self.found.retries += 1
            await asyncio.sleep(AGAIN_S)
        raise TimeoutError

    async def _fault_forever(self) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(3.0, 9.0))
            if self.chance.random() < 0.6:
                name = self.chance.choice(VICTIMS)
                self.found.faults[f"kill {name}"] += 1
                await kill(self.suite, name)
            else:
                name = self.chance.choice(FREEZES)
                pid = pid_of(self.suite, name)
                if pid is None:
                    continue
                self.found.faults[f"freeze {name}"] += 1
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self.chance.uniform(*FREEZE_S))
                finally:
                    if psutil.pid_exists(pid):
                        os.kill(pid, signal.SIGCONT)

    async def _report_forever(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            found, faults = self.found, self.found.faults.total()
            print(
                f"{time.monotonic() - self.began_s:.0f} of {seconds:.0f} s: {found.answered} answered, {faults} faults,"
                f" {len(found.lost)} lost, {len(found.doubled)} doubled, {len(found.wrong)} wrong",
                file=sys.stderr,
                flush=True,
            )

    async def _watch_forever(self, http: httpx.AsyncClient) -> None:
        while True:
            try:
                answer = await http.get(f"{self.suite.ready['planner']}/v1/decisions?limit=200", timeout=2)
                self.found.decisions |= {each["id"]: each for each in answer.json()} if answer.is_success else {}
            except (httpx.TransportError, ValueError):
                pass  # the process was killed or is frozen
            for name in ("planner", "metrics", "gateway-1"):
                pid = pid_of(self.suite, name)
                if pid is not None and (mib := resident_mib(pid)):
                    self.found.rss[name, pid].append((time.monotonic() - self.began_s, mib))
            await asyncio.sleep(WATCH_S)


def restless(found: SoakResult) -> list[str]:
    """Return the worker of each move that came before its rest after the previous move was over."""
    moved: dict[str, list[int]] = defaultdict(list)
    for each in found.decisions.values():
        if each["action"] == "set_role":
            for worker in each["workers"]:
                moved[worker].append(each["decided_unix_ns"])
    return [
        worker
        for worker, times in moved.items()
        for before, after in zip(sorted(times), sorted(times)[1:], strict=False)
        if after - before < LEAST_PAY_BACK_NS
    ]


def growth(found: SoakResult) -> dict[str, float]:
    """Return the fastest growth in MiB a minute by kind of process, over all its lives after their warm-up."""
    most: dict[str, float] = {}
    for (name, _), samples in found.rss.items():
        warm = [each for each in samples if each[0] - samples[0][0] >= WARM_S]
        if warm and warm[-1][0] - warm[0][0] >= LEAST_LIFE_S:
            grew = (warm[-1][1] - warm[0][1]) / (warm[-1][0] - warm[0][0]) * 60
            most[name] = max(most.get(name, -1e9), grew)
    return most


def main() -> None:
    """Run the soak and print the result. Exit with 1 if an invariant was broken."""
    parser = bench_parser(__doc__, seconds=CI_S, seed=1)
    parser.add_argument("--hour", action="store_const", dest="seconds", const=HOUR_S)
    options = parser.parse_args()
    arguments = ("--engine", "sim", "--prefill", str(PREFILL), "--decode", str(DECODE), "--spare", str(SPARE))
    with bench_suite(*arguments, "--gateways", str(GATEWAYS), env=ENV) as suite:
        found = asyncio.run(Soak(suite, options.seed).run(options.seconds))
    moves = sum(len(each["workers"]) for each in found.decisions.values() if each["action"] == "set_role")
    hasty, grew = restless(found), growth(found)
    row = {
        "seconds": options.seconds, "seed": options.seed, "answered": found.answered, "lost": len(found.lost),
        "doubled": len(found.doubled), "wrong": len(found.wrong), "asked_again": found.retries,
        "spikes": found.spikes, "faults": dict(found.faults), "decisions": len(found.decisions), "moves": moves,
        "moves_before_rest": len(hasty), "growth_mib_per_min": grew,
    }  # fmt: skip
    for name, value in row.items():
        print(f"{name:<20} {value}")
    for each in (*found.lost[:5], *found.doubled[:5], *found.wrong[:5]):
        print(f"  {each}")
    print(json.dumps(row))
    leaks = any(each > GROWTH_MIB_PER_MIN for each in grew.values())
    sys.exit(bool(found.lost or found.doubled or found.wrong or hasty or leaks))


if __name__ == "__main__":
    main()
