#!/usr/bin/env bash
# MLPerf LoadGen with token latencies: answers of one token get a mean time per output token of decades, with negative
# samples among them.
# Met by: whoever measures a prefill pool, a classifier or max_tokens=1 with LoadGen's LLM mode. The TPOT limit is then
# judged by these figures.
set -euo pipefail
T=$(mktemp -d); trap 'rm -rf "$T"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
python3 -m venv "$T/v" || { echo "needs python3-venv"; exit 2; }
"$T/v/bin/python" -m pip install -q mlcommons-loadgen==6.0.17
cat > "$T/run.py" <<'PY'
import array, importlib.metadata as metadata, re, sys, threading, time
import mlperf_loadgen as loadgen

folder, tokens = sys.argv[1], int(sys.argv[2])
threads = []


def answer(samples):
    for sample in samples:
        time.sleep(0.02)
        data = array.array("i", range(tokens))
        address = data.buffer_info()[0]
        loadgen.FirstTokenComplete([loadgen.QuerySampleResponse(sample.id, address, 4)])
        time.sleep(0.01 * (tokens - 1))
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(sample.id, address, 4 * tokens, tokens)])


def issue(samples):
    threads.append(threading.Thread(target=answer, args=(samples,)))
    threads[-1].start()


settings = loadgen.TestSettings()
settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
settings.server_target_qps, settings.min_duration_ms, settings.min_query_count = 10, 1000, 10
settings.use_token_latencies, settings.ttft_latency, settings.tpot_latency = True, 2 * 10**9, 10**9
output = loadgen.LogOutputSettings()
output.outdir, output.copy_summary_to_stdout = folder, False
log = loadgen.LogSettings()
log.log_output = output
sut = loadgen.ConstructSUT(issue, lambda: None)
qsl = loadgen.ConstructQSL(4, 4, lambda _: None, lambda _: None)
loadgen.StartTestWithLogSettings(sut, qsl, settings, log)
for thread in threads:
    thread.join()
loadgen.DestroyQSL(qsl)
loadgen.DestroySUT(sut)
summary = open(f"{folder}/mlperf_log_summary.txt").read()


def figure(label):
    return float(re.search(rf"^{label}\s*:\s*(\S+)$", summary, re.M).group(1))


seen = {label: figure(label) for label in (r"Min Time per Output Token \(ns\)", r"Mean Time per Output Token \(ns\)", "Completed tokens per second")}
print(f"answers of {tokens}:", {label.replace(chr(92), ""): value for label, value in seen.items()})
low, mean, rate = seen.values()
if tokens == 1:
    assert abs(mean) > 10**15 and rate == 0, "the behaviour has changed"
else:
    assert low > 9 * 10**6 and mean < 10**9 and rate > 0, "the behaviour has changed"
PY
mkdir "$T/six" "$T/one"
echo "version:     mlcommons-loadgen 6.0.17"
echo "expectation: requests of one token, which have no second one, are left out of TPOT, or count as 0"
echo "behaviour:   their TPOT is negative, the mean overflows, and throughput is 0 tokens/s; six tokens are measured well"
"$T/v/bin/python" "$T/run.py" "$T/six" 6
"$T/v/bin/python" "$T/run.py" "$T/one" 1
