"""One trial on a running suite: the roles, the requests, the faults, and what `/v1/status` said meanwhile."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

import httpx

from libs.contracts.roles import role_from_name
from libs.runtime.net.access import admin_token
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings, load_settings
from libs.testing.suites.suite import RunningSuite
from libs.worker.admin.client import WorkerAdmin
from load.verdict.clients import Clients
from load.verdict.drawn import DrawnSuite
from load.verdict.judge import Outcome, Reported, judged, until_caused
from load.verdict.situations import Planted, arrivals

POLL_S: Final = 0.1
BEFORE_S: Final = 5.0
REST_S: Final = 25.0
FILLING: Final = "x" * 200


class Bench:
    """A suite, and what its devices are in truth."""

    def __init__(self, suite: RunningSuite, drawn: DrawnSuite, faults: Path, http: httpx.AsyncClient) -> None:
        self._suite = suite
        self._drawn = drawn
        self._faults = faults
        self._http = http

    async def trial(self, planted: Planted, seed: int) -> Outcome:
        """From a cluster at rest."""
        await self._calm()
        workers = await self._split(planted.prefill)
        clients = Clients(self._suite.gateway, "sim")
        reported = Reported()
        polling = asyncio.create_task(self._poll(reported))
        fired = await self._alerts()
        try:
            if planted.before is not None:
                clients.play(arrivals(planted.before, seed, 120), seed)
                await asyncio.sleep(BEFORE_S)
            began_s = time.monotonic()
            if planted.faults:
                self._faults.write_text(json.dumps(self._planted_faults(planted, workers)))
            if planted.before is None:
                clients.play(arrivals(planted.load, seed, 120), seed)
            batch = await self._batch(planted, seed)
            cause_s = await until_caused(self._drawn.device, planted, lambda: clients.asked, time.monotonic, began_s)
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            self._faults.write_text("{}")
            await clients.stop()
        if batch:
            await self._http.post(f"{self._suite.gateway}/v1/batches/{batch}/cancel")
        outcome = judged(planted, seed, reported, began_s, cause_s)
        outcome.alerts = sorted(await self._alerts() - fired)
        failed = [each.failed for each in clients.asked if each.failed]
        if failed and outcome.right and planted.name not in ("too_small",):
            outcome.why = f"{len(failed)} requests failed: {failed[0][:80]!r}"
        return outcome

    def _planted_faults(self, planted: Planted, workers: dict[str, list[str]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for whose, fault in planted.faults.items():
            role = whose.removeprefix("every ")
            reported = {name: value for name, value in fault.items() if name != "link_s"}
            if "link_s" in fault:
                reported["link_gbps"] = self._drawn.link_gbps(planted.load.isl, fault["link_s"])
            for worker in workers[role] if whose != role else workers[role][:1]:
                found[worker] = reported
        return found

    async def _batch(self, planted: Planted, seed: int) -> str:
        """A job of this many lines; its id."""
        if not planted.batch_lines:
            return ""
        lines = [
            {
                "custom_id": str(number), "method": "POST", "url": "/v1/completions",
                "body": {"model": "sim", "prompt": f"{seed} {number} {FILLING}", "max_tokens": 40},
            }
            for number in range(planted.batch_lines)
        ]  # fmt: skip
        text = "\n".join(json.dumps(line) for line in lines).encode()
        url = self._suite.gateway
        file = await self._http.post(
            f"{url}/v1/files", files={"file": ("lines.jsonl", text)}, data={"purpose": "batch"}
        )
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        job = await self._http.post(f"{url}/v1/batches", json=body)
        return str(job.json()["id"])

    async def _poll(self, reported: Reported) -> None:
        while True:
            answer = await self._http.get(f"{self._suite.ready['metrics']}/v1/status")
            if answer.status_code == 200:
                reported.take(answer.json(), time.monotonic())
            await asyncio.sleep(POLL_S)

    async def _alerts(self) -> set[str]:
        """That fire, or have fired."""
        answer = (await self._http.get(f"{self._suite.ready['metrics']}/v1/alerts")).json()
        return {f"{each['name']} {each['reason']}" for each in [*answer["firing"], *answer.get("recent", [])]}

    async def _calm(self) -> None:
        """Until nothing runs."""
        end_s = time.monotonic() + REST_S
        while time.monotonic() < end_s:
            answer = (await self._http.get(f"{self._suite.ready['metrics']}/v1/status")).json()
            if answer["verdict"]["code"] == "idle":
                return
            await asyncio.sleep(0.2)

    async def _split(self, prefill: int) -> dict[str, list[str]]:
        """Give workers their roles; their names by role."""
        settings = load_settings(CommonSettings)
        workers = (await self._http.get(f"{self._suite.ready['planner']}/v1/workers")).json()
        named: dict[str, list[str]] = {"prefill": [], "decode": []}
        for place, worker in enumerate(sorted(workers, key=lambda each: each["id"])):
            role = "prefill" if place < prefill else "decode"
            named[role].append(worker["id"])
            if worker["role"] == role:
                continue
            async with make_channel(settings, worker["address"]) as channel:
                admin = WorkerAdmin(channel, worker["id"], self._token(settings, worker["address"]))
                described = await admin.describe()
                await admin.set_role(
                    *role_from_name(role),
                    expected_epoch=described.worker.assignment.epoch,
                    incarnation=described.worker.incarnation,
                    actor="bench",
                    reason="a trial",
                    force=True,
                )
        return named

    def _token(self, settings: CommonSettings, address: str) -> str:
        return admin_token(settings, address, self._suite.ready.get("token", ""))
