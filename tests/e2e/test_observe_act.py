"""Test of `fulcrum observe --act --router` before the real sglang-router."""

import asyncio
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from libs.testing.servers.sglang_router import install_router, running_router
from tests.observe_rig import FakeVllm, Load, serving

pytestmark = [pytest.mark.alone, pytest.mark.packages, pytest.mark.timeout(600)]
PATIENCE_S = 180.0
BUSY = Load(decoding=24, prompts_per_s=1)
FLOOD = Load(prompts_per_s=25, prompt_tokens=1_500, waiting=40, waiting_per_s=12)


async def page_where(http: httpx.AsyncClient, url: str, holds: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = (await http.get(url)).json()
            if holds(found):
                return found
            await asyncio.sleep(0.5)


async def test_a_flood_of_prompts_moves_a_server_in_the_router_and_the_move_is_recorded(tmp_path: Path) -> None:
    python = await asyncio.to_thread(install_router, tmp_path / "venv")
    with ExitStack() as stack:
        fakes = {name: FakeVllm(BUSY) for name in ("p0", "d0", "d1")}
        urls = {name: stack.enter_context(serving(fake)) for name, fake in fakes.items()}
        tables = [f'[[server]]\nurl = "{url}"\nname = "{name}"\n' for name, url in urls.items()]
        (tmp_path / "fleet.toml").write_text("".join(tables))
        async with (
            running_router(python, [urls["p0"]], [urls["d0"], urls["d1"]]) as router,
            httpx.AsyncClient() as http,
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "libs.cli.main", "observe", "--page", "--port", "0", "--json", "--act",
                "--router", router, "--rest-s", "5", "--file", str(tmp_path / "fleet.toml"),
                env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "FULCRUM_KEYS": str(tmp_path / "keys")},
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                page = json.loads(await process.stdout.readline())["page"]
                # Roles are the router's: the file names none.
                status = await page_where(
                    http,
                    f"{page}/v1/status",
                    lambda s: s["planner"]["acts"] and s["models"] and s["models"][0]["known"],
                )
                assert {each["name"]: each["role"] for each in status["observed"]["servers"]} == {
                    "p0": "prefill", "d0": "decode", "d1": "decode",
                }  # fmt: skip
                fakes["p0"].set(FLOOD)
                moved = await page_where(http, f"{page}/v1/status", lambda s: s["planner"]["last_move"] is not None)
                move = moved["planner"]["last_move"]
                assert (move["to_role"], move["actor"]) == ("prefill", "observe")
                listed = (await http.get(f"{router}/workers")).json()["workers"]
                roles = {each["url"]: each["worker_type"] for each in listed}
                assert roles[urls[move["worker"]]] == "prefill"
                assert sorted(roles.values()) == ["decode", "prefill", "prefill"]
                shown = await page_where(
                    http, f"{page}/v1/status",
                    lambda s: [each["role"] for each in s["observed"]["servers"]].count("prefill") == 2,
                )  # fmt: skip
                assert shown["planner"]["acts"]
            finally:
                process.terminate()
                await process.wait()
