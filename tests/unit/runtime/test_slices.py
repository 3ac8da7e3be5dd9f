"""Tests of scheduler slices that threads request from the kernel."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from libs.engine.vllm.plugin import LEASH_VARIABLE
from libs.runtime import linux as slices
from libs.runtime.linux import COMPUTE_SLICE_NS, LOOP_SLICE_NS, USUAL_SLICE_NS, ask_slice
from libs.testing.slices import own_slice_ns

T = TypeVar("T")

SERVICE = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from libs.runtime import status
from libs.runtime.service import run_service
from libs.runtime.settings import CommonSettings
from libs.testing.slices import own_slice_ns

async def main(service):
    with ThreadPoolExecutor(1) as threads:
        inherited = await asyncio.get_running_loop().run_in_executor(threads, own_slice_ns)
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", PLUGIN, stdout=asyncio.subprocess.PIPE)
    plugged, _ = await child.communicate()
    others = await asyncio.to_thread(own_slice_ns)
    status.emit("slices", loop=own_slice_ns(), inherited=inherited, others=others, plugged=int(plugged))

sys.exit(run_service("probe", CommonSettings, main))
"""
PLUGIN = "from libs.engine.vllm import plugin; plugin.register(); "
PLUGIN += "from libs.testing.slices import own_slice_ns; print(own_slice_ns())"


def in_a_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


@pytest.fixture
def usual_ns() -> int:
    """Return the slice that the kernel gives by default."""

    def ask() -> int | None:
        return own_slice_ns() if ask_slice(USUAL_SLICE_NS) else None

    slice_ns = in_a_thread(ask)
    if slice_ns is None:
        pytest.skip("this kernel has no slices, or does not tell them")
    return slice_ns


@pytest.mark.parametrize("slice_ns", [LOOP_SLICE_NS, COMPUTE_SLICE_NS])
def test_a_thread_gets_the_requested_slice_and_can_return_it(usual_ns: int, slice_ns: int) -> None:
    def ask() -> list[int | None]:
        return [own_slice_ns() if ask_slice(each_ns) else None for each_ns in (slice_ns, USUAL_SLICE_NS)]

    assert LOOP_SLICE_NS < usual_ns < COMPUTE_SLICE_NS
    assert in_a_thread(ask) == [slice_ns, usual_ns]


@pytest.mark.system
def test_the_loop_and_library_threads_of_a_service_get_short_slices_and_worker_threads_do_not(
    usual_ns: int,
) -> None:
    script = f"PLUGIN = {PLUGIN!r}\n{SERVICE}"
    env = {**os.environ, "FULCRUM_TOKEN": "hush", LEASH_VARIABLE: str(os.getpid())}
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    reported = {"loop": LOOP_SLICE_NS, "inherited": LOOP_SLICE_NS, "others": usual_ns, "plugged": usual_ns}
    assert json.loads(said.stdout) == {"event": "slices", **reported}


def test_without_slices_in_the_kernel_nothing_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices.platform, "machine", lambda: "another")
    assert not in_a_thread(lambda: ask_slice(LOOP_SLICE_NS))
    monkeypatch.setattr(slices.platform, "system", lambda: "Darwin")
    assert not in_a_thread(lambda: ask_slice(LOOP_SLICE_NS))


def test_nothing_is_requested_if_the_c_library_only_pretends_to_know_schedulers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError("not implemented")

    monkeypatch.setattr(slices.os, "sched_getscheduler", refuse, raising=False)
    assert not in_a_thread(lambda: ask_slice(LOOP_SLICE_NS))
