"""Test of `fulcrum up --history`: demand is known after a restart of the suite."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.suites.suite import RunningSuite, running_suite

pytestmark = pytest.mark.suite

WAIT_S = 30.0


async def _request_count(suite: RunningSuite, least: int) -> int:
    """Return the requests so far, once at least that many are counted: a bin counts once it has ended."""
    async with httpx.AsyncClient(timeout=WAIT_S) as http, asyncio.timeout(WAIT_S):
        while True:
            answer = await http.get(f"{suite.ready['metrics']}/v1/demand", params={"span": "1h"})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            count = sum(each or 0 for series in found["series"] for each in series["requests"])
            if count >= least:
                return count
            await asyncio.sleep(0.1)


async def test_demand_is_known_after_the_suite_is_restarted(tmp_path: Path) -> None:
    history = tmp_path / "kept" / "history.db"
    # A day of ten minutes: bins of demand last half a second.
    env = {"FULCRUM_CACHE": str(tmp_path / "cache"), "FULCRUM_METRICS_DAY_S": "600"}
    shape = ("--engine", "sim", "--history", str(history))
    body = {"prompt": "a b c", "max_tokens": 2, "temperature": 0}
    with running_suite(tmp_path, *shape, env=env) as suite:
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            for _ in range(5):
                answer = await http.post(
                    f"{suite.gateway}/v1/completions", json={"model": suite.ready["model"], **body}
                )
                assert answer.status_code == 200
        assert await _request_count(suite, 5) == 5
    assert (tmp_path / "kept" / "history.db.demand").stat().st_mode & 0o077 == 0
    with running_suite(tmp_path, *shape, env=env) as suite:
        assert await _request_count(suite, 5) == 5
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            await http.post(f"{suite.gateway}/v1/completions", json={"model": suite.ready["model"], **body})
        assert await _request_count(suite, 6) == 6
