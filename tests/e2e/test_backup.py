"""Tests that the commands in docs/backup.md restore a suite's stored data into new folders."""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.bus.embedded import broker_command, embedded_broker
from libs.runtime.net.ports import held_port
from libs.testing.batch.jobs import answered, shown, submit, unanswered, until_answered, write_lines
from libs.testing.servers.server import Server
from libs.testing.servers.stores import embedded_redis_server, kafka_command, listens, redis_command, running
from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = [pytest.mark.alone, pytest.mark.suite]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "backup.md"
LINES = 200
COMPLETIONS = 5
WAIT_S = 30.0


def block(heading: str) -> str:
    """Return the first shell block under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


@dataclass(frozen=True)
class Place:
    """The folders and ports of a suite with persistent stores."""

    folder: Path
    ports: tuple[int, int, int]

    @property
    def env(self) -> dict[str, str]:
        """The environment of the page's commands and of the suite."""
        kafka, redis, _ = self.ports
        return {
            "KAFKA_DATA": str(self.folder / "kafka"),
            "REDIS_DATA": str(self.folder / "redis"),
            "FULCRUM_GATEWAY_FILES_FOLDER": str(self.folder / "files"),
            "FULCRUM_METRICS_HISTORY_FILE": str(self.folder / "history" / "history.sqlite"),
            "FULCRUM_KAFKA": f"127.0.0.1:{kafka}",
            "FULCRUM_REDIS": f"redis://127.0.0.1:{redis}/0",
            "FULCRUM_KEYS": "redis",
            "FULCRUM_CLUSTER": "kept",
            "FULCRUM_CACHE": str(self.folder / "cache"),
            "FULCRUM_METRICS_DAY_S": "600",  # bins of demand last half a second
        }

    def type(self, commands: str, at: Path) -> None:
        done = subprocess.run(
            ("bash", "-ec", commands), cwd=at, env={**os.environ, **self.env},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def broker(self, *, real: bool) -> tuple[str, ...]:
        kafka, _, controller = self.ports
        if real:
            return kafka_command(self.folder / "kafka", port=kafka, controller_port=controller)
        return broker_command(embedded_broker(), port=kafka, folder=self.folder / "kafka")

    @contextmanager
    def suite(self, *, real: bool) -> Iterator[RunningSuite]:
        """Run Kafka, Redis (with compose's options) and the suite; stop the stores last."""
        kafka, redis, _ = self.ports
        (self.folder / "redis").mkdir(parents=True, exist_ok=True)
        redis_kept = (
            *redis_command(embedded_redis_server(), port=redis, folder=self.folder / "redis"),
            *("--appendonly", "yes"),
        )
        log = self.folder / "stores.log"
        shape = ("--engine", "sim", "--history", self.env["FULCRUM_METRICS_HISTORY_FILE"])
        with (
            running(Server("Kafka", self.broker(real=real), log=log, ready=lambda _: listens(kafka))),
            running(Server("Redis", redis_kept, log=log, ready=lambda _: listens(redis))),
            running_suite(self.folder, *shape, env=self.env) as suite,
        ):
            yield suite


def command(suite: RunningSuite, *arguments: str) -> Any:
    done = suite.fulcrum(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def requests_counted(http: httpx.AsyncClient, suite: RunningSuite, least: int) -> int:
    """Return the request count of the last hour, once it has reached `least`."""
    # A bin of demand is counted only after its interval has ended, so the figure lags.
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await http.get(f"{suite.ready['metrics']}/v1/demand", params={"span": "1h"})
            answer.raise_for_status()
            count = sum(each or 0 for series in answer.json()["series"] for each in series["requests"])
            if count >= least:
                return count
            await asyncio.sleep(0.1)


def stored(suite: RunningSuite) -> dict[str, Any]:
    """Return the keys and limits as the CLI lists them."""
    return {
        "keys": command(suite, "keys", "list"),
        "tenants": command(suite, "keys", "limits"),
        "planner": command(suite, "planner", "limits"),
    }


class Stopwatch:
    """Seconds from each note to the next, the first one from the creation."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.noted: dict[str, float] = {}

    def note(self, name: str) -> None:
        now_s = time.monotonic()
        self.noted[name], self._last_s = round(now_s - self._last_s, 2), now_s


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.kafka)], ids=["embedded", "apache-kafka"])
async def test_keys_limits_files_batches_and_demand_are_there_after_a_restore(real: bool, tmp_path: Path) -> None:
    """A job interrupted by the stop completes after the restore, with each line answered once."""
    with held_port() as kafka, held_port() as redis, held_port() as controller:
        old, new = (Place(tmp_path / name, (kafka, redis, controller)) for name in ("old", "new"))
        write_lines(tmp_path / "lines.jsonl", LINES, max_tokens=16)
        with old.suite(real=real) as suite:
            secret = command(suite, "keys", "create", "--tenant", "ops", "--role", "admin")["key"]
            command(suite, "keys", "limits", "search", "--requests", "600", "--weight", "2")
            command(suite, "planner", "limits", "moves_per_s=3")
            async with httpx.AsyncClient(timeout=30, headers={"authorization": f"Bearer {secret}"}) as http:
                ended = await submit(http, suite.gateway, tmp_path / "lines.jsonl")
                await until_answered(http, [suite.gateway], ended, timeout_s=60)
                for _ in range(COMPLETIONS):
                    body = {"model": "sim", "prompt": "a b c", "max_tokens": 2}
                    (await http.post(f"{suite.gateway}/v1/completions", json=body)).raise_for_status()
                await requests_counted(http, suite, LINES + COMPLETIONS)
                begun = await submit(http, suite.gateway, tmp_path / "lines.jsonl")
                files = (await http.get(f"{suite.gateway}/v1/files")).json()["data"]
            before = stored(suite)
            assert suite.fulcrum("down").returncode == 0
        took = Stopwatch()
        old.type(block("Back up"), tmp_path)
        took.note("back_up_s")
        new.type(block("Restore"), tmp_path)
        took.note("unpack_s")
        with new.suite(real=real) as suite:
            headers = {"authorization": f"Bearer {secret}"}
            async with httpx.AsyncClient(timeout=30, headers=headers) as http:
                body = {"model": "sim", "prompt": "a b c", "max_tokens": 2}
                (await http.post(f"{suite.gateway}/v1/completions", json=body)).raise_for_status()
                took.note("start_until_first_answer_s")
                assert stored(suite) == before
                there = (await http.get(f"{suite.gateway}/v1/files")).json()["data"]
                assert {each["id"] for each in files} <= {each["id"] for each in there}
                for batch_id in (ended, begun):
                    batch = await until_answered(http, [suite.gateway], batch_id, timeout_s=60)
                    assert batch["status"] == "completed"
                    assert not shown(unanswered(await answered(http, suite.gateway, batch), LINES))
                took.note("resume_jobs_s")
                print(json.dumps(took.noted))  # the recovery time, of which speeds are never asserted
                # The resumed job alone has fewer lines than this, so the history must have been restored.
                await requests_counted(http, suite, LINES + COMPLETIONS)
            async with httpx.AsyncClient(timeout=30) as stranger:
                assert (await stranger.get(f"{suite.gateway}/v1/models")).status_code == 401
