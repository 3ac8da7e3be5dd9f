"""`python -m load.engine.gpu_engine`: everything about the torch engine that wants a GPU, in one command.

The engine's contract suite in float32, then the benches of engine, KV hand-off, step times, saturation and phase time,
each in a process of its own; a failure of one does not stop the others. Writes one JSON object with their raw figures,
which is also the last line of stdout.
"""

import argparse
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TAIL_LINES = 20
PART_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """One command and what came of it."""

    name: str
    exit_code: int
    figures: object
    """What its last line of JSON says, also where the bench found a fault in it."""
    tail: list[str]


def run(name: str, command: list[str]) -> Part:
    """Run one part; exit code 124 where it took too long."""
    print(f"{name}: {' '.join(command)}", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PART_TIMEOUT_S,
            check=False,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = 124, (late.stdout or b"").decode(errors="replace")
    lines = output.splitlines()
    return Part(name, code, figures_of(lines), lines[-TAIL_LINES:])


def figures_of(lines: list[str]) -> object:
    """The last line that is a JSON object; None without one."""
    for line in reversed(lines):
        if line.startswith("{"):
            with suppress(ValueError):  # the end of a process that was killed may be half a line
                return json.loads(line)
    return None


def commands(device: str) -> dict[str, list[str]]:
    """Modules and their arguments, by part."""
    suite = "tests/contract/engine"
    return {
        "contract": ["pytest", suite, "-k", "torch", "--device", device, "--timeout", str(PART_TIMEOUT_S)],
        "bench_engine": ["load.engine.bench_engine", "--device", device, "--continuous", "--long"],
        "bench_kv": ["load.engine.bench_kv", "--device", device],
        "bench_steps": ["load.engine.bench_steps", "--device", device],
        "bench_tune": ["load.engine.bench_tune", "--device", device, "--only", "torch-smollm2"],
        "bench_phase": ["load.engine.bench_phase", "--device", device, "--engines", "torch"],
    }


def main(options: argparse.Namespace) -> int:
    """Run all parts on one GPU; the number of those that failed."""
    if not torch.cuda.is_available():
        print("no GPU: torch sees no CUDA device here", file=sys.stderr)
        return 1
    device = options.device
    parts = [run(name, command) for name, command in commands(device).items()]
    found = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "parts": [asdict(part) for part in parts],
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for part in parts:
        print(f"{part.name:<14}{'passed' if not part.exit_code else f'failed ({part.exit_code})'}")
    print(json.dumps(found))
    return sum(1 for part in parts if part.exit_code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=Path("gpu_engine.json"))
    sys.exit(main(parser.parse_args()))
