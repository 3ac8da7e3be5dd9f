// Shares of all GPU time by phase, stacked; what is left hatched at the top is not known.

import { makeChart, provisionalStarts } from "./chart.js";
import { colors } from "./colors.js";
import { COVERED, DECODE, ENCODE, GPU_NS, KV_WAIT, PREFILL } from "./phases.js";

const LAYERS = ["idle", "kv_wait", "decode", "prefill", "encode"]; // each is drawn over the one before, from the bottom up

export function makeStack(host, shared) {
  const chart = makeChart(host, {
    ...shared,
    height: 190,
    uncovered: true,
    scales: { y: { range: [0, 1] } },
    yAxis: { splits: () => [0, 0.25, 0.5, 0.75, 1], values: (_, ticks) => ticks.map((tick) => `${100 * tick} %`) },
    series: LAYERS.map((phase) => ({ fill: () => colors()[phase].css, width: 0, points: { show: false } })),
  });
  return {
    /** Show windows `first` to `last`. */
    draw(store, series, first, last) {
      const data = [[], [], [], [], [], []];
      for (let number = first; number <= last; number++) {
        const column = number % store.columns;
        const of = (field) => (series && store.has(number) ? series.value(column, field) : 0);
        const whole = of(GPU_NS) || 1;
        data[0].push(((number + 0.5) * store.windowMs) / 1000);
        data[1].push(of(COVERED) / whole);
        data[2].push((of(PREFILL) + of(DECODE) + of(KV_WAIT)) / whole);
        data[3].push((of(PREFILL) + of(DECODE)) / whole);
        data[4].push(of(PREFILL) / whole);
        data[5].push(of(ENCODE) / whole);
      }
      chart.provisional = provisionalStarts(store, series, first, last);
      chart.setData(data);
      host.dataset.encodes = data[5].some((share) => share > 0);
    },
  };
}
