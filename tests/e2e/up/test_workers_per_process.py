"""Tests of several simulated workers in one process."""

import asyncio
from pathlib import Path

import httpx
import pytest

from libs.testing.suites.processes import kill, until_whole, workers
from libs.testing.suites.steady_load import steady_load
from libs.testing.suites.suite import running_suite

pytestmark = pytest.mark.suite


async def test_workers_that_share_a_process_serve_side_by_side_and_return_after_a_kill(tmp_path: Path) -> None:
    arguments = ("--engine", "sim", "--prefill", "3", "--decode", "2", "--workers-per-process", "2")
    with running_suite(tmp_path, *arguments, env={"FULCRUM_CACHE": str(tmp_path / "cache")}) as suite:
        async with httpx.AsyncClient(timeout=10) as http:
            listed = {each["id"]: each["pid"] for each in await workers(http, suite)}
            assert set(listed) == {"prefill-1", "prefill-2", "prefill-3", "decode-1", "decode-2"}
            assert len(set(listed.values())) == 3
            assert (listed["prefill-1"], listed["decode-1"]) == (listed["prefill-2"], listed["decode-2"])
            async with steady_load(suite.ready["gateways"], clients=8, tokens=8) as load:
                await load.more(40)
                await kill(suite, "prefill-1")
                await load.more(40)
                assert load.failed == []
            await until_whole(http, suite)
            async with asyncio.timeout(10):
                while len({each["pid"] for each in await workers(http, suite)} - set(listed.values())) != 1:
                    await asyncio.sleep(0.1)


def test_only_simulated_workers_share_a_process(tmp_path: Path) -> None:
    refused = pytest.raises(AssertionError, match="--workers-per-process is for --engine sim")
    with refused, running_suite(tmp_path, "--engine", "torch", "--workers-per-process", "2"):
        raise RuntimeError("it started")
