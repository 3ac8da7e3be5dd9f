"""Tests of the environment of vLLM's processes, and of the checks before a worker serves with them."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from libs.contracts.errors import StartupError
from libs.engine.config import EngineConfig
from libs.engine.vllm import arguments
from libs.engine.vllm.plugin import HANDSHAKE_FILE, LEASH_VARIABLE
from libs.engine.vllm.starting import PLUGINS_VARIABLE, check_plugins, end_start, overdue_message, starting

REGISTERS = "from libs.engine.vllm import plugin; plugin.register()"
FAILS = f"{REGISTERS}; import logging\ntry: 1 / 0\nexcept Exception: logging.getLogger('vllm').exception('no')"


def child(code: str) -> int:
    """Return the pid of a process that has run this on the leash."""
    env = {**os.environ, LEASH_VARIABLE: str(os.getpid())}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL) as process:
        return process.pid


def test_processes_are_spawned_whatever_the_environment_says() -> None:
    own = arguments.own_environment(host="10.0.0.1", nixl_port=1, mooncake_port=2, revision="r", worker_pid=3)
    assert own["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert not own.keys() & arguments.default_environment(EngineConfig(None, "m"), on_cpu=True).keys()


def test_gpus_without_nvlink_use_cuda_ipc_for_kv() -> None:
    assert arguments.default_environment(EngineConfig(None, "m"), on_cpu=False)["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"


@pytest.mark.system
def test_a_worker_starts_only_if_its_processes_are_on_its_leash() -> None:
    with starting() as files:
        here, elsewhere = child(REGISTERS), child("pass")
        files.check([here])
        with pytest.raises(StartupError, match="outlive this worker"):
            files.check([here, elsewhere])


def test_the_handshake_is_one_value_that_changes_with_the_answer_of_any_rank() -> None:
    with starting() as files:
        assert files.handshake() == ""
        for pid, said in enumerate(("flash", "flash", "flash")):
            (files.board.parent / HANDSHAKE_FILE.format(pid=pid)).write_text(said)
        alike = files.handshake()
        (files.board.parent / HANDSHAKE_FILE.format(pid=1)).write_text("other")
        assert alike and files.handshake() not in {alike, ""}


@pytest.mark.system
def test_the_cause_of_a_failed_start_is_raised_instead_of_its_consequences() -> None:
    with pytest.raises(RuntimeError, match="division by zero"), starting():
        child(FAILS)
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    with pytest.raises(RuntimeError, match="See root cause"), starting():
        raise RuntimeError("Engine core initialization failed. See root cause above.")


@pytest.mark.parametrize(("chosen", "good"), [(None, True), ("fulcrum,other", True), ("other", False), ("", False)])
def test_a_plugin_list_without_ours_is_refused(chosen: str | None, good: bool) -> None:
    environ = {} if chosen is None else {PLUGINS_VARIABLE: chosen}
    if good:
        check_plugins(environ)
        return
    with pytest.raises(StartupError, match="name 'fulcrum' in it too"):
        check_plugins(environ)


HANGS = f"""{REGISTERS}
import subprocess, sys, threading
subprocess.Popen(["sleep", "1000"])
print("hangs", flush=True)
threading.Event().wait()
"""


@pytest.mark.system
def test_a_start_that_hangs_is_ended_with_its_processes_and_its_position_is_reported() -> None:
    with starting():
        env = {**os.environ, LEASH_VARIABLE: str(os.getpid())}
        with subprocess.Popen([sys.executable, "-c", HANGS], env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            helpers = psutil.Process(process.pid).children()
            (stood,) = end_start(explain=True)
            assert stood.startswith(f"process {process.pid} in wait (") and "threading.py" in stood
            assert process.wait(10) == -signal.SIGKILL
        assert len(helpers) == 1
        assert not psutil.wait_procs(helpers, timeout=10)[1]
        assert stood in overdue_message(5, "s", [stood])
    assert end_start(explain=True) == [], "nothing is being started"
