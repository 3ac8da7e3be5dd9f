// Numbers of the status in words. A dash is what is not known.

export const DASH = "–";

export const pressureText = (value) => (value == null ? "?" : value < 10 ? value.toFixed(2) : value.toFixed(0));

/** With at most `digits` digits behind the point, and no zeros at their end. */
const trimmed = (value, digits) => String(Number(value.toFixed(digits)));

/** Class by how near pressure is to 1, above which work grows into a queue. */
export const pressureClass = (value) => (value == null ? "unknown" : value > 1 ? "over" : value > 0.85 ? "near" : "calm");

export const share = (value) => (value == null ? DASH : `${trimmed(100 * value, value < 0.1 ? 1 : 0)}\u00a0%`); // no line begins with its sign

export const count = (value) => (value == null ? DASH : Math.round(value).toLocaleString("en"));

/** 950, 12.3k, 4.1M. */
export function short(value) {
  if (value == null) return DASH;
  const size = Math.abs(value);
  if (size < 1000) return trimmed(value, size < 10 ? 1 : 0);
  const [unit, name] = size < 1e6 ? [1e3, "k"] : size < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${trimmed(value / unit, size / unit < 100 ? 1 : 0)}${name}`;
}

export function millis(value) {
  if (value == null) return DASH;
  return value < 1000 ? `${trimmed(value, value < 10 ? 1 : 0)} ms` : `${trimmed(value / 1000, value < 10000 ? 2 : 1)} s`;
}

/** 0.4 s, 12 s, 3 min, 2 h, 4 d: coarser the longer it is. */
export function span(ms) {
  const seconds = Math.max(ms, 0) / 1000;
  if (seconds < 10) return `${(Math.floor(10 * seconds) / 10).toFixed(1)} s`;
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([least]) => seconds >= least);
  return `${Math.floor(seconds / size)} ${unit}`;
}

export const plural = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
