"""`python -m load.gpu.eight`: measure eight GPUs of one machine within an hour, and compare them with the lab.

Each line of the plan is a command with its own time limit: the machine's devices, `fulcrum doctor`, vLLM's steps on one
GPU, and a suite of eight workers under several loads and splits, with role moves and with a flood. The lab simulates
the same requests with the GPU's profile. A figure outside its band is printed with its likely cause.

Figures are written after each line, with the GPUs, the commit and all versions. An interrupted run continues with the
first missing line. A line runs again if it failed, or if its command, link, GPUs or versions have changed.

    python -m load.gpu.eight --dry-run               # the plan and the lab's figures; needs no GPU
    python -m load.gpu.eight --rehearse              # serving lines on simulated GPUs, a few seconds each
    python -m load.gpu.eight --again moves           # one line again
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from libs.lab.cluster.books import LabOutcome
from libs.lab.experiment import Experiment, run
from libs.lab.hardware import Hardware, resolve
from libs.lab.policies import Policy
from libs.lab.slo import parse_slo
from libs.lab.study import quiet
from libs.launch.profile import MIXED_BUDGET_TOKENS
from libs.policy.roles import Role
from load.gpu.against_profile import MODEL, against_profile, profile_of
from load.gpu.bench_gpu import ROOT, Outcome, Part
from load.gpu.bench_gpu import run as run_part
from load.gpu.deviations import TIMED, Judgement, Row, judge_moves, judge_serving, judge_steps
from load.gpu.serve import requests_of
from load.lab.fidelity import SLO
from load.measure import bench_parser, percentiles

GPUS: Final = 8
SEED: Final = 1
CHUNK_TOKENS, SEQUENCES = 2048, 64
PACKAGES: Final = ("fulcrum-serving", "torch", "vllm", "nixl", "transformers")
STEPS_S: Final = 560.0
SERVE_S: Final = 330.0
"""The limit of a serving line. Workers start in 60 to 240 s, then requests arrive for a minute."""
MOVES_S: Final = SERVE_S + 90
"""The limit of the line with moves, in which the same requests are sent without and with role moves."""
SHORT_S: Final = 120.0
# A placeholder for the folder of the written model, which differs in each run.
OWN_MODEL: Final = "MODEL"
RESULT_FILE: Final = Path("eight.json")
REHEARSAL_FILE: Final = Path("rehearsal.json")
REHEARSED_WORKERS: Final = (1, 1, 2)
"""The numbers of prefill, decode and mixed workers in a rehearsal."""


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a serving line, and the workers that serve them."""

    prefill: int
    decode: int
    mixed: int
    trace: str
    moves: int = 0
    auto: bool = False

    @property
    def roles(self) -> list[tuple[Role, int]]:
        return (
            [(Role.PREFILL, 0)] * self.prefill
            + [(Role.MIXED, 0)] * self.decode
            + [(Role.MIXED, MIXED_BUDGET_TOKENS)] * self.mixed
        )

    def rehearsed(self) -> "Load":
        """Return a load of a few seconds that two cores can serve."""
        prefill, decode, mixed = REHEARSED_WORKERS
        moves, trace = min(self.moves, 2), "poisson:rate=2,isl=400,osl=8,seconds=4"
        if self.mixed:
            return Load(0, 0, mixed, trace, moves, self.auto)
        # A worker can change its role only if another worker still has it.
        return Load(prefill, decode + bool(moves or self.auto), 0, trace, moves, self.auto)


@dataclass(frozen=True, slots=True)
class Line:
    subject: str
    part: Part | None = None
    load: Load | None = None
    limit_s: float = SERVE_S
    command: tuple[str, ...] = ()
    """A command that is no Python module; empty if the line has a part or a load."""


def steady(rate: float) -> str:
    return f"poisson:rate={rate},isl=4000,osl=150,spread=0.2,seconds=60"


# Two of the eight workers cannot compute these prompts as fast as they arrive; four can.
FLOOD: Final = (
    "chat-flood:rate=20,isl=600,osl=150,flood_rate=16,flood_isl=5000,flood_at=0.3,flood_seconds=20,seconds=60"
)
# In the order in which they run.
LINES: Final[Mapping[str, Line]] = {
    "gpus": Line("eight GPUs of one kind", command=("nvidia-smi", "-L"), limit_s=SHORT_S),
    "doctor": Line(
        "what a worker needs", Part("libs.cli.main", ("doctor", "--engine", "vllm"), False), limit_s=SHORT_S
    ),
    "steps": Line(
        "vLLM's steps against the profile",
        Part("load.gpu.engine_steps", ("--engine", "vllm"), True, True),
        limit_s=STEPS_S,
    ),
    "low": Line("latency at rest", load=Load(4, 4, 0, steady(6))),
    "middle": Line("half of what four prefill workers compute", load=Load(4, 4, 0, steady(16))),
    "high": Line("nearly all of what they compute", load=Load(4, 4, 0, steady(28))),
    "mixed": Line("the same requests without a split", load=Load(0, 0, 8, steady(16))),
    "moves": Line("role moves under load", load=Load(4, 4, 0, steady(16), moves=30), limit_s=MOVES_S),
    "flood": Line("a flood of long prompts, roles fixed", load=Load(2, 6, 0, FLOOD)),
    "flood-auto": Line("the same flood with the planner", load=Load(2, 6, 0, FLOOD, auto=True)),
}


def expected(load: Load, hardware: Hardware, *, kv_mb: int, link_gbps: float) -> dict[str, Any]:
    """Return the lab's figures for a load, without its role moves."""
    trace = requests_of(load.trace, SEED)
    experiment = Experiment(
        trace,
        replace(hardware, profile=replace(hardware.profile, kv_memory_bytes=kv_mb << 20)),
        len(load.roles),
        parse_slo(SLO),
        link_gbps=link_gbps,
        chunk_tokens=CHUNK_TOKENS,
        max_sequences=SEQUENCES,
    )
    _, result = run(experiment, Policy("fulcrum", lambda _: load.roles, planned=load.auto))
    answers = [each for each in result.answers if each.outcome is LabOutcome.COMPLETED]
    return {
        "requests": len(trace.requests),
        "answered": len(answers),
        "ttft_ms": percentiles([each.ttft_ns / 1e6 for each in answers]),
        "tpot_ms": percentiles([each.tpot_ns / 1e6 for each in answers if each.tpot_ns]),
    }


def serving(load: Load, options: argparse.Namespace) -> Part:
    """Return the command of a serving line."""
    shape = {"--prefill": load.prefill, "--decode": load.decode, "--mixed": load.mixed, "--trace": load.trace,
             "--moves": load.moves, "--sequences": SEQUENCES, "--kv-mb": options.kv_mb}  # fmt: skip
    words = [str(word) for pair in shape.items() for word in pair] + ["--auto"] * load.auto
    if options.rehearse:
        words += ["--engine", "sim", "--profile", options.hardware.profile.name]
        words += ["--link-gbps", str(options.link_gbps)]
    else:
        words += ["--engine", "vllm", "--dummy", "--gpu-share", str(options.gpu_share)]
        words += ["--model", str(options.model or OWN_MODEL)]
    return Part("load.gpu.serve", tuple(words), takes_device=False)


def card() -> dict[str, Any]:
    """Return the GPUs and their driver's version; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"gpus": [], "driver": None}
    rows = [[word.strip() for word in line.split(",")] for line in output.splitlines() if line.strip()]
    return {"gpus": [f"{name}, {memory}" for name, _, memory in rows], "driver": rows[0][1] if rows else None}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def revision() -> str | None:
    """Return the commit of this checkout; None outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def run_command(name: str, command: Sequence[str], limit_s: float) -> Outcome:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Outcome(name, 1, None, [str(error)])
    return Outcome(name, done.returncode, None, done.stdout.splitlines())


def judgements(name: str, line: Line, outcome: Outcome, lab: Mapping[str, Any] | None, gpu: str) -> list[Judgement]:
    """Compare each figure of a line with the lab's."""
    if outcome.exit_code:
        return [Judgement(name, None, None, ok=False, means=f"ended with code {outcome.exit_code}: see its tail")]
    if line.load is not None:
        figures = outcome.figures if isinstance(outcome.figures, dict) else {}
        found = judge_serving(figures, lab or {})
        return found + (judge_moves(figures.get("moving", {}), line.load.moves) if line.load.moves else [])
    if name == "steps":
        rows: list[Row] = against_profile(gpu, {"vllm_steps": outcome.figures})
        return judge_steps(rows)
    if name == "gpus":
        count = sum(text.startswith("GPU ") for text in outcome.tail)
        return [Judgement("GPUs", count, GPUS, ok=count >= GPUS, means="see CUDA_VISIBLE_DEVICES and the driver's log")]
    return [Judgement(name, 0, 0, ok=True)]


def chosen(options: argparse.Namespace) -> dict[str, Line]:
    """Return the lines to run. A rehearsal has only the serving lines, with fewer workers."""
    found = {name: line for name, line in LINES.items() if not options.lines or name in options.lines}
    if not options.rehearse:
        return found
    return {name: replace(line, load=line.load.rehearsed()) for name, line in found.items() if line.load is not None}


def part_of(line: Line, options: argparse.Namespace) -> Part | None:
    return line.part if line.load is None else serving(line.load, options)


def words_of(line: Line, part: Part | None) -> list[str]:
    return list(line.command) if part is None else ["python", "-m", *part.command("cuda:0", line.limit_s)]


def lab_figures(line: Line, options: argparse.Namespace) -> dict[str, Any] | None:
    if line.load is None:
        return None
    return expected(line.load, options.hardware, kv_mb=options.kv_mb, link_gbps=options.link_gbps)


def print_plan(options: argparse.Namespace) -> None:
    whole_s = 0.0
    print(f"profile {options.hardware.profile.name}, KV over {options.link_gbps:g} Gbit/s a worker\n")
    for name, line in chosen(options).items():
        part = part_of(line, options)
        print(f"{name:<11} {line.subject}\n            {' '.join(words_of(line, part))}")
        found = lab_figures(line, options)
        if found is not None:
            print(f"            the lab expects {described(found)}")
        whole_s += line.limit_s
    print(f"\nat most {whole_s / 60:.0f} minutes by their limits")


def described(figures: Mapping[str, Any]) -> str:
    times = [
        f"{label} {two['p50']:.{digits}f} and {two['p99']:.{digits}f} ms"
        for label, digits in (("TTFT", 0), ("TPOT", 1))
        if (two := figures.get(f"{label.lower()}_ms"))
    ]
    return f"{figures['answered']} of {figures['requests']} answered, {', '.join(times)} at p50 and p99"


@contextmanager
def model_of(options: argparse.Namespace) -> Iterator[None]:
    """Write a model of Llama-8B's shape for all lines, unless the options name one or no line needs one.

    It has no weights, and each worker draws random ones. Weights drawn here would occupy the first GPU for the whole
    run.
    """
    if options.rehearse or options.model is not None:
        yield
        return
    from libs.testing.engines.real_model import real_model_folder  # noqa: PLC0415 - it imports torch and transformers
    from load.gpu.shapes import LLAMA_8B, write_shape  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="eight-") as folder:
        tokenizer = options.tokenizer or real_model_folder()
        options.model = options.written = write_shape(Path(folder) / LLAMA_8B, LLAMA_8B, tokenizer)
        yield


def run_line(name: str, line: Line, options: argparse.Namespace, gpu: str) -> dict[str, Any]:
    """Run one line, and return its record."""
    part, lab, began_s = part_of(line, options), lab_figures(line, options), time.monotonic()
    if part is None:
        outcome = run_command(name, line.command, line.limit_s)
    else:
        outcome = run_part(name, part, "cuda:0", line.limit_s)
    judged = judgements(name, line, outcome, lab, gpu)
    return {
        "command": words_of(line, part),
        "seconds": round(time.monotonic() - began_s, 1),
        "expected_by_lab": lab,
        "judgements": [asdict(each) for each in judged],
        **asdict(outcome),
    }


def key_of(line: Line, options: argparse.Namespace, machine: Mapping[str, Any]) -> str:
    """Return a key that equals the one of an earlier record if that record is still valid.

    The folder of the written model is left out, since it differs in each run.
    """
    words = [OWN_MODEL if word == str(options.written) else word for word in words_of(line, part_of(line, options))]
    return json.dumps([words, machine["card"], machine["versions"], options.hardware.profile.name, options.link_gbps])


def kept_lines(file: Path, again: Sequence[str]) -> dict[str, Any]:
    """Return the lines of an earlier run that ended without an error, except those that must run again."""
    if not file.exists():
        return {}
    lines = json.loads(file.read_text())["lines"]
    return {name: each for name, each in lines.items() if not each["exit_code"] and name not in again}


def print_line(name: str, record: Mapping[str, Any]) -> None:
    print(f"{name:<11} {record['seconds']:.0f} s")
    for each in record["judgements"]:
        sign = "as expected" if each["ok"] else f"OFF: {each['means']}"
        expectation = "" if each["expected"] is None else f", expected {each['expected']}"
        print(f"            {each['what']} {each['found']}{expectation}: {sign}")


def main(options: argparse.Namespace) -> int:
    """Run all lines, and return the number of lines that failed or have a figure outside its band."""
    quiet()
    machine = {"card": card(), "versions": versions()}
    gpu = (machine["card"]["gpus"] or [""])[0]
    found = None if options.device else profile_of(gpu)
    options.hardware = resolve(MODEL, options.device or "h200") if found is None else Hardware(found, True)
    if options.dry_run:
        print_plan(options)
        return 0
    if not gpu and not options.rehearse:
        print("no GPU: nvidia-smi names none here; --dry-run and --rehearse need none", file=sys.stderr)
        return 1
    out = options.out or (REHEARSAL_FILE if options.rehearse else RESULT_FILE)
    kept, commit = kept_lines(out, options.again), revision()
    result = {**machine, "revision": commit, "rehearsal": options.rehearse, "lines": {}}
    with model_of(options):
        for name, line in chosen(options).items():
            key = key_of(line, options, machine)
            record = kept.get(name)
            if record is None or record["key"] != key:
                record = {"key": key, "revision": commit, **run_line(name, line, options, gpu)}
            result["lines"][name] = record
            # Later lines of the earlier run are written too, so that they are not lost if this run is interrupted.
            whole = {**result, "lines": {**kept, **result["lines"]}}
            part = out.with_suffix(".part")
            part.write_text(json.dumps(whole, indent=1) + "\n")
            part.replace(out)
            print_line(name, record)
    return sum(1 for each in result["lines"].values() if is_off(each, rehearsal=options.rehearse))


def is_off(record: Mapping[str, Any], *, rehearsal: bool) -> bool:
    """Return whether a line failed or has a figure outside its band.

    Latencies of a rehearsal are ignored, because they depend on this machine's cores.
    """
    return any(not each["ok"] and not (rehearsal and each["what"].startswith(TIMED)) for each in record["judgements"])


def parser() -> argparse.ArgumentParser:
    made = bench_parser(
        __doc__, dry_run=(False, "print the plan with the lab's figures, and end"),
        rehearse=(False, "run the serving lines on simulated GPUs"), kv_mb=(40 << 10, "KV memory of a worker"),
        gpu_share=(0.85, "of a GPU's memory that a worker may take"),
        link_gbps=(80.0, "of KV between two workers, in Gbit/s, as the lab has it"),
        device=("", "whose profile the lab takes, such as h100; by default this machine's, or h200"),
    )  # fmt: skip
    made.add_argument("--lines", nargs="+", choices=list(LINES), metavar="NAME", help="only these")
    made.add_argument("--again", nargs="+", choices=list(LINES), default=[], metavar="NAME", help="run these again")
    made.add_argument("--model", type=Path, help="a folder of Llama-8B's shape, in place of our own")
    made.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer our own model takes")
    made.set_defaults(written=None)
    made.add_argument("--out", type=Path, help=f"{RESULT_FILE} by default, or {REHEARSAL_FILE} of a rehearsal")
    return made


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
