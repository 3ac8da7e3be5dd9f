// Columns of the tables: what rows are put in order by, and what is shown.

import { COVERED, coverageText, DECODE, GPU_NS, percent, PHASE_NAMES, PHASES, phaseTimes, PREFILL, PROVISIONAL_NS, ratioText } from "./phases.js";

const share = (part, whole) => (whole > 0 ? part / whole : undefined);
const phase = (name, index) => ({
  key: name,
  head: PHASE_NAMES[name],
  value: ({ sums }) => share(phaseTimes(sums)[index], sums[COVERED]),
  text: ({ sums }) => percent(phaseTimes(sums)[index], sums[COVERED], 0),
});
const depth = (key, head, place, tip) => ({ key, head, tip, value: ({ depths }) => depths?.[place], text: ({ depths }) => depths?.[place].toLocaleString("en") ?? "–" });

/** `value` of a row's figures undefined: not known. Names go up the alphabet, figures from the greatest down. */
export const COLUMNS = [
  { key: "name", head: "", value: ({ name }) => name },
  { key: "role", head: "role", of: ["worker"], value: ({ role }) => role, text: ({ role, life }) => (life ? `${role}, ${life}` : role) },
  { key: "node", head: "node", of: ["worker"], value: ({ node }) => node, text: ({ node }) => node },
  { key: "gpus", head: "GPUs", value: gpus, text: gpus },
  { key: "ratio", head: "P:D", of: ["model", "node"], tip: "prefill : decode GPU time", value: ratio, text: ({ sums }) => ratioText(sums) },
  ...PHASES.map(phase),
  {
    key: "coverage",
    head: "coverage",
    tip: "share of the time that telemetry covers; ~ where a running step may still change it",
    value: ({ sums }) => share(sums[COVERED], sums[GPU_NS]),
    text: ({ sums }) => coverageText(sums) + (sums[PROVISIONAL_NS] ? " ~" : ""),
  },
  { key: "trend", head: "trend" },
  depth("running", "running", 0, "requests being computed now"),
  depth("waiting", "waiting", 1, "requests that wait now"),
  depth("tokens", "tokens", 2, "of prompts waiting to be computed"),
  { key: "clock", head: "clock ahead", of: ["node"], tip: "of the median node's clock, to some milliseconds", value: ({ clock }) => clock, text: ({ clock }) => (clock === undefined ? "–" : `${clock.toFixed(1)} ms`) },
];

function gpus({ sums, spanNs }) {
  return Math.round(sums[GPU_NS] / spanNs);
}

function ratio({ sums }) {
  return sums[DECODE] ? sums[PREFILL] / sums[DECODE] : undefined;
}
