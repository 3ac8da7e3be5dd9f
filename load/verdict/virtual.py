"""One trial in virtual time: gateway, workers, planner and metrics as they are, on a machine that is never late."""

import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, Final

from libs.bus.work import Handle
from libs.contracts.topics import Topic
from load.chaos.endless_job import EndlessJob
from load.chaos.suite import SuiteSpec, VirtualSuite, run_virtual
from load.verdict.drawn import DrawnSuite
from load.verdict.judge import Outcome, Reported, judged, until_caused
from load.verdict.situations import WORKERS, Planted, arrivals
from services.gateway.batch.run import BatchPorts

POLL_S: Final = 0.1
BEFORE_S: Final = 5.0
WARM_S: Final = 8.0
"""Of a light load of both phases, in which workers learn how long their steps take."""
REST_S: Final = 40.0
PLAYED_S: Final = 60.0
MOVED_S: Final = (1.0, 2.5)
"""After advised moves, between when the pressure that they left is measured: those that were held decode once their
prompts are computed, which takes about a second."""
LINE: Final = (210, 40)
"""Tokens of a batch line."""


class WaitingJob(EndlessJob):
    """A batch backlog that begins when it is let."""

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        super().__init__(prompt_tokens, output_tokens)
        self.begin = asyncio.Event()

    async def work(self, topic: Topic, group: str, handle: Handle) -> None:
        """Nothing before."""
        await self.begin.wait()
        await super().work(topic, group, handle)


def run_trial(drawn: DrawnSuite, planted: Planted, seed: int, *, apply: bool = True) -> Outcome:
    """From a cluster at rest; with `apply` the advice is followed at the end, where there is any."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Path(folder) / "faults.json"
        faults.write_text("{}")
        job: Any = WaitingJob(*LINE)
        spec = SuiteSpec(
            roles=["prefill"] * planted.prefill + ["decode"] * (WORKERS - planted.prefill),
            worker={**drawn.worker(), "sim_faults": str(faults)},
            gateway=drawn.targets(),
            planner=drawn.planner(),
            metrics=drawn.targets(),
            batch=BatchPorts(job, job) if planted.batch_lines else None,
        )

        async def play(suite: VirtualSuite) -> Outcome:
            return await _Trial(suite, drawn, planted, faults, job).run(seed, apply=apply)

        return run_virtual(spec, seed, play)


class _Trial:
    def __init__(self, suite: VirtualSuite, drawn: DrawnSuite, planted: Planted, faults: Path, job: WaitingJob) -> None:
        self._suite = suite
        self._drawn = drawn
        self._planted = planted
        self._faults = faults
        self._job = job
        self._first = 0
        """Requests that were asked before the trial."""

    async def run(self, seed: int, *, apply: bool) -> Outcome:
        suite, planted = self._suite, self._planted
        await self._warm(seed)
        fired, reported = suite.alerts(), Reported()
        polling = suite.cluster.loop.spawn(suite.client, self._poll(reported))
        self._first = len(suite.asked)
        if planted.before is not None:
            suite.play(list(arrivals(planted.before, seed, PLAYED_S)))
            await asyncio.sleep(BEFORE_S)
        began_s = suite.now_s
        self._faults.write_text(json.dumps(self._planted_faults()))
        if planted.before is None:
            suite.play(list(arrivals(planted.load, seed, PLAYED_S)))
        self._job.begin.set()
        cause_s = await until_caused(
            self._drawn.device, planted, lambda: suite.asked[self._first :], lambda: suite.now_s, began_s
        )
        outcome = judged(planted, seed, reported, began_s, cause_s)
        outcome.alerts = sorted(suite.alerts() - fired)
        if apply:
            await self._apply(outcome, reported)
        polling.cancel()
        return outcome

    async def _warm(self, seed: int) -> None:
        """Workers learn their steps, then all is quiet."""
        suite, load = self._suite, self._planted.load
        every_s = 2 * self._drawn.device.prompt_s(load.isl)
        many = range(int(WARM_S / every_s))
        await suite.play([(number * every_s, load.isl, 24) for number in many])
        end_s = suite.now_s + REST_S
        while suite.now_s < end_s and suite.status()["verdict"]["code"] != "idle":  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def _apply(self, outcome: Outcome, reported: Reported) -> None:
        """Follow the advice, and hold what it predicted against what it left."""
        action = self._suite.status()["verdict"]["action"]
        if action is None:
            return
        role = action["role"]
        await self._suite.set_roles(action["workers"], f"mixed:{action['budget_tokens']}" if role == "mixed" else role)
        moved_s = self._suite.now_s
        await asyncio.sleep(MOVED_S[1])
        seen = [max(each[1:4]) for each in reported.pressures if each[0] >= moved_s + MOVED_S[0]]
        outcome.predicted = action["pressure_then"]
        outcome.left = statistics.median(seen) if seen else None

    async def _poll(self, reported: Reported) -> None:
        while True:
            reported.take(self._suite.status(), self._suite.now_s)
            await asyncio.sleep(POLL_S)

    def _planted_faults(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        names = [f"w{number}" for number in range(WORKERS)]
        workers = {"prefill": names[: self._planted.prefill], "decode": names[self._planted.prefill :]}
        for whose, fault in self._planted.faults.items():
            role = whose.removeprefix("every ")
            own = {name: value for name, value in fault.items() if name != "link_s"}
            if "link_s" in fault:
                own["link_gbps"] = self._drawn.link_gbps(self._planted.load.isl, fault["link_s"])
            for worker in workers[role] if whose != role else workers[role][:1]:
                found[worker] = own
        return found
