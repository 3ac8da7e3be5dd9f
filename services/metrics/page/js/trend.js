// The P:D ratio window by window, and over the last two seconds.

import { makeChart, unknownSpans } from "./chart.js";
import { colors } from "./colors.js";
import { COVERED, DECODE, PREFILL } from "./phases.js";

const SMOOTH_MS = 2000;
const LEAST_TOP = 0.1;
const MOST_TICKS = 6;
const CLIP_RANK = 0.95;

export function makeTrend(host, shared) {
  let top = 1;
  const chart = makeChart(host, {
    ...shared,
    height: 150,
    // Zero has a place, and 10:1 is as far from 1:1 as 1:10 would be from 0: small ratios do not vanish below large ones.
    scales: { y: { distr: 4, asinh: 1, range: () => [0, top] } },
    yAxis: {
      splits: () => ticks(top),
      filter: (_, splits) => splits,
      values: (_, splits) => splits.map((tick) => `${tick}:1`),
    },
    series: [
      { stroke: () => colors().thin.css, width: 1, points: { show: false }, spanGaps: false },
      { stroke: () => colors().text.css, width: 2, points: { show: false }, spanGaps: false },
    ],
  });
  return {
    /** Show windows `first` to `last`. */
    draw(store, series, first, last) {
      const [times, each, smooth, known] = [[], [], [], []];
      const span = Math.max(1, Math.round(SMOOTH_MS / store.windowMs));
      let [prefill, decode] = [0, 0];
      const value = (number, field) => (series && store.has(number) ? series.value(number % store.columns, field) : 0);
      for (let number = first - span + 1; number <= last; number++) {
        prefill += value(number, PREFILL) - (number - span > first - span ? value(number - span, PREFILL) : 0);
        decode += value(number, DECODE) - (number - span > first - span ? value(number - span, DECODE) : 0);
        if (number < first) continue;
        known.push(value(number, COVERED) > 0);
        times.push(((number + 0.5) * store.windowMs) / 1000);
        each.push(ratio(value(number, PREFILL), value(number, DECODE)));
        smooth.push(ratio(prefill, decode));
      }
      top = Math.max(LEAST_TOP, 1.3 * usual(smooth));
      chart.unknown = unknownSpans(times, (index) => known[index], store.windowMs / 1000);
      chart.setData([times, each, smooth]);
    },
  };
}

/** The value below which all but the highest twentieth lie: one transient of 1000:1 does not flatten the rest. */
function usual(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.ceil(CLIP_RANK * sorted.length) - 1] : 0;
}

function ratio(prefill, decode) {
  return decode > 0 ? prefill / decode : null; // without decode there is no ratio to draw
}

/** 0 and of 0.01, 0.02, 0.05, 0.1, ... those that stand apart below `top`. */
function ticks(top) {
  const apart = Math.asinh(top) / MOST_TICKS;
  const found = [0];
  for (let power = -2; 10 ** power <= top; power++) {
    for (const lead of [1, 2, 5]) {
      const tick = Number(`${lead}e${power}`);
      if (tick <= top && Math.asinh(tick) - Math.asinh(found.at(-1)) >= apart) found.push(tick);
    }
  }
  return found;
}
