// GPUs that each pool needs, against those that it has: steps over time, and a table.

import { makeChart } from "../chart.js";
import { colors } from "../colors.js";
import { DASH } from "../status/words.js";
import { dayTime } from "./words.js";

const { uPlot } = globalThis;
const HEADS = ["pool", "there", "needed now", "at most", "short from (half of sampled paths)", "one of twenty", "most likely to be short"];
const HEADROOM = 1.25;

export class Needs {
  #charts = new Map();

  constructor(host, table) {
    Object.assign(this, { host, table });
    const row = table.tHead.insertRow();
    for (const text of HEADS) row.appendChild(document.createElement("th")).textContent = text;
  }

  /** A plan as /v1/capacity answers it; null: none is known. */
  draw(plan) {
    this.host.hidden = this.table.hidden = plan === null;
    if (plan === null) return;
    const rows = [];
    for (const [phase, pool] of Object.entries(plan.pools)) {
      let chart = this.#charts.get(phase);
      if (!chart) this.#charts.set(phase, (chart = new NeedChart(this.host, phase)));
      chart.draw(plan, pool);
      rows.push(rowOf(phase, pool));
    }
    this.table.tBodies[0].replaceChildren(...rows);
  }
}

function rowOf(phase, pool) {
  const row = document.createElement("tr");
  const cells = [phase, pool.there ?? DASH, pool.gpus[0], pool.most, dayTime(pool.runs_short_unix_s.p50), dayTime(pool.runs_short_unix_s.p95), pool.there === null ? DASH : `${Math.round(100 * Math.max(...pool.short))} %`];
  for (const text of cells) row.insertCell().textContent = text;
  if (pool.runs_short_unix_s.p50 !== null) row.cells[4].className = "poor";
  return row;
}

/** One pool: what is asked for, what half and nineteen of twenty paths need, and a line at what is there. */
class NeedChart {
  #top = 1;
  #bounds = [0, 1];

  constructor(host, phase) {
    const section = host.appendChild(document.createElement("section"));
    const head = section.appendChild(document.createElement("h3"));
    head.append(`GPUs for ${phase}`);
    this.point = head.appendChild(document.createElement("small"));
    const plot = section.appendChild(document.createElement("div"));
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `GPUs that ${phase} needs over time, and those available`);
    const stepped = uPlot.paths.stepped({ align: 1 });
    const line = (color, more) => ({ stroke: () => colors()[color].css, width: 2, points: { show: false }, paths: stepped, ...more });
    this.chart = makeChart(plot, {
      height: 150,
      sync: "forecast",
      bounds: () => this.#bounds,
      marks: () => [],
      windowSeconds: () => 0,
      onCursor: (index) => this.#say(index),
      scales: { y: { range: () => [0, this.#top] } },
      yAxis: { space: 26, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
      series: [line(phase), line("faint", { width: 1.6, dash: [5, 4] }), line("accent", { width: 1.4 })],
    });
  }

  draw({ starts_unix_s: starts, step_s: step }, pool) {
    const times = [...starts, starts.at(-1) + step];
    const closed = (values) => [...values, values.at(-1)]; // or the last step had no length
    this.#bounds = [times[0], times.at(-1)];
    this.#top = Math.ceil(HEADROOM * Math.max(...pool.gpus, pool.there ?? 0, 1));
    this.chart.setData([times, closed(pool.gpus), closed(pool.p50), times.map(() => pool.there)]);
    this.#say(null);
  }

  #say(index) {
    const [times, asked, half, there] = this.chart.data;
    const have = there[0] == null ? "" : ` · red: ${there[0]} there`;
    this.point.textContent = index == null ? `bold: enough at the chosen confidence · dashed: in half of the sampled paths${have}` : `${dayTime(times[index])} ${asked[index]} needed, in half of the paths ${half[index]}${have}`;
  }
}
