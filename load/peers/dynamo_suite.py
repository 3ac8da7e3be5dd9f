"""Dynamo's frontend and its mockers as processes of a bench or a test.

`python -m load.peers.dynamo_suite` (`make peer-dynamo`) installs them into their own venv in the cache folder.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import httpx

from libs.runtime.net.ports import held_port
from libs.runtime.paths import cache_dir
from load.setup import answers_within, stop

HERE = Path(__file__).parent
WHEELS, NEEDS = HERE / "dynamo_wheels.txt", HERE / "dynamo_needs.txt"


def python() -> Path:
    """Return the path of the venv's interpreter, which may not exist yet."""
    return cache_dir() / "peers" / "dynamo" / "bin" / "python"


def install() -> None:
    """Install Dynamo, unless the same wheels are installed already."""
    venv = python().parents[1]
    stamp, wanted = venv / "fulcrum-installed", WHEELS.read_text() + NEEDS.read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    uv = (sys.executable, "-m", "uv")
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], check=True)
    install = (*uv, "pip", "install", "--quiet", "--python", str(python()))
    subprocess.run([*install, "--no-deps", "-r", str(WHEELS)], check=True)
    subprocess.run([*install, "-r", str(NEEDS)], check=True)
    stamp.write_text(wanted)


LOOPBACK = "127.0.0.1"
_HOSTS = ("DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST")
_MOCKER = ("--speedup-ratio", "1000000", "--kv-transfer-bandwidth", "0")
START_S: Final = 120.0


STEP_LOG: Final = "dynamo.common.recv_forward_pass_metrics"
"""The module of Dynamo's own recorder of forward-pass metrics, which writes a line of JSON for each record."""
COMPONENTS: Final = ("prefill", "backend")
"""Dynamo's default names of the components of workers that prefill, and of those that decode."""


@dataclass(frozen=True)
class RunningDynamo:
    """The processes of a frontend and its workers."""

    port: int
    discovery: Path
    """The folder in DYN_FILE_KV, which the first worker creates."""
    frontend: int
    prefill: list[int]
    """The pid of each worker that prefills."""
    decode: list[int]
    step_logs: list[Path]
    """The files of Dynamo's own recorders; empty without `record`."""
    decode_logs: list[Path]
    """The log of each worker that decodes. With `record`, it has a line at the end of each step."""


@contextmanager
def running_dynamo(
    model: Path, name: str, *, prefill: int = 1, decode: int = 1, mocker: Sequence[str] = _MOCKER, record: bool = False
) -> Iterator[RunningDynamo]:
    """Run a frontend and mockers, each as its own worker, and yield them once they answer.

    `record` adds a recorder for each of their components.
    """
    if not python().exists():
        raise FileNotFoundError("Dynamo is not installed: run `make peer-dynamo`")
    served = ("dynamo.mocker", "--model-path", str(model), "--model-name", name, *mocker, "--disaggregation-mode")
    with ExitStack() as stack:
        port = stack.enter_context(held_port())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fulcrum-dynamo-")))
        own = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "kv"), "DYN_LOG": "error"}
        env = {**os.environ, **own, **dict.fromkeys(_HOSTS, LOOPBACK), "HF_HUB_OFFLINE": "1"}
        log = stack.enter_context((folder / "log").open("wb"))

        def start(*command: str, to: IO[bytes] = log, **more: str) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen([str(python()), "-m", *command], env={**env, **more}, stdout=to, stderr=to)
            stack.callback(stop, process)
            return process

        own_port = ("--http-host", LOOPBACK, "--http-port", str(port))
        frontend = start("dynamo.frontend", *own_port, "--router-mode", "round-robin")
        prefilling = [start(*served, "prefill") for _ in range(prefill)]
        decode_logs = [folder / f"decode-{number}.log" for number in range(decode)]
        level = {"DYN_LOG": "error,dynamo_llm::mocker=debug"} if record else {}
        decoding = [start(*served, "decode", to=stack.enter_context(file.open("wb")), **level) for file in decode_logs]
        step_logs = [folder / f"{each}.jsonl" for each in COMPONENTS] if record else []
        for component, file in zip(COMPONENTS, step_logs, strict=False):
            how = ("--component", component, "--request-plane", "tcp", "--output", str(file), "--flush-interval", "0.2")
            start(STEP_LOG, *how)
        url = f"http://{LOOPBACK}:{port}/v1/chat/completions"
        body = {"model": name, "messages": [{"role": "user", "content": "first"}], "max_tokens": 1, "ignore_eos": True}
        if not answers_within(lambda: httpx.post(url, json=body, timeout=10), start_s=START_S, process=frontend):
            raise TimeoutError(f"Dynamo did not answer within {START_S:g} s")
        prefill_pids, decode_pids = ([each.pid for each in workers] for workers in (prefilling, decoding))
        yield RunningDynamo(port, folder / "kv", frontend.pid, prefill_pids, decode_pids, step_logs, decode_logs)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    install()
