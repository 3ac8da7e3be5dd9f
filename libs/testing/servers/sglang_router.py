"""The real sglang-router at a pinned version, in its own environment."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

from libs.runtime.net.ports import held_port

PINNED: Final = "sglang-router==0.3.2"
INSTALL_S: Final = 300
STARTED_S: Final = 60.0
LOOK_S: Final = 0.2


def install_router(folder: Path) -> Path:
    """Install the router into a folder and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", PINNED], check=True, timeout=INSTALL_S)
    return python


@asynccontextmanager
async def running_router(python: Path, prefill: Sequence[str], decode: Sequence[str]) -> AsyncIterator[str]:
    """Yield the address of a router with prefill and decode apart, once it lists all its servers."""
    servers = [word for url in prefill for word in ("--prefill", url)]
    servers += [word for url in decode for word in ("--decode", url)]
    with held_port() as port, held_port() as figures_port:
        process = await asyncio.create_subprocess_exec(
            str(python), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--policy", "round_robin",
            "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(figures_port), *servers,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            async with asyncio.timeout(STARTED_S), httpx.AsyncClient() as http:
                while await _listed(http, url) < len(prefill) + len(decode):  # noqa: ASYNC110 - in another process
                    await asyncio.sleep(LOOK_S)
            yield url
        finally:
            process.kill()
            await process.wait()


async def _listed(http: httpx.AsyncClient, url: str) -> int:
    try:
        return len((await http.get(f"{url}/workers")).json()["workers"])
    except httpx.HTTPError:
        return 0
