"""Others' figures for disaggregation, rebuilt in the lab: aiconfigurator's for 16 H100, NVIDIA's for one and two nodes.

Llama-3.1-70B throughout. A figure is output tokens a second and GPU at the highest rate at which 90 % of requests and
of work keep the SLO. Disaggregated: the best static split in hindsight. Aggregated: the best of three prompt budgets a
step. Workers of one run have one width; widths that differ by role are put together from pools alone, without queues.
At the end one JSON line.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any, Final, NamedTuple

from rich.console import Console
from rich.table import Table

from libs.contracts.errors import InvalidRequest
from libs.lab.bound import fluid_rate
from libs.lab.experiment import Experiment, LabReport
from libs.lab.hardware import Hardware, by_name
from libs.lab.search import highest_rate
from libs.lab.slo import parse_slo
from libs.lab.study import quiet, run_named
from libs.lab.traces.generate import generate
from libs.perfmodel.peaks import gpu_peaks
from libs.perfmodel.priors import prior_step_time
from libs.perfmodel.profiles import Profile
from libs.perfmodel.utilisation import Compute
from libs.policy.worker.slack import largest_batch
from load.lab.compile_lab import run_compiled

MEASURED: Final = "llama3.1-70b-h100-tp4-aic"
"""BF16, from kernels measured on H100, mixed steps among them."""
LAYER_PARAMETERS, HEAD_PARAMETERS = 68_452_614_144, 1_050_673_152
"""80 layers of 8192 x (8192 x 2 + 1024 x 2) + 3 x 8192 x 28672, and 128256 x 8192."""
ATTENTION_WIDTH, KV_VALUES = 80 * 64 * 128, 80 * 2 * 8 * 128
MEMORY_BYTES, USED_SHARE, ACTIVATION_BYTES = 80e9, 0.92, 2.5e9
"""Of each GPU: all of it, the part that an engine takes, and what of that is neither weights nor KV."""
BUDGETS: Final = (512, 2048, 8192)
AICONFIGURATOR: Final = {"aggregated": 197.0, "disaggregated": 226.0}
WARM_UP, TAIL, START = 0.2, 0.1, 0.4


@dataclass(frozen=True, slots=True)
class Setup:
    """A cluster and what is asked of it."""

    claim: str
    gpus: int
    profile: str
    isl: int
    osl: int
    slo: str
    cv: float
    """Of gaps between arrivals: 0.05 is even, as tools assume, 1 is Poisson, as people come."""
    interference: float | None = None

    @property
    def hardware(self) -> Hardware:
        """Measured, or a roofline such as fp8-tp2."""
        return by_name(self.profile) if self.profile == MEASURED else Hardware(roofline(self.profile), False)

    def experiment(self, requests: int, rate_rps: float = 1.0) -> Experiment:
        """An experiment of `requests` at `rate_rps`."""
        seconds = requests / rate_rps
        spec = f"gamma:cv={self.cv},rate={rate_rps},seconds={seconds},isl={self.isl},osl={self.osl},spread=0"
        trace, hardware = generate(spec, seed=1), self.hardware
        return Experiment(
            trace, hardware, self.gpus // hardware.profile.gpus, parse_slo(self.slo), interference=self.interference,
            warm_up_s=WARM_UP * seconds, tail_s=TAIL * seconds, overtime_s=60.0,
        )  # fmt: skip


def roofline(name: str) -> Profile:
    """`fp8-tp2` or `bf16-tp4`: Llama-70B on that many H100, by FLOPs and bytes alone."""
    kind, _, width = name.partition("-tp")
    gpus, parameter_bytes = int(width), 1 if kind == "fp8" else 2
    flops, bandwidth = gpu_peaks("H100")
    kv_token_bytes = KV_VALUES * parameter_bytes
    compute = Compute(
        LAYER_PARAMETERS, HEAD_PARAMETERS, parameter_bytes, ATTENTION_WIDTH, kv_token_bytes,
        flops * (2 if kind == "fp8" else 1), bandwidth,
    )  # fmt: skip
    free = gpus * (MEMORY_BYTES * USED_SHARE - ACTIVATION_BYTES) - compute.weight_bytes
    step_time = prior_step_time("vllm", "cuda:NVIDIA H100", compute, gpus)
    return Profile(name, step_time, kv_token_bytes, max(round(free), 0), gpus)


def setups() -> list[Setup]:
    """All that is asked of the lab."""
    found = []
    for profile in (MEASURED, "bf16-tp4", "fp8-tp4", "fp8-tp2"):
        found += [Setup("aiconfigurator", 16, profile, 4000, 500, "ttft=2s,tpot=30ms", cv) for cv in (0.05, 1.0)]
    found.append(Setup("aiconfigurator", 16, MEASURED, 4000, 500, "ttft=2s,tpot=30ms", 1.0, interference=1.0))
    for gpus in (8, 16):
        for profile in (MEASURED, "fp8-tp2"):
            slos = "ttft=2s,tpot=25ms", "ttft=2s,tpot=50ms", "ttft=2s,tpot=100ms", "ttft=500ms,tpot=50ms"
            found += [Setup("NVIDIA", gpus, profile, 3000, 150, slo, 1.0) for slo in slos]
            found.append(Setup("NVIDIA", gpus, profile, 3000, 150, "ttft=2s,tpot=25ms", 1.0, interference=1.0))
    return found


def main() -> None:
    """Search, show, print one JSON line."""
    asked = _arguments()
    run_compiled("load.lab.bench_lab_claims")
    quiet()
    started = time.monotonic()
    every = [each for each in setups() if not asked.only or each.claim == asked.only]
    rows: dict[Setup, dict[str, float]] = {each: {} for each in every}
    policies = [*(f"aggregated:{budget}" for budget in BUDGETS), "static", "fulcrum-mixed"]
    jobs = [(each, policy) for each in every for policy in policies]
    for setup, policy, figure in _search(jobs, asked.requests, asked.jobs or os.cpu_count() or 1):
        rows[setup][policy] = figure
        done = sum(len(row) for row in rows.values())
        print(f"{done} of {len(jobs)}: {setup.claim} {setup.profile} {policy}: {figure:.0f}", file=sys.stderr)
    console = Console(file=sys.stdout, highlight=False, width=150)
    console.print(_table(rows))
    widths = mixed_widths()
    console.print(_width_table(widths))
    figures = [asdict(setup) | {"tokens_s_gpu": row} for setup, row in rows.items()]
    wall_s = round(time.monotonic() - started, 1)
    print(json.dumps({"bench": "lab-claims", "rows": figures, "widths": widths, "wall_s": wall_s}))


def _search(jobs: Sequence[tuple[Setup, str]], requests: int, processes: int) -> Iterator[tuple[Setup, str, float]]:
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=quiet) as pool:
        asked = {pool.submit(_tokens_per_gpu, setup, policy, requests): (setup, policy) for setup, policy in jobs}
        try:
            for future in as_completed(asked):
                yield *asked[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _tokens_per_gpu(setup: Setup, policy: str, requests: int) -> float:
    """Output tokens a second and GPU at the highest rate; 0 where not even one request alone keeps the SLO."""
    try:
        experiment = setup.experiment(requests)
    except InvalidRequest as error:
        print(f"{setup.profile}, {setup.slo}: {error.message}", file=sys.stderr)
        return 0.0

    def at_rate(rate_rps: float) -> Sequence[LabReport]:
        return [run_named(setup.experiment(requests, rate_rps), policy)]

    found = highest_rate(at_rate, START * fluid_rate(experiment))
    return found.rate_scale * setup.osl / setup.gpus


# ---------------------------------------------------------------- widths that differ by role


class Widths(NamedTuple):
    """What pools are put together for."""

    gpus: int
    isl: int
    osl: int
    tpot_ms: int


def mixed_widths() -> list[dict[str, Any]]:
    """NVIDIA's setups by rooflines alone: pools that never wait for each other, whole workers, FP8.

    Prefill workers one prompt at a time, decode workers the largest batch that holds TPOT and fits. Aggregated: each
    worker's GPU time for both, reading of weights hidden as far as the interference of the roofline allows.
    """
    return [_best_widths(Widths(gpus, 3000, 150, tpot_ms)) for gpus in (8, 16) for tpot_ms in (12, 25, 50, 100)]


def _best_widths(asked: Widths) -> dict[str, Any]:
    gpus, tpot_ms = asked.gpus, asked.tpot_ms
    best, best_same, best_together = (0.0, ""), (0.0, ""), (0.0, "")
    widths = [width for width in (1, 2, 4, 8) if roofline(f"fp8-tp{width}").kv_memory_bytes > 0]
    for decode in widths:
        best_together = max(best_together, _together(asked, decode))
        for prefill in widths:
            for decoders in range(1, gpus // decode):
                found = _apart(asked, prefill, decode, decoders)
                best = max(best, found)
                best_same = max(best_same, found) if prefill == decode else best_same
    return {
        "gpus": gpus, "tpot_ms": tpot_ms, "aggregated": best_together, "same_width": best_same, "any_widths": best,
    }  # fmt: skip


def _apart(asked: Widths, prefill: int, decode: int, decoders: int) -> tuple[float, str]:
    gpus, isl, osl, tpot_ms = asked
    prefillers = (gpus - decoders * decode) // prefill
    if prefillers < 1:
        return 0.0, ""
    prompts, tokens = roofline(f"fp8-tp{prefill}"), roofline(f"fp8-tp{decode}")
    prompts_s = prefillers * 1e9 / prompts.step_time.chunks_ns(isl, float(isl * isl))
    batch, step_ns = _batch(tokens, isl + osl, tpot_ms)
    answers_s = decoders * batch * 1e9 / (step_ns * max(osl - 1, 1)) if batch else 0.0
    return min(prompts_s, answers_s) * osl / gpus, f"{prefillers} x TP{prefill} + {decoders} x TP{decode}"


def _together(asked: Widths, width: int) -> tuple[float, str]:
    gpus, isl, osl, tpot_ms = asked
    found = roofline(f"fp8-tp{width}")
    batch, _ = _batch(found, isl + osl, tpot_ms)
    if not batch:
        return 0.0, ""
    model = found.step_time
    prompt_ns = model.chunks_ns(isl, float(isl * isl))
    best = 0.0
    for size in range(1, batch + 1):
        decode_ns = model.reading_ns(size) + size * (
            model.decode_sequence_ns + model.decode_kv_token_ns * (isl + osl / 2)
        )
        # In a step of the longest that TPOT allows, so much of a prompt is computed beside the decodes.
        room_ns = model.most_prefill_ns(tpot_ms * 1e6, decode_ns, model.reading_ns(size))
        best = max(best, min(size * 1e9 / (tpot_ms * 1e6 * (osl - 1)), room_ns / prompt_ns * 1e9 / (tpot_ms * 1e6)))
    return best * (gpus // width) * osl / gpus, f"{gpus // width} x TP{width}"


def _batch(found: Profile, tokens: int, tpot_ms: int) -> tuple[int, float]:
    """(sequences, step_ns) of the largest batch."""
    most = min(found.kv_memory_bytes // found.kv_bytes_per_token // tokens, 256)
    batch = largest_batch(found.step_time, round(tpot_ms * 1e6), tokens, most) if most else 0
    model = found.step_time
    step_ns = model.reading_ns(batch) + batch * (model.decode_sequence_ns + model.decode_kv_token_ns * tokens)
    return batch, step_ns


# ---------------------------------------------------------------- shown


def _table(rows: dict[Setup, dict[str, float]]) -> Table:
    shown = Table(title="Output tokens/s/GPU at the highest rate that keeps the SLO", title_justify="left", box=None,
                  pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")  # fmt: skip
    for name in ("claim", "GPUs", "profile", "SLO", "arrivals", "interf.", "aggregated", "budget", "disagg.", "gain",
                 "fulcrum-mixed"):  # fmt: skip
        shown.add_column(name, justify="left" if name in ("claim", "profile", "SLO") else "right", no_wrap=True)
    for setup, row in rows.items():
        budget, together = max(((each, row[f"aggregated:{each}"]) for each in BUDGETS), key=lambda each: each[1])
        apart = row["static"]
        shown.add_row(
            setup.claim, str(setup.gpus), setup.profile.replace("llama3.1-70b-h100-", ""), setup.slo,
            "even" if setup.cv < 0.5 else "Poisson", "" if setup.interference is None else f"{setup.interference:g}",
            f"{together:.0f}", str(budget) if together else "–", f"{apart:.0f}",
            f"{apart / together - 1:+.0%}" if together else "–", f"{row['fulcrum-mixed']:.0f}",
        )  # fmt: skip
    return shown


def _width_table(rows: list[dict[str, Any]]) -> Table:
    title = "FP8 by roofline, 3,000 + 150 tokens, no queues: tokens/s/GPU, best of all widths"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0),
                  header_style="bold")  # fmt: skip
    for name in ("GPUs", "TPOT ms", "aggregated", "with", "one width", "with", "gain", "any widths", "with", "gain"):
        shown.add_column(name, justify="left" if name == "with" else "right", no_wrap=True)
    for row in rows:
        together, same, best = row["aggregated"], row["same_width"], row["any_widths"]
        shown.add_row(
            str(row["gpus"]), str(row["tpot_ms"]), f"{together[0]:.0f}", together[1], f"{same[0]:.0f}", same[1],
            f"{same[0] / together[0] - 1:+.0%}" if together[0] else "–", f"{best[0]:.0f}", best[1],
            f"{best[0] / together[0] - 1:+.0%}" if together[0] else "–",
        )  # fmt: skip
    return shown


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("aiconfigurator", "NVIDIA"), help="one of the two")
    parser.add_argument("--requests", type=int, default=500, help="of each trace")
    parser.add_argument("--jobs", type=int, default=0, help="searches at a time; 0: as many as there are cores")
    return parser.parse_args()


if __name__ == "__main__":
    main()
