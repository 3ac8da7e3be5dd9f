#!/usr/bin/env bash
# safetensors: the same tensors with the same metadata are not the same bytes from one save to the next.
# Met by: model stores that address shards by content hash (hub, OCI layers, peer caches), and by checks that a
# conversion is reproducible. One key of metadata, which transformers writes, hides it.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q safetensors==0.8.0 numpy==2.4.6
cat > "$T/run.py" <<'PY'
import hashlib

import numpy, safetensors
from safetensors.numpy import load, save

tensors = {"w": numpy.arange(6, dtype=numpy.float32).reshape(2, 3)}
keys = {"format": "pt", "model": "m", "step": "1", "source": "s", "dtype": "f32", "author": "a"}


def hashes(metadata):
    return len({hashlib.sha256(save(tensors, metadata)).hexdigest() for _ in range(32)})


seen = {"no metadata": hashes(None), "one key": hashes({"format": "pt"}), "six keys": hashes(keys)}
assert (load(save(tensors, keys))["w"] == tensors["w"]).all()
print("version:     safetensors", safetensors.__version__)
print("expectation: 32 saves of the same content give one SHA-256; the header is sorted")
print("behaviour:   the metadata's keys are written in a random order")
print("output (different hashes of 32 saves):", seen)
assert seen["no metadata"] == 1 and seen["one key"] == 1 and seen["six keys"] > 1, "the behaviour has changed"
PY
"$T/v/bin/python" "$T/run.py"
