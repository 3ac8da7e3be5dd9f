// What both time series have in common: uPlot with the page's colours, a shared cursor, and marks of role moves.

import uPlot from "../vendor/uplot.js";
import { colors, hatch } from "./colors.js";
import { GPU_NS, PROVISIONAL_NS } from "./phases.js";

export const GUTTER_PX = 64; // left of every plot and of the heat map, so that their time axes agree
const AXIS_PX = 24;
const FONT = "11px system-ui, sans-serif";

/** A chart in `host`. `scales` and `series` are uPlot's; `bounds()` is [first, last] in seconds. */
export function makeChart(host, { height, scales, series, bounds, yAxis, marks, windowSeconds, onCursor, uncovered }) {
  const axis = {
    stroke: () => colors().faint.css,
    grid: { stroke: () => colors().line.css, width: 0.5 },
    ticks: { show: false },
    font: FONT,
  };
  const chart = new uPlot(
    {
      width: Math.max(host.clientWidth, 200),
      height,
      padding: [6, 0, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: { x: { time: true, range: () => bounds() }, ...scales },
      axes: [
        { ...axis, size: AXIS_PX, space: 70, values: (_, ticks) => ticks.map(clockText) },
        { ...axis, size: GUTTER_PX, gap: 4, ...yAxis },
      ],
      series: [{}, ...series],
      hooks: {
        drawClear: [(plot) => uncovered && fillHatched(plot)],
        draw: [(plot) => drawProvisional(plot, windowSeconds()), (plot) => drawMarks(plot, marks())],
        setCursor: [(plot) => onCursor(plot.cursor.idx)],
      },
    },
    series.reduce((data) => [...data, []], [[]]),
    host,
  );
  new ResizeObserver(() => chart.setSize({ width: Math.max(host.clientWidth, 200), height })).observe(host);
  return chart;
}

/** Seconds of the day as people read them. */
export function clockText(seconds, fraction = false) {
  const text = new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
  return fraction === true ? `${text}.${Math.floor((seconds % 1) * 10 + 1e-6)}` : text;
}

function fillHatched(plot) {
  const { left, top, width, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.fillStyle = hatch(plot.ctx);
  plot.ctx.fillRect(left, top, width, height);
  plot.ctx.restore();
}

/** A bar at the top of windows whose figures a running step may still change. */
function drawProvisional(plot, width) {
  if (!plot.provisional) return;
  plot.ctx.save();
  plot.ctx.fillStyle = colors().accent.css;
  for (const start of plot.provisional) {
    const from = plot.valToPos(start, "x", true);
    const to = plot.valToPos(start + width, "x", true);
    plot.ctx.fillRect(from, plot.bbox.top, Math.max(to - from, 1), 3 * devicePixelRatio);
  }
  plot.ctx.restore();
}

function drawMarks(plot, times) {
  const { left, top, width, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.strokeStyle = colors().text.css;
  plot.ctx.setLineDash([3, 3]);
  plot.ctx.beginPath();
  for (const time of times) {
    const x = plot.valToPos(time, "x", true);
    if (x < left || x > left + width) continue;
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
  }
  plot.ctx.stroke();
  plot.ctx.restore();
}

/** Starts in seconds of the windows of a span in which a fifth or more of the time is provisional. */
export function provisionalStarts(store, series, first, last) {
  const found = [];
  for (let number = first; series && number <= last; number++) {
    if (!store.has(number)) continue;
    const column = number % store.columns;
    if (series.value(column, PROVISIONAL_NS) * 5 > series.value(column, GPU_NS)) found.push((number * store.windowMs) / 1000);
  }
  return found;
}
