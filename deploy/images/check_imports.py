r"""Check on a machine without a GPU that a vLLM image can start.

Import what a worker imports, and report what is missing. Run this as a worker runs, read-only, as the image's user,
without a network (`make test-image`):

    docker run --rm -i --read-only --tmpfs /tmp --network none -v compiled:/cache fulcrum/vllm:dev \
        python - <deploy/images/check_imports.py

Each part is imported in its own process. A part that fails only for lack of the driver (libcuda) is listed, but does
not count as a failure. The last line is JSON.
"""

import json
import os
import shutil
import subprocess
import sys

PARTS = {
    "torch": "import torch; assert torch.version.cuda, 'a build for CPUs'",
    "triton": "import triton",
    "flashinfer": "import flashinfer, flashinfer.sampling",
    "flashinfer writes its cache": (
        "import flashinfer.jit.env as env, pathlib; folder = pathlib.Path(env.FLASHINFER_WORKSPACE_DIR);"
        " folder.mkdir(parents=True, exist_ok=True); (folder / 'written').touch()"
    ),
    "nvcc": "import flashinfer.jit.cpp_ext as cpp; print(cpp.get_cuda_version())",
    "default model's weights": (
        "import accelerate, gguf, transformers, libs.engine.torch.convert as convert; assert convert.find_gguf()"
    ),
    "nixl": "import nixl._api",
    "ucx of nixl": "import nixl_cu13._bindings",
    "vllm": "import vllm",
    "vllm's sampler": "import vllm.v1.sample.ops.topk_topp_sampler",
    "vllm's flashinfer backend": "import vllm.v1.attention.backends.flashinfer",
    "vllm's flash attention": "import vllm.v1.attention.backends.flash_attn",
    "vllm's compiled operations": "import vllm._C_stable_libtorch, vllm._moe_C_stable_libtorch",
    "vllm's NIXL connector": "import vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "our worker": "import libs.engine.vllm.launch, libs.engine.vllm.scheduler",
    "our plug-in": "import importlib.metadata as m; [e.load() for e in m.entry_points(group='vllm.general_plugins')]",
}
TOOLS = ("g++", "gcc", "ninja", f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc")
WANTS_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1", "Found no NVIDIA driver", "No CUDA GPUs are available")
LIMIT_S = 300


def tried(code: str) -> tuple[str, str]:
    """Return ("works" | "wants the driver" | "fails", the last line of the output) for code run in its own process."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line for line in (run.stderr or run.stdout).splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    if run.returncode == 0:
        return "works", run.stdout.strip()
    return ("wants the driver" if any(word in run.stderr for word in WANTS_DRIVER) else "fails"), last


def main() -> None:
    """Try all parts. Exit with code 1 if one fails for another reason than the missing driver."""
    found: dict[str, dict[str, str]] = {}
    for tool in TOOLS:
        found[tool] = {"state": "works" if shutil.which(tool) else "fails", "says": shutil.which(tool) or "not there"}
    for name, code in PARTS.items():
        state, says = tried(code)
        found[name] = {"state": state, "says": says}
    width = max(map(len, found))
    for name, each in found.items():
        print(f"{name:{width}}  {each['state']:16}  {each['says'][:160]}")
    failed = [name for name, each in found.items() if each["state"] == "fails"]
    print(json.dumps({"bench": "image", "failed": failed, "parts": found}))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
