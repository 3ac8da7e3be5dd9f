"""One trial on a running suite: the roles, the requests, the faults, and what `/v1/status` said meanwhile."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from libs.contracts.roles import role_from_name
from libs.policy.pressure.splits import KV_FILL
from libs.runtime.net.access import admin_token
from libs.runtime.net.rpc import make_channel
from libs.runtime.settings import CommonSettings, load_settings
from libs.testing.suites.suite import Suite
from libs.worker.admin.client import WorkerAdmin
from load.verdict.clients import Clients
from load.verdict.situations import Device, Planted, arrivals

POLL_S: Final = 0.1
WITHIN_S: Final = 3.0
AFTER_S: Final = 4.0
"""A trial goes on for so long after the cause was there: what is said wrong later counts too."""
BEFORE_S: Final = 5.0
DISTRACTED_S: Final = 14.0
MOST_S: Final = 20.0
"""A cause that is not there by then was not planted well: such a trial says so and counts as failed."""
REST_S: Final = 25.0
CALM: Final = frozenset({"idle", "balanced", "unknown"})
FILLING: Final = "x" * 200
QUEUED_S: Final = 0.5
"""A prefill worker's worth of prompts that waits is a queue."""


@dataclass(slots=True)
class Outcome:
    """What came of a trial."""

    name: str
    seed: int
    wanted: Sequence[str]
    right: bool
    why: str
    """Empty where it is right."""
    cause_s: float | None
    """From the first request or fault until the cause was there, by the clients' own account; None: it never was."""
    named_s: float | None
    """From then until the right code was first; below 0: before."""
    sentence: str
    seen: list[tuple[float, str]] = field(default_factory=list)
    """Each change of the verdict."""
    pressures: list[tuple[float, ...]] = field(default_factory=list)
    """(s, prefill, batch, KV, cluster; of decode workers: KV wait, starved, busy)"""
    alerts: list[str] = field(default_factory=list)


class Bench:
    """A suite, and what its devices are in truth."""

    def __init__(
        self, suite: Suite, device: Device, faults: Path, http: httpx.AsyncClient, *, kv_bytes: int, speedup: float
    ) -> None:
        self._suite = suite
        self._device = device
        self._faults = faults
        self._http = http
        self._kv_bytes = kv_bytes
        self._speedup = speedup

    async def trial(self, planted: Planted, seed: int) -> Outcome:
        """From a cluster at rest."""
        await self._calm()
        workers = await self._split(planted.prefill)
        clients = Clients(self._suite.gateway, "sim")
        reported = _Told()
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
            cause_s = await self._wait(planted, clients, began_s)
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
            self._faults.write_text("{}")
            await clients.stop()
        if batch:
            await self._http.post(f"{self._suite.gateway}/v1/batches/{batch}/cancel")
        outcome = _judged(planted, seed, reported, began_s, cause_s)
        outcome.alerts = sorted(await self._alerts() - fired)
        failed = [each.failed for each in clients.asked if each.failed]
        if failed and outcome.right and planted.name not in ("too_small",):
            outcome.why = f"{len(failed)} requests failed: {failed[0][:80]!r}"
        return outcome

    async def _wait(self, planted: Planted, clients: Clients, began_s: float) -> float | None:
        """Until the cause has been there long enough; when it came, from the beginning."""
        if not planted.wanted:
            await asyncio.sleep(DISTRACTED_S)
            return 0.0
        if planted.name in ("slow_link", "slow_worker"):
            await asyncio.sleep(WITHIN_S + AFTER_S)
            return 0.0
        while time.monotonic() < began_s + MOST_S:
            if self._is_there(planted, clients):
                cause_s = time.monotonic() - began_s
                await asyncio.sleep(WITHIN_S + AFTER_S)
                return cause_s
            await asyncio.sleep(0.05)
        return None

    def _is_there(self, planted: Planted, clients: Clients) -> bool:
        """By what clients have asked and got: a queue of prompts, or more sequences than hold TPOT or KV."""
        device, live = self._device, [each for each in clients.asked if not each.done]
        queued = [each for each in live if not each.first_s]
        decoding = [each for each in live if each.first_s]
        waits_s = sum(device.prompt_s(each.isl) for each in queued) / planted.prefill
        tokens = sum(each.isl + each.tokens for each in decoding)
        context = tokens / max(len(decoding), 1)
        batch = len(decoding) / (device.largest_batch(max(context, 1)) * planted.decode)
        kv = tokens / (device.kv_tokens * KV_FILL * planted.decode)
        short = {
            "prefill_bound": waits_s > QUEUED_S,
            "two: prefill and worker": waits_s > QUEUED_S,
            "decode_bound_tpot": batch >= 1,
            "decode_bound_kv": kv >= 1,
            "too_small": waits_s > QUEUED_S and max(batch, kv) >= 1,
        }
        return short[planted.name]

    def _planted_faults(self, planted: Planted, workers: dict[str, list[str]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for whose, fault in planted.faults.items():
            role = whose.removeprefix("every ")
            reported = {name: value for name, value in fault.items() if name != "link_s"}
            if "link_s" in fault:
                bits = planted.load.isl * self._kv_bytes * 8
                reported["link_gbps"] = bits / fault["link_s"] / 1e9 / self._speedup
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

    async def _poll(self, reported: "_Told") -> None:
        while True:
            answer = await self._http.get(f"{self._suite.ready['metrics']}/v1/status")
            if answer.status_code == 200:
                reported.take(answer.json())
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
                )
        return named

    def _token(self, settings: CommonSettings, address: str) -> str:
        return admin_token(settings, address, self._suite.ready.get("token", ""))


@dataclass(slots=True)
class _Told:
    """What `/v1/status` said, change by change."""

    changes: list[tuple[float, str, frozenset[str], str]] = field(default_factory=list)
    pressures: list[tuple[float, ...]] = field(default_factory=list)

    def take(self, status: dict[str, Any]) -> None:
        at_s, verdict = time.monotonic(), status["verdict"]
        causes = frozenset(each["code"] for each in verdict["causes"])
        last = self.changes[-1] if self.changes else None
        if last is None or (last[1], last[2]) != (verdict["code"], causes):
            self.changes.append((at_s, verdict["code"], causes, verdict["sentence"]))
        for model in status["models"]:
            if model["known"]:
                decode = model["decode"]
                found = (model["prefill"]["pressure"], decode["batch_pressure"], decode["kv_pressure"])
                shares = (decode["kv_wait"] or 0.0, decode["starved"] or 0.0, decode["busy"] or 0.0)
                self.pressures.append((at_s, *found, model["cluster_pressure"], *shares))


def _judged(planted: Planted, seed: int, reported: _Told, began_s: float, cause_s: float | None) -> Outcome:
    changes = [(at_s - began_s, code, causes, sentence) for at_s, code, causes, sentence in reported.changes]
    outcome = Outcome(planted.name, seed, sorted(planted.wanted), False, "", cause_s, None, "")
    outcome.seen = [(round(at_s, 2), " ".join([code, *sorted(causes - {code})])) for at_s, code, causes, _ in changes]
    outcome.pressures = [
        (round(at_s - began_s, 2), *(round(each, 2) for each in found)) for at_s, *found in reported.pressures
    ]
    named = [each for each in changes if each[1] not in CALM]
    if not planted.wanted:
        outcome.right = not named
        outcome.why = "" if outcome.right else f"{named[0][1]} was named"
        outcome.sentence = (named or changes or [(0, "", frozenset(), "")])[0][3]
        return outcome
    if cause_s is None:
        outcome.why = "the cause never came"
        return outcome
    allowed = planted.wanted | planted.behind
    wrong = [each for each in named if each[1] not in planted.wanted or not each[2] <= allowed]
    first = next((each for each in named if each[1] in planted.wanted), None)
    whole = next((each for each in named if each[1] in planted.wanted and each[2] >= planted.behind), None)
    outcome.sentence = (first or (named or changes)[0])[3]
    outcome.named_s = None if whole is None else whole[0] - cause_s
    if wrong:
        outcome.why = f"{wrong[0][1]} was named ({', '.join(sorted(wrong[0][2]))})"
    elif outcome.named_s is None:
        outcome.why = "it was not named" if first is None else "what stands behind it was not named"
    elif outcome.named_s > WITHIN_S:
        outcome.why = f"named after {outcome.named_s:.1f} s"
    outcome.right = not outcome.why
    return outcome
