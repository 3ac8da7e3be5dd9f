"""Generate libs/contracts/pb from proto/: `make proto`. With `--check`, only report whether anything would change."""

import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "libs" / "contracts" / "pb"


def generate(out: Path) -> int:
    """Run protoc and rewrite the generated imports into the package; return protoc's exit code."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sources = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    code: int = protoc.main(["protoc", f"-I{ROOT / 'proto'}", *flags, *sources])
    for path in out.rglob("*.py*"):
        text = path.read_text()
        # protoc emits imports relative to the proto root, but the generated code lives inside this package.
        path.write_text(re.sub(r"^from fulcrum\.", "from libs.contracts.pb.fulcrum.", text, flags=re.MULTILINE))
    for path in out.rglob("*_pb2_grpc.py"):
        if "Stub" not in path.read_text():
            path.unlink()
    for folder in (out, *(path for path in out.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()
    return code


def check() -> int:
    """Return 1 if the files in the package differ from what proto/ generates."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "pb"
        code = generate(fresh)
        made, kept = (
            {path.relative_to(root) for path in root.rglob("*.py*") if path.suffix != ".pyc"} for root in (fresh, OUT)
        )
        names = [str(path) for path in made & kept]
        _, differing, failed = filecmp.cmpfiles(fresh, OUT, names, shallow=False)
        wrong = sorted({*map(str, made ^ kept), *differing, *failed})
    if wrong:
        print(f"libs/contracts/pb is not what proto/ gives ({', '.join(wrong)}): run make proto", file=sys.stderr)
    return code or int(bool(wrong))


if __name__ == "__main__":
    sys.exit(check() if "--check" in sys.argv[1:] else generate(OUT))
