// What the wire calls things: fields of a window, phases in the order they are stacked, roles by number.

export const COVERED = 0, PREFILL = 1, DECODE = 2, KV_WAIT = 3; // as the service sends them
export const GPU_NS = 4, PROVISIONAL_NS = 5; // added by sums: what the GPUs could have, and what may still change
export const ENCODE = 6; // the part of prefill that encoded images
export const FIELDS = 7;

export const PHASES = ["prefill", "decode", "kv_wait", "idle"];
export const PHASE_NAMES = { prefill: "prefill", decode: "decode", kv_wait: "KV wait", idle: "idle" };
export const ROLES = ["", "prefill", "decode", "mixed", "standby"];
export const PROVISIONAL_BIT = 0x80;

export const LIVE_WINDOW_MS = 100;
export const LIVE_COLUMNS = 1200; // two minutes, as many as the service keeps
/** How far charts reach back: windows of which length, and how many. */
export const RANGES = {
  "30s": { window: "100ms", windowMs: 100, columns: 300 },
  "2m": { window: "100ms", windowMs: 100, columns: 1200 },
  "15m": { window: "1s", windowMs: 1000, columns: 900 },
  "1h": { window: "10s", windowMs: 10000, columns: 360 },
  "6h": { window: "10s", windowMs: 10000, columns: 2160 },
  "2d": { window: "60s", windowMs: 60000, columns: 2880 },
};

/** Windows that the service keeps, the finest first; the last of them take as long to go as they are many. */
const TIERS = [
  { window: "100ms", windowMs: 100, kept: 1200 },
  { window: "1s", windowMs: 1000, kept: 3600 },
  { window: "10s", windowMs: 10000, kept: 2160 },
  { window: "60s", windowMs: 60000, kept: 2880 },
];
const LEAST_COLUMNS = 2;
export const KEPT_MS = TIERS.at(-1).windowMs * TIERS.at(-1).kept;

/** A range that ended so long ago, in the finest windows no finer than its own that are still kept of it. */
export function rangeAt(range, ageMs) {
  const spanMs = range.windowMs * range.columns;
  if (!ageMs) return range;
  const tier = TIERS.find(({ windowMs, kept }) => windowMs >= range.windowMs && windowMs * kept >= ageMs + spanMs) ?? TIERS.at(-1);
  if (tier.windowMs === range.windowMs) return range;
  return { ...tier, columns: Math.max(LEAST_COLUMNS, Math.ceil(spanMs / tier.windowMs)) };
}

/** The four phases of sums as a list beside PHASES; they add exactly to covered. */
export function phaseTimes(sums) {
  const idle = sums[COVERED] - sums[PREFILL] - sums[DECODE] - sums[KV_WAIT];
  return [sums[PREFILL], sums[DECODE], sums[KV_WAIT], idle];
}

export const millis = (ns) => `${(ns / 1e6).toFixed(ns < 1e8 ? 2 : 0)} ms`;

export const percent = (part, whole, digits = 1) => (whole > 0 ? `${((100 * part) / whole).toFixed(digits)} %` : "–");

/** Never more than it is: 99.9 % are not 100 %. */
export const coverageText = (sums) => (sums[GPU_NS] > 0 ? `${Math.floor((100 * sums[COVERED]) / sums[GPU_NS] + 1e-9)} %` : "–");

export function ratioText(sums) {
  if (!(sums[DECODE] > 0)) return "–"; // without decode there is no ratio
  const ratio = sums[PREFILL] / sums[DECODE];
  return ratio >= 100 ? ratio.toFixed(0) : ratio >= 10 ? ratio.toFixed(1) : ratio.toFixed(2);
}
