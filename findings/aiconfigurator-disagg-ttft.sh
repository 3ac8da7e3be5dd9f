#!/usr/bin/env bash
# AIConfigurator: the TTFT of a disaggregated estimate is 1.98 times its prefill step, whatever the load.
# Met by: whoever asks `aiconfigurator cli estimate` whether to disaggregate at a low load, or compares its TTFT with a
# measurement. One user, with one or with eight prefill workers, is told the TTFT of a queue: the step times 1.1 (a
# correction) times 1.8 (a queue of 15 to 20 requests a worker, by a comment in its source). The aggregated estimate of
# one user has no such factor, and so reads as half again as fast.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q aiconfigurator==0.12.0 aiconfigurator-core==0.12.0

estimate() { # MODE OPTIONS: TTFT in ms of a prompt of 4,000 tokens of an 8B model on H200 GPUs
  "$T/v/bin/aiconfigurator" cli estimate --model-path meta-llama/Meta-Llama-3.1-8B --system h200_sxm --backend vllm \
    --isl 4000 --osl 200 --no-color --log-level ERROR --estimate-mode "$@" 2>"$T/err" |
    sed -nE 's/.*TTFT: +([0-9.]+) ms.*/\1/p' | grep . || { cat "$T/err"; exit 2; }
}
disagg() { # PREFILL_WORKERS CONCURRENCY
  estimate disagg --prefill-tp-size 1 --decode-tp-size 1 --prefill-batch-size 1 --decode-num-workers 1 \
    --prefill-num-workers "$1" --decode-batch-size "$2"
}
{
  echo "aiconfigurator 0.12.0, TTFT in ms"
  step=$(estimate static_ctx --batch-size 1 --tp-size 1)
  echo "one prefill step: $step"
  echo "aggregated, 1 request at a time: $(estimate agg --batch-size 1 --tp-size 1)"
  for workers in 1 8; do
    for users in 1 16; do
      ttft=$(disagg "$workers" "$users")
      echo "disaggregated, $workers prefill, $users at a time: $ttft, $(python3 -c "print(round($ttft / $step, 2))") steps"
    done
  done
} | tee "$T/out"
# Seen with Python 3.11.
diff "$T/out" - <<'SEEN' && echo "as described"
aiconfigurator 0.12.0, TTFT in ms
one prefill step: 90.618
aggregated, 1 request at a time: 116.218
disaggregated, 1 prefill, 1 at a time: 179.424, 1.98 steps
disaggregated, 1 prefill, 16 at a time: 179.424, 1.98 steps
disaggregated, 8 prefill, 1 at a time: 179.424, 1.98 steps
disaggregated, 8 prefill, 16 at a time: 179.424, 1.98 steps
SEEN
