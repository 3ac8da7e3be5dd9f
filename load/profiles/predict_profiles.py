"""`python -m load.profiles.predict_profiles`: what aiconfigurator-core predicts for the shipped deployment profiles.

Needs the package beside this project (Apache-2.0, NVIDIA's measured kernels composed into steps). Writes the figures
into the profiles. stdout: a table, then one JSON object as the last line.
"""

import json
from importlib.metadata import version
from typing import Any, Final

from libs.launch.profile import FOLDER, load_profile, profile_names
from load.profiles.profile_sources import SETUPS

PROMPTS: Final = (1024, 8192)
BATCHES: Final = (1, 32, 64)
CONTEXT_TOKENS: Final = 2048


def predict(name: str) -> dict[str, Any]:
    """Of each worker of a profile."""
    from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found]  # noqa: PLC0415

    asked = SETUPS[load_profile(name).rehearsal]
    handle = EngineHandle.compile(asked.model, asked.system, "vllm", tp_size=asked.gpus, **asked.options)
    return {
        "source": f"aiconfigurator-core {version('aiconfigurator-core')}, {asked.system}, vllm, TP{asked.gpus}",
        "model": f"{asked.model} ({asked.types})",
        "prefill_ms": {str(n): round(handle.predict_prefill_latency(1, n, 0), 1) for n in PROMPTS},
        "decode_ms": {str(n): round(handle.predict_decode_latency(n, CONTEXT_TOKENS), 1) for n in BATCHES},
        "decode_context_tokens": CONTEXT_TOKENS,
    }


def main() -> None:
    """Predict, print, write."""
    every = {}
    print(f"{'profile':<30}" + "".join(f"{f'prefill {n}':>14}" for n in PROMPTS), end="")
    print("".join(f"{f'decode x{n}':>12}" for n in BATCHES))
    for name in profile_names():
        every[name] = found = predict(name)
        file = FOLDER / f"{name}.json"
        kept = json.loads(file.read_text()) | {"predicted": found}
        file.write_text(json.dumps(kept, indent=2) + "\n")
        figures = [f"{ms:>11.1f} ms" for ms in found["prefill_ms"].values()]
        figures += [f"{ms:>9.1f} ms" for ms in found["decode_ms"].values()]
        print(f"{name:<30}" + "".join(figures))
    print(json.dumps(every))


if __name__ == "__main__":
    main()
