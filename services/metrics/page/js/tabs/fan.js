// What came and what may come of one series: a line, and bands of 50, 80 and 90 % around the median.

import { makeChart } from "../chart.js";
import { colors } from "../colors.js";
import { short } from "../status/words.js";

const BANDS = [["p95", "p5", 0.2], ["p90", "p10", 0.2], ["p75", "p25", 0.3]]; // over each other
const COLUMNS = ["past", ...BANDS.flatMap(([high, low]) => [high, low]), "p50"];
const HEADROOM = 1.08;
const LEAST_PAST = 24; // bins shown before now

const clear = { stroke: () => "transparent", width: 0, points: { show: false } };

/** A chart in `host`: its title, and the colour of its bands. */
export class Fan {
  #top = 1;
  #bounds = [0, 1];
  #now = 0;

  constructor(host, title, color) {
    const section = host.appendChild(document.createElement("section"));
    const head = section.appendChild(document.createElement("h3"));
    head.append(title);
    this.point = head.appendChild(document.createElement("small"));
    const plot = section.appendChild(document.createElement("div"));
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${title}: actual values, and bands of the forecast`);
    const line = (name, width) => ({ stroke: () => colors()[name].css, width, points: { show: false }, spanGaps: false });
    const faded = (alpha) => () => `rgba(${colors()[color].rgb.join()}, ${alpha})`;
    this.chart = makeChart(plot, {
      height: 170,
      sync: "forecast",
      bounds: () => this.#bounds,
      marks: () => [this.#now],
      windowSeconds: () => 0,
      onCursor: (index) => this.#say(index),
      scales: { y: { range: () => [0, this.#top] } },
      yAxis: { space: 30, values: (_, ticks) => ticks.map((tick) => short(tick)) },
      series: [line("text", 1.6), ...BANDS.flatMap(() => [clear, clear]), line(color, 2)],
      bands: BANDS.map(([, , alpha], index) => ({ series: [2 + 2 * index, 3 + 2 * index], fill: faded(alpha) })),
    });
  }

  /** `past` and `ahead`: starts and values; `horizonS` of the past is shown, at least a few bins of it. */
  draw({ starts: pastStarts, values }, { starts, bands }, horizonS) {
    const stepPast = pastStarts.length > 1 ? pastStarts[1] - pastStarts[0] : 0;
    const step = starts.length > 1 ? starts[1] - starts[0] : stepPast;
    this.#now = starts[0];
    const from = Math.min(this.#now - horizonS, this.#now - LEAST_PAST * stepPast);
    const first = Math.max(pastStarts.findIndex((start) => start >= from), 0);
    const past = pastStarts.slice(first), came = values.slice(first);
    const times = [...past.map((start) => start + stepPast / 2), ...starts.map((start) => start + step / 2)];
    const columns = COLUMNS.map((name) => (name === "past" ? [...came, ...starts.map(() => null)] : [...past.map(() => null), ...bands[name]]));
    this.#bounds = [past.length ? Math.max(past[0], from) : starts[0], starts.at(-1) + step];
    this.#top = HEADROOM * Math.max(...columns.flat().filter((value) => value !== null), 1e-3);
    this.chart.setData([times, ...columns]);
    this.#say(null);
  }

  #say(index) {
    const at = (name) => this.chart.data[1 + COLUMNS.indexOf(name)]?.[index];
    if (index == null) this.point.textContent = "";
    else if (at("past") != null) this.point.textContent = `${when(this.chart, index)} actual ${short(at("past"))}`;
    else if (at("p50") != null) this.point.textContent = `${when(this.chart, index)} ${short(at("p50"))}, 90 %: ${short(at("p5"))} to ${short(at("p95"))}`;
    else this.point.textContent = "not known";
  }
}

const when = (chart, index) => new Date(chart.data[0][index] * 1000).toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
