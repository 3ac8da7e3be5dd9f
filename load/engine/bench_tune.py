"""`python -m load.engine.bench_tune`: the prefill chunk that a worker measures for itself, and the TTFT that it brings.

For each case a suite is started, whose prefill worker measures itself at its start; `fulcrum tune prefill` has it do so
again and prints curve, knee and choice. Then the same arrivals, prompts of other tokens each time, are played to the
worker with each chunk size in turn (the engine's default, vLLM's default on large GPUs, the choice), at a share of the
measured plateau. TTFT is the client's: from sending a request for one token until its answer is whole. At last the
largest decode batch that holds a target is asked for and decoded. With `--virtual` gateway, workers and engine core
run the sim case in virtual time, where they do not share a CPU, with hand-overs of several lengths. stdout: tables,
then a line with one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from libs.perfmodel.profiles import profile
from libs.policy.worker.saturation import MOST_TOKENS, knee_of
from libs.testing.engines.real_model import real_model_folder
from libs.testing.suites.suite import RunningSuite, running_suite
from load.lab.tune_lab import ttft_s

SIM_PROFILE = "llama3.1-8b-h100-aic"
VLLM_DEFAULT_TOKENS = 8192
"""Its max_num_batched_tokens on GPUs of 70 GB and more."""
START_S = 300.0
ANSWER_S = 120.0
WARM_UP_S = 3.0
"""Arrivals that come first and do not count."""
MOST_PROMPT_TOKENS = 4096
TOKEN_IDS = (97, 122)
"""In every vocabulary; prompts of them have no beginning in common."""


VIRTUAL_SIZES = (512, 1024, 4096, VLLM_DEFAULT_TOKENS)
"""Beside the choice."""
VIRTUAL_LATE_S = (0.0, 0.02, 0.04)
"""How much later messages from and to the prefill worker come at most."""


@dataclass(frozen=True, slots=True)
class Case:
    """One engine and the load that is put on its prefill worker."""

    name: str
    arguments: tuple[str, ...]
    median_tokens: int
    spread: float
    """Of the logarithm of prompts' lengths."""
    share: float
    """Of the measured plateau that arrives."""
    limit_s: float
    tpot_ms: float
    sizes: tuple[int, ...] = ()
    """To compare with, beside the engine's default and the choice."""


CASES = (
    Case(
        "sim-h100",
        ("--engine", "sim", "--sim-profile", SIM_PROFILE),
        median_tokens=600,
        spread=0.8,
        share=0.75,
        limit_s=10,
        tpot_ms=8.5,
        sizes=(VLLM_DEFAULT_TOKENS,),
    ),
    Case("torch-smollm2", ("--engine", "torch"), median_tokens=96, spread=0.6, share=0.6, limit_s=40, tpot_ms=150),
)
GPU_KV_MEMORY_MB = 16 << 10


def case_on(case: Case, device: str) -> Case:
    """The case as it is run on a device: a GPU would answer short prompts faster than a gateway brings them."""
    if "torch" not in case.arguments or not device.startswith("cuda"):
        return case
    return replace(case, median_tokens=2000, share=0.3, tpot_ms=30, sizes=(VLLM_DEFAULT_TOKENS,))


def worker_env(case: Case, device: str) -> dict[str, str]:
    """Settings of the case's workers: where torch computes, and on a GPU room for long prompts."""
    if "torch" not in case.arguments:
        return {}
    room = {"FULCRUM_WORKER_KV_MEMORY_MB": str(GPU_KV_MEMORY_MB)} if device.startswith("cuda") else {}
    return {"FULCRUM_WORKER_DEVICE": device} | room


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the load."""

    at_s: float
    prompt_tokens: int


def arrivals(case: Case, tokens_per_s: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of prompts whose lengths are spread as a logarithmic normal distribution."""
    random, found, at_s = np.random.default_rng(seed), [], 0.0
    lengths = np.clip(random.lognormal(np.log(case.median_tokens), case.spread, 100_000), 16, MOST_PROMPT_TOKENS)
    per_s = tokens_per_s / float(lengths.mean())
    for length in lengths:
        at_s += random.exponential(1 / per_s)
        if at_s > seconds:
            break
        found.append(Arrival(at_s, int(length)))
    return found


async def play(http: httpx.AsyncClient, model: str, load: Sequence[Arrival], seed: int) -> list[float]:
    """Seconds to the first token of each arrival after the warm-up."""
    random, start_s = np.random.default_rng(seed), time.perf_counter()

    async def ask(arrival: Arrival, prompt: list[int]) -> float:
        await asyncio.sleep(start_s + arrival.at_s - time.perf_counter())
        sent_s = time.perf_counter()
        answer = await http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 1})
        if answer.status_code != httpx.codes.OK:
            sys.exit(f"a request was not answered: {answer.status_code} {answer.text}")
        return time.perf_counter() - sent_s

    prompts = [random.integers(*TOKEN_IDS, each.prompt_tokens).tolist() for each in load]
    start_s = time.perf_counter()
    took_s = await asyncio.gather(*(ask(arrival, prompt) for arrival, prompt in zip(load, prompts, strict=True)))
    return [s for s, arrival in zip(took_s, load, strict=True) if arrival.at_s >= WARM_UP_S]


def tuned(suite: RunningSuite, *arguments: str) -> dict[str, Any]:
    """What `fulcrum tune prefill` says of the only prefill worker."""
    done = suite.fulcrum("tune", "prefill", "--json", *arguments, timeout_s=90)
    if done.returncode:
        sys.exit(done.stderr)
    (found,) = json.loads(done.stdout)
    return dict(found)


async def compare(
    case: Case, suite: RunningSuite, curve: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """TTFT with each size, in rounds that take turns."""
    default, choice = curve["chunk_tokens_default"], curve["chunk_tokens"]
    sizes = dict.fromkeys((default, *case.sizes, choice))
    took_s: dict[int, list[list[float]]] = {size: [] for size in sizes}
    rate = case.share * curve["plateau_tokens_per_s"]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=suite.gateway, timeout=ANSWER_S, limits=limits, trust_env=False) as http:
        for turn in range(options.rounds):
            load = arrivals(case, rate, options.seconds, seed=turn)
            for place, size in enumerate(list(sizes)[:: 1 if turn % 2 else -1]):
                tuned(suite, "--set", str(size))
                took_s[size].append(await play(http, suite.ready["model"] or "sim", load, seed=100 * turn + place))
                print(f"{case.name}: round {turn + 1}, {size} tokens", file=sys.stderr)
    return {
        "case": case.name,
        "load_share_of_plateau": case.share,
        "arrivals": len(took_s[default][0]) * options.rounds,
        "chunks": [_chunk_figures(size, took_s[size], took_s[default]) for size in sizes],
    }


def _chunk_figures(size: int, rounds: list[list[float]], default: list[list[float]]) -> dict[str, Any]:
    everything = [s for each in rounds for s in each]
    p50, p90, p99 = np.quantile(everything, [0.5, 0.9, 0.99])
    gains = [1 - statistics.mean(mine) / statistics.mean(base) for mine, base in zip(rounds, default, strict=True)]
    return {
        "chunk_tokens": size,
        "ttft_mean_ms": round(statistics.mean(everything) * 1e3, 2),
        "ttft_p50_ms": round(p50 * 1e3, 2),
        "ttft_p90_ms": round(p90 * 1e3, 2),
        "ttft_p99_ms": round(p99 * 1e3, 2),
        "gain_over_default": round(statistics.median(gains), 4),
        "gain_by_round": [round(gain, 4) for gain in gains],
    }


async def decode(case: Case, suite: RunningSuite) -> dict[str, Any]:
    """The largest batch by the model, and what decoding in it takes a token: the client's, so hand-offs count too."""
    model = suite.ready["model"] or "sim"
    async with httpx.AsyncClient(base_url=suite.gateway, timeout=ANSWER_S, trust_env=False) as http:
        await _tpot_s(http, model, 4)  # so that the worker knows its steps
        await _tpot_s(http, model, 12)
        done = suite.fulcrum("tune", "decode", "--tpot", str(case.tpot_ms), "--context", "128", "--json")
        if done.returncode:
            sys.exit(done.stderr)
        (found,) = json.loads(done.stdout)
        batch = found["decode_batch"]
        held = await _tpot_s(http, model, batch) if batch else None
        return {**found, "tpot_ms": round(held * 1e3, 2) if held else None}


async def _tpot_s(http: httpx.AsyncClient, model: str, batch: int, tokens: int = 48) -> float:
    """Median time per output token of `batch` answers at once, from each one's first token to its end."""
    random = np.random.default_rng(batch)

    async def ask(prompt: list[int]) -> float:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        first_s = last_s = 0.0
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
        return (last_s - first_s) / (tokens - 1)

    prompts = [random.integers(*TOKEN_IDS, 104).tolist() for _ in range(batch)]
    return statistics.median(await asyncio.gather(*map(ask, prompts)))


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Start the suite, measure, compare, stop it."""
    model = ("--model", str(real_model_folder())) if "torch" in case.arguments else ()
    with tempfile.TemporaryDirectory(prefix="bench-tune-") as folder:
        env = {"FULCRUM_CACHE": str(Path(folder) / "cache"), "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": "0"}
        env |= worker_env(case, options.device)
        arguments = (*case.arguments, *model, "--prefill", "1", "--decode", "1")
        with running_suite(Path(folder), *arguments, env=env, start_s=START_S) as suite:
            at_start = tuned(suite, "--kept")
            curve = tuned(suite, "--limit", str(case.limit_s), *_picture(case, options.picture))
            found = asyncio.run(compare(case, suite, curve, options))
            held = asyncio.run(decode(case, suite))
            return {**found, "at_start": at_start["chunk_tokens"], "curve": curve, "decode": held}


def virtual(case: Case, seconds: float) -> dict[str, Any]:
    """TTFT with each chunk size by policy alone: the true curve, the same arrivals, nothing but the sim case."""
    choice, plateau = knee_of(profile(SIM_PROFILE).step_time, MOST_TOKENS)
    load = [(each.at_s, each.prompt_tokens) for each in arrivals(case, case.share * plateau, seconds, seed=1)]
    rows = []
    print(f"{case.name}, virtual time: {len(load)} prompts at {case.share:.0%} of {plateau:,.0f} tokens/s")
    print(f"{'late ms':>8}{'chunk':>8}{'TTFT mean':>12}{'p50':>10}{'p99 ms':>10}")
    for late_s in VIRTUAL_LATE_S:
        for size in sorted({choice, *VIRTUAL_SIZES}):
            took_ms = np.array(ttft_s(load, sim_profile=SIM_PROFILE, chunk_tokens=size, late_s=late_s)) * 1e3
            p50, p99 = np.quantile(took_ms, [0.5, 0.99])
            print(f"{late_s * 1e3:>8.0f}{size:>8}{took_ms.mean():>12.1f}{p50:>10.1f}{p99:>10.1f}", flush=True)
            rows.append({"late_s": late_s, "chunk_tokens": size, "ttft_mean_ms": round(float(took_ms.mean()), 2)})
    return {"case": case.name, "virtual": True, "choice": choice, "arrivals": len(load), "rows": rows}


def _picture(case: Case, file: Path | None) -> tuple[str, ...]:
    return ("--picture", str(file.with_stem(f"{file.stem}-{case.name}").absolute())) if file else ()


def table(found: dict[str, Any]) -> str:
    """For people."""
    curve, tpot = found["curve"], found["decode"]
    lines = [
        f"{found['case']}: {curve['chunk_tokens']} tokens a step (at the start {found['at_start']}) saturate at"
        f" {curve['plateau_tokens_per_s']:,.0f} tokens/s; {found['arrivals']} prompts at"
        f" {found['load_share_of_plateau']:.0%} of that:",
        f"{'chunk':>8}{'TTFT mean':>12}{'p50':>10}{'p90':>10}{'p99 ms':>10}{'gain':>9}",
        *(
            f"{each['chunk_tokens']:>8}{each['ttft_mean_ms']:>12.1f}{each['ttft_p50_ms']:>10.1f}"
            f"{each['ttft_p90_ms']:>10.1f}{each['ttft_p99_ms']:>10.1f}{each['gain_over_default']:>9.1%}"
            for each in found["chunks"]
        ),
        f"{'tokens':>8}{'tokens/s':>12}{'fitted':>10}",
        *(
            f"{p['tokens']:>8}{p['measured_tokens_per_s']:>12,.0f}{p['fitted_tokens_per_s']:>10,.0f}"
            for p in curve["curve"]
        ),
        f"decode: {tpot['decode_batch']} sequences hold {tpot['tpot_target_ms']:g} ms a token by the model"
        f" ({tpot['step_ms']:.1f} ms a step), {tpot['tpot_ms']} ms when decoded",
    ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    made.add_argument("--only", choices=[case.name for case in CASES], nargs="*")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--seconds", type=float, default=15.0, help="of load on each size in each round")
    made.add_argument("--virtual", action="store_true", help="the sim case in virtual time: policy alone, no CPU")
    made.add_argument("--device", default="auto", help="of the torch engine")
    made.add_argument("--picture", type=Path, help="an SVG or PNG file; the case's name is put into its own")
    return made


def main() -> None:
    """Run it."""
    options = parser().parse_args()
    if options.virtual:
        print(json.dumps({"bench": "tune", "cases": [virtual(CASES[0], options.seconds)]}))
        return
    results = []
    for case in CASES:
        if not options.only or case.name in options.only:
            results.append(run(case_on(case, options.device), options))
            print(table(results[-1]) + "\n", flush=True)
    print(json.dumps({"bench": "tune", "cases": results}))


if __name__ == "__main__":
    main()
