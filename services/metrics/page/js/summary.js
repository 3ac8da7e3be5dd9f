// The figures at the top: the ratio, the shares behind it, how much is known, and what waits.

import { COVERED, coverageText, GPU_NS, percent, PHASE_NAMES, PHASES, phaseTimes, PROVISIONAL_NS, ratioText } from "./phases.js";
import { queueOf } from "./queues.js";

const $ = (id) => document.getElementById(id);

/** `sums` are of a window of `windowMs` that ended at `asOfMs`; `depths` is null for a time whose queues are not kept. */
export function drawSummary(sums, depths, queues, { asOfMs, windowMs, scope }) {
  const covered = sums[COVERED];
  const ratio = ratioText(sums);
  $("ratio").textContent = ratio;
  $("ratio").nextElementSibling.hidden = ratio === "–";
  const times = phaseTimes(sums);
  for (const [index, phase] of PHASES.entries()) {
    $(`bar-${phase}`).style.flexGrow = covered ? times[index] / covered : 0;
    $(`share-${phase}`).textContent = percent(times[index], covered);
    $(`bar-${phase}`).title = `${PHASE_NAMES[phase]} ${percent(times[index], covered)}`;
  }
  $("coverage").textContent = coverageText(sums);
  $("coverage").classList.toggle("poor", covered < 0.99 * sums[GPU_NS]);
  $("provisional").textContent = sums[PROVISIONAL_NS] ? `${percent(sums[PROVISIONAL_NS], covered, 0)} provisional` : "";
  $("gpus").textContent = Math.round(sums[GPU_NS] / (windowMs * 1e6));
  drawQueues(depths, queues, scope);
  const data = $("figures").dataset;
  data.asOfUnixMs = asOfMs;
  data.windowMs = windowMs;
  data.scope = scope;
  data.gpuNs = [covered, ...times].join();
  data.coverage = sums[GPU_NS] ? covered / sums[GPU_NS] : 0;
}

function drawQueues(depths, queues, scope) {
  if (!depths) {
    $("queue-prefill").textContent = $("queue-decode").textContent = "–";
    $("running-decode").textContent = "";
    return;
  }
  for (const phase of ["prefill", "decode"]) {
    const [, waiting = 0, promptTokens = 0] = depths.get(`phase:${phase}`) ?? [];
    const atWorkers = { requests: waiting, tokens: promptTokens };
    const found = queueOf(queues, scope, phase);
    const queue = found === undefined ? atWorkers : found;
    $(`queue-${phase}`).textContent = queue ? `${queue.requests.toLocaleString("en")} requests · ${queue.tokens.toLocaleString("en")} tokens` : "unknown";
  }
  const [running = 0, , , awaitingKv = 0] = depths.get("phase:decode") ?? [];
  $("running-decode").textContent = queueOf(queues, scope, "decode") === null ? "" : `${running} running, ${awaitingKv} await KV`;
}
