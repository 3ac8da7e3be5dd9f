// What both time series have in common: uPlot with the page's colours, a shared cursor, and marks of role moves.

import { colors, hatch } from "./colors.js";
import { GPU_NS, PROVISIONAL_NS } from "./phases.js";

const { uPlot } = globalThis; // the minified build is a classic script

export const GUTTER_PX = 64; // left of every plot and of the heat map, so that their time axes agree
const AXIS_PX = 24;
const LABEL_PX = 54;
const DAY_S = 86400;
const FONT = "11px system-ui, sans-serif";

/** A chart in `host`. `scales` and `series` are uPlot's; `bounds()` is [first, last] in seconds. */
export function makeChart(host, { height, scales, series, bands, sync = "time", bounds, yAxis, marks, windowSeconds, onCursor, uncovered, level }) {
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
      cursor: { sync: { key: sync }, drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: { x: { time: true, range: () => bounds() }, ...scales },
      axes: [
        { ...axis, size: AXIS_PX, space: 70, values: axisTexts },
        { ...axis, size: GUTTER_PX, gap: 4, ...yAxis },
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        drawClear: [(plot) => uncovered && fillHatched(plot), fillUnknown],
        draw: [(plot) => drawProvisional(plot, windowSeconds()), (plot) => drawMarks(plot, marks()), (plot) => level !== undefined && drawLevel(plot, level)],
        setCursor: [(plot) => onCursor(plot.cursor.idx)],
      },
    },
    series.reduce((data) => [...data, []], [[]]),
    host,
  );
  new ResizeObserver(() => chart.setSize({ width: Math.max(host.clientWidth, 200), height })).observe(host);
  return chart;
}

/** Times below a chart, as exact as its span asks for; none where it would not fit beside the edge. */
function axisTexts(plot, ticks) {
  const { min, max } = plot.scales.x;
  const text = max - min >= DAY_S ? dayText : clockText;
  return ticks.map((tick) => (plot.valToPos(tick, "x") + LABEL_PX / 2 > plot.bbox.width / devicePixelRatio ? "" : text(tick)));
}

const dayText = (seconds) => new Date(seconds * 1000).toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });

/** Seconds of the day as people read them, with `digits` of a second. */
export function clockText(seconds, digits = 0) {
  const unit = 10 ** digits;
  const whole = Math.floor(seconds * unit + 1e-3); // what is cut off is no whole digit: 0.3 as a float is a little less
  const text = new Date((whole / unit) * 1000).toLocaleTimeString([], { hourCycle: "h23" });
  return digits ? `${text}.${String(whole % unit).padStart(digits, "0")}` : text;
}

/** Hatched where nothing is known: `plot.unknown` has spans in seconds. */
function fillUnknown(plot) {
  if (!plot.unknown?.length) return;
  const { left, top, width, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.fillStyle = hatch(plot.ctx);
  for (const [from, to] of plot.unknown) {
    const [low, high] = [from, to].map((at) => Math.min(Math.max(plot.valToPos(at, "x", true), left), left + width));
    plot.ctx.fillRect(low, top, high - low, height);
  }
  plot.ctx.restore();
}

/** A line that matters. */
function drawLevel(plot, level) {
  const y = plot.valToPos(level, "y", true);
  plot.ctx.save();
  plot.ctx.strokeStyle = colors().accent.css;
  plot.ctx.lineWidth = devicePixelRatio;
  plot.ctx.beginPath();
  plot.ctx.moveTo(plot.bbox.left, y);
  plot.ctx.lineTo(plot.bbox.left + plot.bbox.width, y);
  plot.ctx.stroke();
  plot.ctx.restore();
}

/** Spans in seconds of the windows at `times`, their middles, of which nothing is known. */
export function unknownSpans(times, isKnown, windowS) {
  const spans = [];
  for (const [index, time] of times.entries()) {
    if (isKnown(index)) continue;
    const last = spans.at(-1);
    if (last && last[1] >= time - 0.51 * windowS) last[1] = time + windowS / 2;
    else spans.push([time - windowS / 2, time + windowS / 2]);
  }
  return spans;
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
