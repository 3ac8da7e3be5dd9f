"""`python -m load.bench_vllm_serve`: vLLM's own client, `vllm bench serve`, against this suite and vLLM's own server.

Both serve the same model with the same cores: the suite a prefill and a decode worker of one thread each, `vllm serve`
one engine of two. The client runs unmodified, against one and the other in turn. stdout: a table of medians over
rounds, then one JSON object as the last line; stderr: progress. Needs vLLM's environment (`make setup-vllm`).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from libs.testing.real_model import real_model_folder
from libs.testing.suite import free_port, running_suite

START_S: Final = 400.0
FIGURES: Final = {
    "output_throughput": "output tokens/s",
    "request_throughput": "requests/s",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "median_tpot_ms": "TPOT p50 ms",
    "p99_tpot_ms": "TPOT p99 ms",
}
ENVIRONMENT: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def vllm_command() -> str:
    """The program that comes with vLLM."""
    return str(Path(sys.executable).parent / "vllm")


@contextlib.contextmanager
def vllm_server(model: Path, threads: int, context_tokens: int, log: Path) -> Iterator[str]:
    """vLLM's own server; the address that it answers at."""
    port = free_port()
    command = [
        vllm_command(), "serve", str(model), "--served-model-name", model.name, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--block-size", "32", "--max-model-len", str(context_tokens),
        "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "64",
    ]  # fmt: skip
    env = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    with log.open("w") as file, subprocess.Popen(command, env=env, stdout=file, stderr=file) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def wait_until_it_serves(base_url: str, log: Path) -> None:
    """Raises RuntimeError with the end of its log where it does not."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{base_url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise RuntimeError(f"vllm serve did not start: {log.read_text()[-2000:]}")


def ask(base_url: str, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of `vllm bench serve`; its own figures."""
    command = [
        vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", base_url, "--model", model.name,
        "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", str(options.prompt_tokens),
        "--random-output-len", str(options.output_tokens), "--num-prompts", str(options.prompts),
        "--max-concurrency", str(options.concurrency), "--ignore-eos", "--num-warmups", "2", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json", "--seed", "7",
    ]  # fmt: skip
    env = os.environ | ENVIRONMENT | {"NO_PROXY": "127.0.0.1,localhost"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    if found["completed"] != options.prompts:
        raise RuntimeError(f"{found['completed']} of {options.prompts} requests were answered")
    return {name: found[name] for name in FIGURES}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Both sides in turn; the figures of each round."""
    model, context_tokens = real_model_folder(), 1024
    env = {"FULCRUM_WORKER_VLLM_ARGUMENTS": json.dumps({"max_model_len": context_tokens})}
    env |= {"FULCRUM_WORKER_KV_MEMORY_MB": "256", "FULCRUM_WORKER_THREADS": "1"}
    log = folder / "vllm.log"
    found: dict[str, list[dict[str, Any]]] = {"fulcrum": [], "vllm": []}
    with (
        vllm_server(model, 2, context_tokens, log) as theirs,
        running_suite(folder, "--engine", "vllm", "--model", str(model), env=env, start_s=START_S) as suite,
    ):
        wait_until_it_serves(theirs, log)
        sides = {"fulcrum": suite.gateway, "vllm": theirs}
        for turn in range(options.rounds):
            for name in sides if turn % 2 == 0 else reversed(sides):
                found[name].append(ask(sides[name], model, folder, options))
                print(f"{turn + 1}/{options.rounds} {name}: {found[name][-1]}", file=sys.stderr)
    return found


def main() -> None:
    """Measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-vllm-serve-") as folder:
        rounds = measure(Path(folder), options)
    medians = {side: {name: statistics.median(r[name] for r in rs) for name in FIGURES} for side, rs in rounds.items()}
    ratios = {name: medians["fulcrum"][name] / medians["vllm"][name] for name in FIGURES}
    print(f"{'':<18}{'fulcrum':>10}{'vllm serve':>12}{'ratio':>8}")
    for name, title in FIGURES.items():
        print(f"{title:<18}{medians['fulcrum'][name]:>10.1f}{medians['vllm'][name]:>12.1f}{ratios[name]:>8.2f}")
    shape = {name: getattr(options, name) for name in ("prompts", "prompt_tokens", "output_tokens", "concurrency")}
    print(json.dumps({**shape, "ratios": {name: round(value, 3) for name, value in ratios.items()}, "rounds": rounds}))


if __name__ == "__main__":
    main()
