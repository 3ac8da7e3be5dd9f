"""The set-up that benches share: suites in their own folders, engines, and servers of peers."""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from libs.engine.port import Engine, EngineIdentity
from libs.testing.engines.engine import DirectFetcher
from libs.testing.suites.suite import START_TIMEOUT_S, RunningSuite, running_suite

STOP_S: Final = 5.0


@contextmanager
def bench_suite(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    start_s: float = START_TIMEOUT_S,
    folder: Path | None = None,
) -> Iterator[RunningSuite]:
    """Run a suite with its own files and cache, so that it has learned nothing from earlier runs.

    Its files are in `folder`, or else in a temporary folder.
    """
    with ExitStack() as stack:
        home = folder or Path(stack.enter_context(TemporaryDirectory(prefix="fulcrum-bench-")))
        own = {"FULCRUM_CACHE": str(home / "cache"), **(env or {})}
        yield stack.enter_context(running_suite(home, *arguments, env=own, start_s=start_s))


async def start_engine(engine: Engine) -> Engine:
    """Start an engine that fetches no KV, and return it."""
    await engine.start(EngineIdentity("bench", 1, "127.0.0.1:1"), DirectFetcher(), lambda _stage, _share: None)
    return engine


def answers_within(ask: Callable[[], httpx.Response], *, start_s: float, process: subprocess.Popen[bytes]) -> bool:
    """Ask a server until it succeeds. Return False if its process ends, or if `start_s` have passed."""
    end_s = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < end_s:
        with suppress(httpx.HTTPError):
            if ask().is_success:
                return True
        time.sleep(0.2)
    return False


def stop(process: subprocess.Popen[Any]) -> None:
    """Stop a process by SIGTERM, and by SIGKILL if it has not ended after `STOP_S`."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
