"""`python -m load.gpu.serve --engine vllm`: measure a whole suite whose prefill and decode workers share one GPU.

On several GPUs each worker has its own, as `load.gpu.eight` starts it. The engine sim needs no GPU.

The suite is `fulcrum up` with a model of Llama-8B's shape. Requests arrive at random times, and every answer is
counted. With `--moves N` they arrive again during N role moves. The report has TTFT and TPOT as clients measure them,
failures, and KV figures of the metrics service. It also has Fulcrum's occupancy, the GPU's own utilisation, and the
time until moves take effect. stdout has a few lines, then one JSON object in the last line.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from libs.counters import open_nvml
from libs.lab.traces.generate import generate
from libs.lab.traces.request import Trace
from libs.testing.suites.role_moves import HeldMove, RoleChanger, role_changer
from libs.testing.suites.suite import RunningSuite
from load.gpu.shapes import add_model_options, vllm_arguments, write_model
from load.lab.fidelity import prompt_ids
from load.lab.fidelity_live import play
from load.measure import bench_parser, percentiles
from load.planner.bench_role import spread_ms
from load.setup import bench_suite

START_S: Final = 240.0
CONTEXT_TOKENS: Final = 8192
LOOK_S: Final = 0.25
# The number of characters kept from the end of a command's output or a log.
TAIL: Final = 4000
# The upper bound of kept lines of the metrics exposition.
MOST_LINES: Final = 400
# The seed of the requests' times and lengths. Prompts differ between runs, so that none is in a prefix cache.
TRACE_SEED: Final = 1
SHOWN: Final = ("requests", "answered", "failures", "ttft_ms", "tpot_ms", "gpu_utilisation")


def requests_of(spec: str, seed: int) -> Trace:
    """Return the requests of a trace that fit a worker's context.

    They have no service class, since these clients send none.
    """
    trace = generate(spec, seed=seed)
    fitting = [each for each in trace.requests if each.input_tokens + each.output_tokens < CONTEXT_TOKENS]
    requests = [replace(each, number=number, service_class="") for number, each in enumerate(fitting)]
    return replace(trace, requests=requests)


async def read_gpu(readings: list[float]) -> None:
    """Append the GPU's own utilisation, 0..1, to `readings` until cancelled."""
    counters = open_nvml()
    while counters is not None:
        readings += [each.utilisation for each in counters.read() if each.utilisation is not None]
        await asyncio.sleep(LOOK_S)


async def ask(suite: RunningSuite, options: argparse.Namespace, *, prompt_seed: int, moves: int = 0) -> dict[str, Any]:
    """Send requests at random times, and return their outcomes with the suite's own figures."""
    spec = options.trace or (
        f"poisson:rate={options.rate},isl={options.isl},osl={options.osl},spread=0.3,seconds={options.seconds}"
    )
    trace, failed, readings, held = requests_of(spec, TRACE_SEED), list[str](), list[float](), list[HeldMove]()
    beside = [asyncio.create_task(read_gpu(readings))]
    if moves:
        span_s = trace.requests[-1].arrival_ns / 1e9
        beside.append(asyncio.create_task(move_roles(suite, moves, span_s, held)))
    began_s = time.time()
    try:
        prompts = prompt_ids(trace, seed=prompt_seed)
        answers = await play(suite.gateway, suite.ready["model"], trace, prompts, failed)
    finally:
        for each in beside:
            each.cancel()
        ends = await asyncio.gather(*beside, return_exceptions=True)
    window_s = max(round(time.time() - began_s), 1)
    return {
        "trace": spec,
        "requests": len(trace.requests),
        "answered": len(answers),
        "failed": failed[:5],
        "failures": len(failed),
        "ttft_ms": percentiles([each.client_ttft_ns / 1e6 for each in answers.values()]),
        "tpot_ms": percentiles([each.served.tpot_ns / 1e6 for each in answers.values() if each.served.tpot_ns]),
        "client_late_ms": max((each.late_ns / 1e6 for each in answers.values()), default=0.0),
        "gpu_utilisation": round(sum(readings) / len(readings), 3) if readings else None,
        "moves": len(held),
        "move_effect_ms": spread_ms([each.move.effect_s for each in held]),
        "moves_ended_by": [repr(each) for each in ends if isinstance(each, Exception)],
        **await suite_figures(suite, window_s),
    }


async def move_roles(suite: RunningSuite, moves: int, span_s: float, held: list[HeldMove]) -> None:
    """Change roles of workers within `span_s`, and restore the first roles at the end."""
    async with role_changer(suite) as changer:
        await move_there_and_back(changer, moves, span_s, held)


async def move_there_and_back(
    changer: RoleChanger,
    moves: int,
    span_s: float,
    held: list[HeldMove],
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Make `moves` role moves at equal intervals within `span_s`.

    A random worker changes its role, then the same worker changes back, and so on. At most one worker is away from its
    role. The last move is followed by another interval.
    """
    start_s = now_s()
    for number in range(1, moves + 1):
        await sleep(max(start_s + span_s * number / (moves + 1) - now_s(), 0.0))
        held.append(await (changer.move_one() if number % 2 else changer.move_back()))


async def suite_figures(suite: RunningSuite, window_s: int) -> dict[str, Any]:
    """Return the suite's own figures for its last `window_s` seconds."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as http:
        metrics = suite.ready["metrics"]
        occupancy = (await http.get(f"{metrics}/v1/occupancy", params={"window": f"{window_s}s"})).json()
        workers = (await http.get(f"{suite.ready['planner']}/v1/workers")).json()
        exposed = (await http.get(f"{metrics}/metrics")).text
    lines = [line for line in exposed.splitlines() if not line.startswith("#") and "_bucket" not in line]
    return {"occupancy": occupancy, "workers": workers, "exposed": lines[:MOST_LINES]}


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    roles = [f"--{role}={getattr(options, role)}" for role in ("prefill", "decode", "mixed")]
    env = {
        "FULCRUM_WORKER_KV_MEMORY_MB": str(options.kv_mb),
        "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": "2048",
        "FULCRUM_WORKER_MAX_SEQUENCES": str(options.sequences),
        "FULCRUM_LOG_LEVEL": "warning",
        "FULCRUM_PLANNER_MODE": "auto" if options.auto else "advisory",
    }
    model: tuple[str, ...] = ()
    if options.engine == "sim":
        env |= {
            "FULCRUM_WORKER_SIM_PROFILE": options.profile,
            "FULCRUM_WORKER_SIM_LINK_GBPS": str(options.link_gbps),
            "FULCRUM_WORKER_SIM_KV_MEMORY_MB": str(options.kv_mb),
        }
    else:
        written = options.model or write_model(folder / options.shape, options.shape, "cuda:0", options.tokenizer)
        model = ("--model", str(written))
    if options.engine == "vllm":
        arguments = vllm_arguments(context_tokens=CONTEXT_TOKENS, gpu_share=options.gpu_share, kv_mb=options.kv_mb)
        if options.dummy:
            arguments["load_format"] = "dummy"
        env["FULCRUM_WORKER_VLLM_ARGUMENTS"] = json.dumps(arguments)
    began_s = time.monotonic()
    shape = ("--engine", options.engine, *model, *roles)
    with bench_suite(*shape, env=env, start_s=START_S, folder=folder) as up:
        start_s = time.monotonic() - began_s
        print(f"started in {start_s:.0f} s", file=sys.stderr, flush=True)
        found = asyncio.run(ask(up, options, prompt_seed=1))
        if options.moves:
            print(json.dumps({name: found[name] for name in SHOWN}), file=sys.stderr, flush=True)
            found["moving"] = asyncio.run(ask(up, options, prompt_seed=2, moves=options.moves))
        status, links = up.fulcrum("status", "--json"), up.fulcrum("status", "--links", "--json")
    logs = {log.name: log.read_text(errors="replace")[-TAIL:] for log in sorted((folder / "cache").rglob("*.log"))}
    log = (folder / "up.log").read_text(errors="replace")
    return {
        "engine": options.engine,
        "shape": options.shape,
        "start_s": round(start_s, 1),
        "status": status.stdout[-TAIL:],
        "links": links.stdout[-TAIL:],
        "logs": logs,
        "log": [line for line in log.splitlines() if "ucx" in line.lower() or "error" in line.lower()][-20:],
        **found,
    }


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = run(options, Path(folder))
    print(f"start_s          {found['start_s']}")
    for state, figures in (("", found), ("moving", found.get("moving", {}))):
        for name in (each for each in (*SHOWN, "moves", "move_effect_ms") if each in figures):
            print(f"{name:<16} {figures[name]} {state}")
    print(json.dumps(found))


def parser() -> argparse.ArgumentParser:
    made = bench_parser(
        __doc__, dummy=(False, "vLLM draws the weights: of --model only the config counts"), prefill=1, decode=1,
        mixed=0, moves=(0, "role moves under as much load again"), rate=2.0, isl=1500, osl=100, seconds=20,
        sequences=(64, "that a worker runs at once, at most"), kv_mb=(10 << 10, "KV memory of a worker"),
        gpu_share=(0.4, "of the GPU's memory that a vLLM worker may take"),
        trace=("", "in place of rate, isl, osl and seconds, as in `fulcrum lab traces`"),
        auto=(False, "the planner moves workers"), profile=("", "of engine sim"), link_gbps=(100.0, "of engine sim"),
    )  # fmt: skip
    add_model_options(made, "sim")
    made.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer random weights take")
    return made


if __name__ == "__main__":
    main(parser().parse_args())
