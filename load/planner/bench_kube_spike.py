"""`make bench-kube-spike`: a mix of work that turns, on the chart's pods: workers take another role in place, beside
pods that are deleted and started in the other role, as Dynamo's planner has its connector do.

On the cluster that KUBECONFIG names. Pods run as processes of this machine, under the stand-in kubelet; a pod starts in
the time that its process takes, which is seconds, where weights of a real model take minutes. Both ways follow the same
planner's decisions over the same number of workers and the same requests at the same times.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import httpx

from libs.actuators.kubernetes.api import COST
from libs.lab.traces.request import Trace
from libs.runtime.tasks import TaskOwner
from libs.testing.kube.clients import KubeService
from libs.testing.kube.kubelet import STAND_IN, TOLERATION, Kubelet, running_kubelet
from libs.testing.kube.namespace import CommandFailed, Namespace, namespace
from libs.testing.servers.stores import embedded_kafka, embedded_redis
from libs.testing.suites.suite import RunningSuite
from load.lab.fidelity import prompt_ids
from load.planner import bench_spike as spike
from load.planner.live_kinds import SIM, TPOT_MS, TTFT_MS
from load.planner.stories import Story, flipflop, made

READY_S: Final = 180.0
REPLACED_S: Final = 120.0
LOOK_S: Final = 0.2
PHASES: Final = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class PodSuite:
    """A suite of pods, with what `bench_spike.serve` asks of a suite."""

    gateway: str
    ready: dict[str, str]


@dataclass(slots=True)
class Connector:
    """Carries out what a planner recommends by deleting pods of one Deployment and starting some of the other."""

    own: Namespace
    planner: str
    replicas: dict[str, int]
    done: set[str] = field(default_factory=set)
    replaced: int = 0
    took_s: list[float] = field(default_factory=list)

    async def follow(self) -> None:
        """Until cancelled. One decision at a time: while pods end and start, newer ones wait."""
        async with httpx.AsyncClient(base_url=self.planner, timeout=10) as http:
            while True:
                found = (await http.get("/v1/decisions", params={"limit": 5})).json()
                for decision in sorted(found, key=lambda each: int(each["decided_unix_ns"]), reverse=True)[:1]:
                    changes = [each for each in decision["changes"] if each["role"] in (*PHASES, "mixed")]
                    if decision["action"] == "recommend" and decision["id"] not in self.done and changes:
                        self.done.add(decision["id"])
                        await self.replace([(each["worker"], each["role"]) for each in changes])
                await asyncio.sleep(LOOK_S)

    async def replace(self, changes: Sequence[tuple[str, str]]) -> None:
        """Have these workers' pods deleted, and as many started in the other role."""
        before, going = dict(self.replicas), list[str]()
        for worker, role in changes:
            to = "prefill" if role == "prefill" else "decode"
            since = next(phase for phase in PHASES if f"-{phase}-" in worker)
            if to != since and self.replicas[since] > 1:
                self.replicas[since] -= 1
                self.replicas[to] += 1
                going.append(worker)
        if not going:
            return
        since_s = time.monotonic()
        with suppress(CommandFailed):  # one that is gone already
            await self.own.kubectl("annotate", "--overwrite", "pod", *going, f"{COST}=-1000")
        for phase in PHASES:
            if self.replicas[phase] != before[phase]:
                await self.own.kubectl("scale", f"deployment/fulcrum-{phase}", f"--replicas={self.replicas[phase]}")
        await self.own.until("pods have been replaced", self._stands, timeout_s=REPLACED_S)
        self.replaced += len(going)
        self.took_s.append(time.monotonic() - since_s)

    async def _stands(self) -> bool:
        return all([len(await self.own.ready_pods(phase)) == self.replicas[phase] for phase in PHASES])


def values(trace: Trace, *, kafka: str, redis: str, workers: int, mode: str) -> dict[str, Any]:
    """Of the chart."""
    here = {"nodeSelector": {STAND_IN: "true"}, "tolerations": [TOLERATION]}
    env = SIM.env(trace)
    level = {"FULCRUM_LOG_LEVEL": env.pop("FULCRUM_LOG_LEVEL")}
    numbers = {
        name: float(text) if "." in text else int(text) if text.isdecimal() else text for name, text in env.items()
    }
    target = {"FULCRUM_GATEWAY_TTFT_DEADLINE_MS": TTFT_MS, "FULCRUM_GATEWAY_TPOT_TARGET_MS": TPOT_MS}
    return {
        "kafka": {"address": kafka}, "redis": {"address": redis}, "env": level, "metrics": here,
        "gateway": {**here, "replicas": 1, "env": target},
        "planner": {
            **here, "scales": "", "env": {
                "FULCRUM_PLANNER_MODE": mode, "FULCRUM_PLANNER_TPOT_TARGET_MS": TPOT_MS,
            },
        },
        "worker": {**here, "env": numbers},
        "pools": {phase: {"role": phase, "replicas": workers // 2} for phase in PHASES} | {"spare": None},
    }  # fmt: skip


@asynccontextmanager
async def running(given: dict[str, Any], folder: Path) -> AsyncIterator[tuple[Namespace, Kubelet, PodSuite]]:
    """The chart with these values, all pods ready, while the context is open."""
    file = folder / "values.json"
    await asyncio.to_thread(file.write_text, json.dumps(given))
    async with namespace(folder) as own:
        await own.helm("install", "--values", str(file))
        async with running_kubelet(f"stand-in-{own.name}", folder / "pods", {}) as kubelet:
            for component in ("gateway", "planner", "metrics"):
                await own.until(f"{component} is ready", partial(own.ready_pods, component), timeout_s=READY_S)
            await own.until("all workers are ready", lambda: _all_ready(own, given), timeout_s=READY_S)
            service = KubeService(own, "fulcrum-gateway")
            await service.refresh()
            (planner,) = (each for each in kubelet.pods.values() if "-planner-" in each.pod["metadata"]["name"])
            yield own, kubelet, PodSuite(service.url(), {"planner": f"http://{planner.address}:8001", "model": "sim"})


async def _all_ready(own: Namespace, given: dict[str, Any]) -> bool:
    return all([len(await own.ready_pods(phase)) == given["pools"][phase]["replicas"] for phase in PHASES])


async def run(way: str, story: Story, *, workers: int, seed: int, kafka: str, redis: str) -> dict[str, Any]:
    """One way on one story."""
    trace = made(story, seed)
    prompts = prompt_ids(trace, seed=seed)
    mode = "auto" if way == "roles" else "advisory"
    given = values(trace, kafka=kafka, redis=redis, workers=workers, mode=mode)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own, _, suite = await stack.enter_async_context(running(given, folder))
        connector, tasks = Connector(own, suite.ready["planner"], dict.fromkeys(PHASES, workers // 2)), TaskOwner()
        if way == "pods":
            tasks.spawn("replace pods", connector.follow())
        try:
            answers, failed, seen = await spike.serve(cast("RunningSuite", suite), trace, prompts)
        finally:
            await tasks.close()
        if tasks.error is not None:
            raise tasks.error
    good = sum(spike.is_good(each, trace, SIM) for each in answers.values())
    kinds = Counter(each["action"] for each in seen.decisions.values())
    return {
        "way": way, "requests": len(trace.requests), "good": good / len(trace.requests), "failed": len(failed),
        "errors": failed[:3],
        "ttft_ms": spike.percentiles([each.client_ttft_ns / 1e6 for each in answers.values()]),
        "tpot_ms": spike.percentiles([each.served.tpot_ns / 1e6 for each in answers.values() if each.served.tpot_ns]),
        "decisions": dict(kinds), "pods_replaced": connector.replaced,
        "replacing_s": spike.percentiles(connector.took_s),
    }  # fmt: skip


def main() -> None:
    """Print a JSON line for each way, in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=("roles", "pods", "still"), default=["roles", "pods", "still"])
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--rate", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--period", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    story = flipflop(asked.rate, asked.seconds, asked.period)
    with embedded_kafka() as kafka, embedded_redis() as redis:
        for way in asked.ways:
            print(f"{way}: {story.spec}, {asked.workers} workers, SLO {SIM.slo.text}", file=sys.stderr, flush=True)
            row = asyncio.run(
                run(way, story, workers=asked.workers, seed=asked.seed, kafka=kafka.servers, redis=redis.url)
            )
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
