"""Run vLLM's own client, `vllm bench serve`, against this suite and against vLLM's own server.

Run `python -m load.engine.bench_vllm_serve` by hand. Both sides serve the same model with the same cores. The suite has
a prefill and a decode worker of one thread each, and `vllm serve` has one engine of two threads. Only one of them runs
at a time, because even an idle suite takes CPU time. The order and the prompts change with each round, so that neither
side has a prompt cached. The client is unmodified. vLLM's server has no TPOT target, so by default the suite has none
either. The result is printed to stdout as a table of medians over rounds, then as one JSON object in the last line.
Progress goes to stderr. The bench needs vLLM's environment (`make setup-vllm`).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import httpx

from libs.runtime.net.ports import held_port
from libs.testing.engines.real_model import real_model_folder
from load.measure import bench_parser
from load.setup import answers_within, bench_suite

START_S: Final = 400.0
CONTEXT_TOKENS: Final = 1024
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
TARGET_HEADER: Final = "x-fulcrum-tpot-target-ms"
# Longer than any step.
NO_TARGET_MS: Final = 60_000.0


def vllm_command() -> str:
    return str(Path(sys.executable).parent / "vllm")


def vllm_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment for vLLM's program.

    The program ends if there is no package `vllm` whose version it can read. Its CPU build has another name. If only
    that build is installed, `folder` gets metadata of the same version under the name `vllm`, which Python finds by its
    path.
    """
    env = os.environ | ENVIRONMENT | more
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = f"{metadata.version('vllm-cpu')}+cpu"
        record = folder / "named" / f"vllm-{version}.dist-info"
        record.mkdir(parents=True, exist_ok=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(record.parent), env.get("PYTHONPATH"))))
    return env


@contextlib.contextmanager
def vllm_server(model: Path, folder: Path, **env: str) -> Iterator[str]:
    """Start vLLM's own server with additional variables, and yield its address.

    Raise RuntimeError if it does not start.
    """
    log = folder / "vllm.log"
    command = [
        vllm_command(), "serve", str(model), "--served-model-name", model.name, "--host", "127.0.0.1",
        "--dtype", "float32", "--block-size", "32", "--max-model-len", str(CONTEXT_TOKENS),
        "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "64",
    ]  # fmt: skip
    own = vllm_environment(folder, **{"OMP_NUM_THREADS": "2"} | env)
    with held_port() as port, log.open("w") as file:
        process = subprocess.Popen([*command, "--port", str(port)], env=own, stdout=file, stderr=file)
        try:
            url = f"http://127.0.0.1:{port}"
            if not answers_within(
                lambda: httpx.get(f"{url}/health", trust_env=False), start_s=START_S, process=process
            ):
                raise RuntimeError(f"vllm serve did not start: {log.read_text()[-2000:]}")
            yield url
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def fulcrum_suite(model: Path, _folder: Path) -> Iterator[str]:
    env = {"FULCRUM_WORKER_VLLM_ARGUMENTS": json.dumps({"max_model_len": CONTEXT_TOKENS})}
    env |= {"FULCRUM_WORKER_KV_MEMORY_MB": "256", "FULCRUM_WORKER_THREADS": "1"}
    with bench_suite("--engine", "vllm", "--model", str(model), env=env, start_s=START_S) as suite:
        yield suite.gateway


Side = Callable[[Path, Path], contextlib.AbstractContextManager[str]]
"""A context that serves a model, with a folder for its files, and yields its address."""
SIDES: Final[dict[str, Side]] = {"fulcrum": fulcrum_suite, "vllm": vllm_server}


def ask(base_url: str, model: Path, folder: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run `vllm bench serve` once, and return its own figures."""
    command = [
        vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", base_url, "--model", model.name,
        "--tokenizer", str(model), "--dataset-name", "random", "--random-input-len", str(options.prompt_tokens),
        "--random-output-len", str(options.output_tokens), "--num-prompts", str(options.prompts),
        "--max-concurrency", str(options.concurrency), "--ignore-eos", "--num-warmups", "2", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json", "--seed", str(seed),
        "--header", f"{TARGET_HEADER}={options.tpot_target_ms}",
    ]  # fmt: skip
    env = vllm_environment(folder, NO_PROXY="127.0.0.1,localhost")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve failed: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    if found["completed"] != options.prompts:
        raise RuntimeError(f"{found['completed']} of {options.prompts} requests were answered")
    return {name: found[name] for name in FIGURES}


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Measure both sides in turn, and return the figures of each round."""
    model = real_model_folder()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for seed in range(options.seed, options.seed + options.rounds):
        for name in SIDES if seed % 2 else reversed(SIDES):
            with tempfile.TemporaryDirectory(prefix="bench-vllm-serve-") as temporary:
                folder = Path(temporary)
                with SIDES[name](model, folder) as base_url:
                    found[name].append(ask(base_url, model, folder, options, seed))
            print(f"seed {seed} {name}: {found[name][-1]}", file=sys.stderr)
    return found


def main() -> None:
    options = bench_parser(
        __doc__, rounds=3, seed=(1, "of the first round's prompts; each round has its own"), prompts=64,
        prompt_tokens=64, output_tokens=32, concurrency=8,
        tpot_target_ms=(NO_TARGET_MS, "vLLM's own server has none"),
    ).parse_args()  # fmt: skip
    rounds = measure(options)
    medians = {side: {name: statistics.median(r[name] for r in rs) for name in FIGURES} for side, rs in rounds.items()}
    ratios = {name: medians["fulcrum"][name] / medians["vllm"][name] for name in FIGURES}
    print(f"{'':<18}{'fulcrum':>10}{'vllm serve':>12}{'ratio':>8}")
    for name, title in FIGURES.items():
        print(f"{title:<18}{medians['fulcrum'][name]:>10.1f}{medians['vllm'][name]:>12.1f}{ratios[name]:>8.2f}")
    shape = {
        name: getattr(options, name)
        for name in ("seed", "prompts", "prompt_tokens", "output_tokens", "concurrency", "tpot_target_ms")
    }
    print(json.dumps({**shape, "ratios": {name: round(value, 3) for name, value in ratios.items()}, "rounds": rounds}))


if __name__ == "__main__":
    main()
