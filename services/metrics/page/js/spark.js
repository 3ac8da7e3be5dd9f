// A small picture of the last windows of a group: phases stacked, nothing where nothing is known.

import { colors } from "./colors.js";
import { COVERED, DECODE, GPU_NS, KV_WAIT, PREFILL } from "./phases.js";

export const SPARK = { width: 120, height: 20, windows: 60 };

/** Draw the windows up to number `last` into a canvas. */
export function drawSpark(canvas, store, series, last) {
  const pen = canvas.getContext("2d");
  const step = SPARK.width / SPARK.windows;
  pen.clearRect(0, 0, SPARK.width, SPARK.height);
  for (let index = 0; series && index < SPARK.windows; index++) {
    const number = last - SPARK.windows + 1 + index;
    if (!store.has(number)) continue;
    const column = number % store.columns;
    const whole = series.value(column, GPU_NS);
    if (!whole) continue;
    let top = SPARK.height;
    const parts = [series.value(column, PREFILL), series.value(column, DECODE), series.value(column, KV_WAIT)];
    parts.push(series.value(column, COVERED) - parts[0] - parts[1] - parts[2]);
    for (const [place, phase] of ["prefill", "decode", "kv_wait", "idle"].entries()) {
      const high = (parts[place] / whole) * SPARK.height;
      pen.fillStyle = colors()[phase].css;
      pen.fillRect(index * step, top - high, step, high);
      top -= high;
    }
  }
}
