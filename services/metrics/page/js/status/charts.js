// Pressure and traffic over time.

import { makeChart, unknownSpans } from "../chart.js";
import { colors } from "../colors.js";
import { splitScope } from "../store.js";
import { millis, share, short } from "./words.js";

const LEAST_TOP = 1.25, MOST_TOP = 4; // of pressure: 1 is always in sight, and one transient does not flatten the rest
const CLIP_RANK = 0.98; // of values; the highest fiftieth may run off the top
const HEADROOM = 1.15;
const AWAITED = 3; // windows

const line = (color, more = {}) => ({ stroke: () => colors()[color].css, width: 1.6, points: { show: false }, spanGaps: false, ...more });

/** The pressure of the scope's model, or of the worst-off of all. */
export function makePressureChart(host, shared) {
  let top = LEAST_TOP;
  const chart = makeChart(host, {
    ...shared,
    height: 150,
    level: 1,
    scales: { y: { range: () => [0, top] } },
    yAxis: { values: (_, ticks) => ticks.map((tick) => (Number.isInteger(4 * tick) ? String(tick) : "")) },
    series: [line("faint", { dash: [4, 4], width: 1 }), line("decode", { width: 2 }), line("prefill", { width: 2 })],
  });
  return {
    draw(times, rows, scope) {
      const each = (field) => rows.map((row) => worst(row, field, scope));
      const data = [times, each("cluster"), each("decode"), each("prefill")];
      top = Math.min(Math.max(HEADROOM * rank([...data[2], ...data[3]]), LEAST_TOP), MOST_TOP);
      chart.unknown = unknownOf(times, (index) => data[2][index] !== null || data[3][index] !== null, shared.windowSeconds());
      chart.setData(data);
    },
  };
}

function worst(row, field, scope) {
  const [kind, name] = splitScope(scope);
  const models = row ? (kind === "model" ? [row.models[name]].filter(Boolean) : Object.values(row.models)) : [];
  const values = models.map((model) => model[field]).filter((value) => value != null);
  return values.length ? Math.max(...values) : null;
}

const ofTraffic = (field, factor = 1) => (row) => (row?.traffic[field] == null ? null : factor * row.traffic[field]);
const sumOf = (field) => (row) => {
  const values = row ? Object.values(row.models).map((model) => model[field]).filter((value) => value != null) : [];
  return values.length ? values.reduce((sum, value) => sum + value, 0) : null;
};

const worstOf = (field) => (row) => {
  const values = row ? Object.values(row.models).map((model) => model[field]).filter((value) => value != null) : [];
  return values.length ? Math.max(...values) : null;
};

/** title, how values are written, and lines: [name, colour, value of a row, further options]. */
const CHARTS = [
  ["requests/s", short, [["ended", "text", ofTraffic("requests_per_s")], ["429", "warning", ofTraffic("too_many_per_s")], ["refused", "faint", ofTraffic("rejected_per_s")], ["errors", "accent", ofTraffic("errors_per_s")]]],
  ["tokens/s", short, [["prompt", "prefill", ofTraffic("prompt_tokens_per_s")], ["output", "decode", ofTraffic("output_tokens_per_s")]]],
  ["prompt tokens that wait", short, [["waiting", "prefill", sumOf("waiting_tokens")]]],
  ["batch lines", short, [["wait", "faint", ofTraffic("batch_waiting")], ["at workers", "decode", ofTraffic("batch_at_workers")]]],
  ["TTFT", millis, [["p50", "prefill", ofTraffic("ttft_p50_ms")], ["p95", "faint", ofTraffic("ttft_p95_ms")]]],
  ["TPOT", millis, [["p50", "decode", ofTraffic("tpot_p50_ms")], ["p95", "faint", ofTraffic("tpot_p95_ms")]]],
  ["what decode waits for", share, [["KV under way", "kv_wait", worstOf("kv_wait")], ["starved", "faint", worstOf("starved")]]],
  ["prompt tokens found cached", share, [["hits", "kv_wait", ofTraffic("cache_hit")]]],
];

/** Small charts in `host`, a section each. */
export function makeTrafficCharts(host, shared) {
  const charts = CHARTS.map(([title, write, lines]) => {
    const section = host.appendChild(document.createElement("section"));
    section.dataset.chart = title;
    const head = section.appendChild(document.createElement("h3"));
    head.textContent = title;
    const reported = lines.map(([name, color]) => {
      const small = head.appendChild(document.createElement("small"));
      small.className = `of-${color}`;
      return [small, name];
    });
    let top = 1;
    const plot = section.appendChild(document.createElement("div"));
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title} over time`);
    const chart = makeChart(plot, {
      ...shared,
      height: 96,
      scales: { y: { range: () => [0, top] } },
      yAxis: { space: 26, values: (_, ticks) => ticks.map((tick) => write(tick)) },
      series: lines.map(([, color]) => line(color)),
    });
    const draw = (times, rows) => {
      const data = lines.map(([, , value]) => rows.map(value));
      top = Math.max(HEADROOM * rank(data.flat()), write === share ? 0.1 : 1);
      chart.unknown = unknownOf(times, (index) => data.some((values) => values[index] !== null), shared.windowSeconds());
      chart.setData([times, ...data]);
      for (const [index, [small, name]] of reported.entries()) small.textContent = `${name} ${write(data[index].findLast((value) => value != null) ?? null)}`;
    };
    return { draw };
  });
  return { draw: (times, rows) => charts.forEach((chart) => chart.draw(times, rows)) };
}

/** Spans of which nothing is known, but for the newest windows, which are still to be asked for. */
function unknownOf(times, isKnown, windowS) {
  let last = times.length;
  while (last > times.length - AWAITED && !isKnown(last - 1)) last--;
  return unknownSpans(times.slice(0, last), isKnown, windowS);
}

/** The value below which all but the highest fiftieth lie; 0 without any. */
function rank(values) {
  const known = values.filter((value) => value != null).sort((a, b) => a - b);
  return known.length ? known[Math.ceil(CLIP_RANK * known.length) - 1] : 0;
}
