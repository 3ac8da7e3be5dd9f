// What the wire calls things: fields of a window, phases in the order they are stacked, roles by number.

export const COVERED = 0, PREFILL = 1, DECODE = 2, KV_WAIT = 3; // as the service sends them
export const GPU_NS = 4, PROVISIONAL_NS = 5; // added by sums: what the GPUs could have, and what may still change
export const FIELDS = 6;

export const PHASES = ["prefill", "decode", "kv_wait", "idle"];
export const PHASE_NAMES = { prefill: "prefill", decode: "decode", kv_wait: "KV wait", idle: "idle" };
export const ROLES = ["", "prefill", "decode", "mixed", "standby"];
export const PROVISIONAL_BIT = 0x80;

export const LIVE_WINDOW_MS = 100;
export const LIVE_COLUMNS = 1200; // two minutes, as many as the service keeps
const MINUTE_MS = 60000;
const KEPT_MS = { "100ms": 2 * MINUTE_MS, "1s": 60 * MINUTE_MS, "10s": 360 * MINUTE_MS, "60s": 2880 * MINUTE_MS }; // by the service
const range = (window, windowMs, columns) => ({ window, windowMs, columns, keptMs: KEPT_MS[window] });
/** How far charts reach back: windows of which length, how many, and for how long such are kept. */
export const RANGES = {
  "30s": range("100ms", 100, 300),
  "2m": range("100ms", 100, 1200),
  "15m": range("1s", 1000, 900),
  "1h": range("10s", 10000, 360),
  "6h": range("10s", 10000, 2160),
  "2d": range("60s", 60000, 2880),
};

/** The four phases of sums as a list beside PHASES; they add exactly to covered. */
export function phaseTimes(sums) {
  const idle = sums[COVERED] - sums[PREFILL] - sums[DECODE] - sums[KV_WAIT];
  return [sums[PREFILL], sums[DECODE], sums[KV_WAIT], idle];
}

export const percent = (part, whole, digits = 1) => (whole > 0 ? `${((100 * part) / whole).toFixed(digits)} %` : "–");

export function ratioText(sums) {
  if (!(sums[DECODE] > 0)) return sums[PREFILL] > 0 ? "∞" : "–";
  const ratio = sums[PREFILL] / sums[DECODE];
  return ratio >= 100 ? ratio.toFixed(0) : ratio >= 10 ? ratio.toFixed(1) : ratio.toFixed(2);
}
