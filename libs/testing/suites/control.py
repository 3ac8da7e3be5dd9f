"""A control-plane service (planner, metrics) as a launcher starts it, for tests."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

START_S = 30.0
STOP_S = 10.0
SEEN_S = 30.0
"""The bound on an answer, outages included."""


@dataclass(frozen=True)
class Control:
    """A running control-plane service."""

    process: asyncio.subprocess.Process
    http: httpx.AsyncClient

    async def until(self, path: str, holds: Callable[[Any], object], **params: str) -> Any:
        """Return the first answer for which `holds` is true."""
        answer = None
        try:
            async with asyncio.timeout(SEEN_S):
                while True:
                    answer = (await self.http.get(path, params=params)).json()
                    if holds(answer):
                        return answer
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{path} did not come to hold within {SEEN_S} s; last: {answer}") from None

    async def stop(self) -> int:
        """End it as a launcher would, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            return await self.process.wait()


@asynccontextmanager
async def control(name: str, kafka: str, redis: str, cluster: str, **env: str) -> AsyncIterator[Control]:
    """Run `python -m services.NAME` until the context closes."""
    common = {"FULCRUM_CLUSTER": cluster, "FULCRUM_KAFKA": kafka, "FULCRUM_REDIS": redis}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{name}",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **common, f"FULCRUM_{name.upper()}_PORT": "0", **env},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            ready = json.loads(await process.stdout.readline())
        assert ready["event"] == "ready", ready
        async with httpx.AsyncClient(base_url=ready["http"], trust_env=False) as http:
            yield Control(process, http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
