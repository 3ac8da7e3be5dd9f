"""What prefix-cache-aware routing is worth: Mooncake's conversations on a live suite of simulated GPUs.

The same slice of the trace is served four times by a fresh suite of real processes: with a cache that nothing can be
found in, and with each routing policy. Every request asks for one token, so that the prompt phase alone is measured.
Time is compressed: GPUs are faster and requests come sooner by one factor. TTFT is given in the trace's
time, so this machine's own share of it is multiplied too. Prints a table, then one JSON line.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from libs.contracts import metric_names as names
from libs.model.builtin import SIM_EOS, SIM_VOCAB_SIZE, sim_tokenizer
from libs.testing.suites.suite import RunningSuite, running_suite
from load.gateway.mooncake import NoTrace, TracedRequest, prompts_json, read_slice, trace_path
from load.processes import processes_below, usage

CASES = (("no cache", "predicted-ttft"), ("round robin", "round-robin"), ("least loaded", "least-loaded"),
         ("predicted TTFT", "predicted-ttft"))  # fmt: skip
CONTEXT_TOKENS = 131_072
TIMEOUT_S = 60.0
GOOD_RATIOS = (0.8, 1.25)
"""A prediction within these of the truth is a good one."""
REROUTES, RATIO = "fulcrum_gateway_reroutes", names.GATEWAY_TTFT_PREDICTED_RATIO


@dataclass(frozen=True, slots=True)
class Row:
    """One case; times in seconds of the trace."""

    case: str
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    prompt_tokens: int
    cached_tokens: int
    saved: float
    """Share of prompt tokens that were not computed."""
    good_predictions: float
    cpu_cores: float
    recomputes: int
    reroutes: int
    late_hints: int


def write_model(folder: Path) -> Path:
    """A model folder for the sim engine: the built-in vocabulary, with room for the trace's prompts."""
    folder.mkdir()
    config = {"max_position_embeddings": CONTEXT_TOKENS, "vocab_size": SIM_VOCAB_SIZE, "eos_token_id": SIM_EOS}
    (folder / "config.json").write_text(json.dumps(config))
    sim_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"")  # its name is all that is read of it here
    return folder


async def replay(
    url: str,
    model: str,
    requests: Sequence[TracedRequest],
    prompts: Sequence[bytes],
    *,
    compression: float,
    cached: bool,
) -> tuple[list[float], int]:
    """Ask each request in its time; TTFTs in wall seconds and the sum of cached tokens. Any error ends the bench."""
    loop = asyncio.get_running_loop()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
        start_s = loop.time() + 0.2

        async def ask(number: int) -> tuple[float, int]:
            # Blocks are salted by tenant: one of its own finds nothing cached.
            headers = {"content-type": "application/json", "x-fulcrum-tenant": "all" if cached else f"t{number}"}
            body = b'{"model":"%b","max_tokens":1,"ignore_eos":true,"prompt":%b}' % (model.encode(), prompts[number])
            await asyncio.sleep(start_s + requests[number].at_s / compression - loop.time())
            sent_s = loop.time()
            answer = await client.post("/v1/completions", content=body, headers=headers)
            took_s = loop.time() - sent_s
            answer.raise_for_status()
            spent = answer.json()["usage"]
            assert spent["prompt_tokens"] == requests[number].prompt_tokens, spent
            return took_s, spent["prompt_tokens_details"]["cached_tokens"]

        answers = await asyncio.gather(*(ask(number) for number in range(len(requests))))
    return [took_s for took_s, _ in answers], sum(cached_tokens for _, cached_tokens in answers)


def run_case(
    suite: RunningSuite, case: str, requests: Sequence[TracedRequest], prompts: Sequence[bytes], compression: float
) -> Row:
    """Serve the slice on a suite that has served nothing yet."""
    kinds = processes_below(suite.process.pid, {})
    before, began_s = usage(kinds), time.perf_counter()
    url, model, cached = suite.gateway, suite.ready["model"], case != "no cache"
    replaying = replay(url, model, requests, prompts, compression=compression, cached=cached)
    took_s, cached_tokens = asyncio.run(replaying)
    wall_s, after = time.perf_counter() - began_s, usage(kinds)
    counted = _counters(httpx.get(f"{suite.gateway}/metrics").text)
    p50, p90, p99 = np.percentile(took_s, (50, 90, 99)) * compression
    prompt_tokens = sum(request.prompt_tokens for request in requests)
    low, high = (counted[f"{RATIO}_bucket<={bound}"] for bound in GOOD_RATIOS)
    return Row(
        case=case,
        ttft_p50_s=round(float(p50), 3),
        ttft_p90_s=round(float(p90), 3),
        ttft_p99_s=round(float(p99), 3),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        saved=round(cached_tokens / prompt_tokens, 4),
        good_predictions=round((high - low) / max(counted[f"{RATIO}_count"], 1), 3),
        cpu_cores=round(sum(after[kind].cpu_s - before[kind].cpu_s for kind in after) / wall_s, 2),
        recomputes=int(counted[f"{names.GATEWAY_RECOMPUTES}_total"]),
        reroutes=int(counted[f"{REROUTES}_total"]),
        late_hints=int(counted[names.GATEWAY_LATE_HINTS]),
    )


def _counters(text: str) -> Mapping[str, float]:
    """Samples summed over their labels; of a histogram's buckets by bound."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = f"{sample.name}<={sample.labels['le']}" if "le" in sample.labels else sample.name
            found[name] = found.get(name, 0.0) + sample.value
    return found


def table(rows: Sequence[Row], options: argparse.Namespace, requests: int) -> str:
    """The figures for people."""
    head = (
        f"Mooncake conversations, {options.length_s:g} s of the trace from {options.start_s:g} s on, {requests} asked, "
        f"{options.compression:g} times as fast, on {options.prefill} x {options.profile} "
        f"with KV for {options.kv_memory_mb / 1000:g} GB each\n"
    )
    columns = f"{'':<16}{'TTFT p50':>10}{'p90':>8}{'p99':>8}{'saved':>8}{'good pred.':>12}{'CPU cores':>11}{'late':>6}"
    lines = [
        f"{row.case:<16}{row.ttft_p50_s:>8.2f} s{row.ttft_p90_s:>6.2f} s{row.ttft_p99_s:>6.2f} s{row.saved:>8.1%}"
        f"{row.good_predictions:>12.0%}{row.cpu_cores:>11.2f}{row.late_hints:>6}"
        for row in rows
    ]
    fallbacks = sum(row.recomputes + row.reroutes for row in rows)
    return "\n".join([head, columns, *lines, f"recompute fallbacks and reroutes: {fallbacks}"])


def bench(options: argparse.Namespace, path: Path) -> tuple[list[Row], int]:
    """All cases, one suite after the other."""
    requests = read_slice(path, options.start_s, options.length_s)
    prompts = prompts_json(requests)
    rows = []
    with tempfile.TemporaryDirectory(prefix="fulcrum-bench-") as folder:
        model = write_model(Path(folder) / "mooncake")
        for place, (case, policy) in enumerate(CASES):
            own = Path(folder) / str(place)
            own.mkdir()
            env = {
                "FULCRUM_CACHE": str(own / "cache"),
                "FULCRUM_GATEWAY_ROUTING": policy,
                "FULCRUM_GATEWAY_MAX_WAITING": "8192",
                "FULCRUM_WORKER_SIM_PROFILE": options.profile,
                "FULCRUM_WORKER_SIM_SPEEDUP": str(options.compression),
                "FULCRUM_WORKER_SIM_KV_MEMORY_MB": str(options.kv_memory_mb),
                "FULCRUM_WORKER_BLOCK_SIZE_TOKENS": "64",
                "FULCRUM_WORKER_PREFILL_CHUNK_TOKENS": "2048",
                "FULCRUM_LOG_LEVEL": "warning",
            }
            words = ("--engine", "sim", "--prefill", str(options.prefill), "--decode", "1", "--model", str(model))
            with running_suite(own, *words, env=env) as suite:
                rows.append(run_case(suite, case, requests, prompts, options.compression))
            print(rows[-1], file=sys.stderr)
    return rows, len(requests)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start-s", type=float, default=600)
    parser.add_argument("--length-s", type=float, default=450)
    parser.add_argument("--compression", type=float, default=15)
    parser.add_argument("--prefill", type=int, default=5)
    parser.add_argument("--profile", default="llama-70b-tp4-h100")
    parser.add_argument("--kv-memory-mb", type=int, default=340_000, help="of each worker")
    options = parser.parse_args()
    try:
        path = trace_path()
    except NoTrace as error:
        print(f"bench-prefix is skipped: {error}")
        print(json.dumps({"bench": "prefix", "skipped": str(error)}))
        return 0
    rows, requests = bench(options, path)
    print(table(rows, options, requests))
    load = {"bench": "prefix", "cores": os.cpu_count(), "requests": requests, **vars(options)}
    print(json.dumps({**load, "cases": [asdict(row) for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
