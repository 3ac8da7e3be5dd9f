"""`python -m load.gpu.bench_gpu`: run everything that needs a GPU in one command, without a network.

The parts are the engines' contract suites in float32, steps of a plain Llama-8B and of the engines, phase time against
CUDA events, KV hand-off, and role moves. With vLLM installed, they also include its contract suite, its steps and a
whole suite on one GPU. Each part runs in its own process with a time limit. If one fails, the others still run. Figures
are written after each part. Steps are compared with the shipped profile of the GPU, if there is one.

    python -m load.gpu.bench_gpu --parts plain_steps phase        # two of them
    python -m load.gpu.bench_gpu --list                           # their names
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from load.gpu.against_profile import against_profile, print_table

ROOT: Final = Path(__file__).parents[2]
TAIL_LINES: Final = 20
# The default limit of a part, which is below the ten minutes to which some environments limit a command.
LIMIT_S: Final = 560.0
# A part that watches the time ends this much before its limit, so that it can report what it has measured.
SPARE_S: Final = 30.0
SUITE: Final = "tests/contract/engine"
# All tests of a run share one event loop, because they share their EngineCores.
ONE_LOOP: Final = tuple(
    part
    for scope in ("asyncio_default_test_loop_scope", "asyncio_default_fixture_loop_scope")
    for part in ("-o", f"{scope}=session")
)


@dataclass(frozen=True, slots=True)
class Part:
    module: str
    arguments: tuple[str, ...]
    takes_device: bool = True
    watches_time: bool = False
    vllm: bool = False
    env: dict[str, str] = field(default_factory=dict)

    def command(self, device: str, limit_s: float) -> list[str]:
        """Return the command line after `python -m`."""
        limit = ["--limit-s", f"{max(limit_s - SPARE_S, SPARE_S):.0f}"] if self.watches_time else []
        return [self.module, *self.arguments, *(["--device", device] if self.takes_device else []), *limit]


# In the order in which they run.
PARTS: Final = {
    "contract": Part("pytest", (SUITE, "-k", "torch")),
    "plain_steps": Part("load.gpu.plain_steps", (), watches_time=True),
    "engine_steps": Part("load.gpu.engine_steps", ("--engine", "torch"), watches_time=True),
    "phase": Part("load.engine.bench_phase", ("--engines", "torch")),
    "engine": Part("load.engine.bench_engine", ("--continuous", "--long")),
    "kv": Part("load.engine.bench_kv", ()),
    # Exact answers need float32. bfloat16 rounds so coarsely that the batch would decide between nearly equal logits.
    "role": Part(
        "load.planner.bench_role",
        ("--only", "torch-tiny"),
        takes_device=False,
        env={"FULCRUM_WORKER_DTYPE": "float32"},
    ),
    "vllm_contract": Part("pytest", ("-m", "vllm", *ONE_LOOP, SUITE), vllm=True),
    "vllm_steps": Part("load.gpu.engine_steps", ("--engine", "vllm"), watches_time=True, vllm=True),
    "vllm_kv_path": Part("load.gpu.kv_path", (), vllm=True),
    "vllm_serve": Part(
        "load.gpu.serve",
        ("--engine", "vllm", "--decode", "2", "--moves", "20", "--gpu-share", "0.28", "--kv-mb", "5120"),
        takes_device=False,
        vllm=True,
    ),
    "vllm_role": Part(
        "load.planner.bench_role",
        ("--only", "vllm-tiny"),
        takes_device=False,
        vllm=True,
        env={"FULCRUM_WORKER_DTYPE": "float32"},
    ),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    exit_code: int
    """The exit code; 124 if the part exceeded its limit."""
    figures: object
    """The part's last line of JSON. It is read even if the part failed."""
    tail: list[str]


def run(name: str, part: Part, device: str, limit_s: float) -> Outcome:
    command = part.command(device, limit_s)
    print(f"{name}: python -m {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={**os.environ, "FULCRUM_WORKER_DEVICE": device, **part.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, (late.stdout or b"").decode(errors="replace")
    lines = output.splitlines()
    return Outcome(name, code, figures_of(lines), lines[-TAIL_LINES:])


def figures_of(lines: list[str]) -> object:
    """Return the last line that is a JSON object; None if there is none."""
    for line in reversed(lines):
        if line.startswith("{"):
            with suppress(ValueError):  # a killed process may have written half a line
                return json.loads(line)
    return None


def chosen(names: list[str] | None, *, has_vllm: bool) -> dict[str, Part]:
    """Return the parts with these names in their order; without names, all parts that can run here."""
    return {name: part for name, part in PARTS.items() if (name in names if names else has_vllm or not part.vllm)}


def main(options: argparse.Namespace) -> int:
    """Run the parts on one GPU, and return the number of failures."""
    if options.list:
        print(
            "\n".join(
                f"{name:<14} python -m {' '.join(part.command('cuda:0', LIMIT_S))}" for name, part in PARTS.items()
            )
        )
        return 0
    if not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here", file=sys.stderr)
        return 1
    gpu = torch.cuda.get_device_name(options.device)
    found: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "parts": []}
    outcomes = []
    for name, part in chosen(options.parts, has_vllm=find_spec("vllm") is not None).items():
        outcomes.append(run(name, part, options.device, options.limit_s))
        found["parts"] = [asdict(each) for each in outcomes]
        found["against_profile"] = against_profile(gpu, {each.name: each.figures for each in outcomes})
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    for each in outcomes:
        print(f"{each.name:<14}{'passed' if not each.exit_code else f'failed ({each.exit_code})'}")
    print_table(found.get("against_profile", []))
    print(json.dumps(found))
    return sum(1 for each in outcomes if each.exit_code)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda:0")
    made.add_argument("--parts", nargs="+", choices=list(PARTS), metavar="NAME", help="only these")
    made.add_argument("--list", action="store_true", help="name the parts and their commands, and end")
    made.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a part")
    made.add_argument("--out", type=Path, default=Path("gpu.json"))
    return made


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
