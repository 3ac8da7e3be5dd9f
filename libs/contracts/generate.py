"""Generate libs/contracts/pb from proto/: `make proto`."""

import re
import shutil
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "libs" / "contracts" / "pb"


def main() -> int:
    """Run protoc and point the generated imports into the package; returns protoc's exit code."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    sources = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    flags = [f"--{kind}_out={OUT}" for kind in ("python", "pyi", "grpc_python")]
    code: int = protoc.main(["protoc", f"-I{ROOT / 'proto'}", *flags, *sources])
    for path in OUT.rglob("*.py*"):
        text = path.read_text()
        # protoc emits imports relative to the proto root; ours lives inside this package.
        path.write_text(re.sub(r"^from fulcrum\.", "from libs.contracts.pb.fulcrum.", text, flags=re.MULTILINE))
    for path in OUT.rglob("*_pb2_grpc.py"):
        if "Stub" not in path.read_text():
            path.unlink()
    for folder in (OUT, *(path for path in OUT.rglob("*") if path.is_dir())):
        (folder / "__init__.py").touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
