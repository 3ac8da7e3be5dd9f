// Windows of workers as pixels: phases mixed by their shares, see-through where nothing is known or all is provisional.

import { colors } from "./colors.js";
import { PHASES, PROVISIONAL_BIT } from "./phases.js";

const PROVISIONAL_ALPHA = 0.55;

/** A picture of a store: one column a window (in the store's ring), one row a GPU. */
export class Picture {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.pen = this.canvas.getContext("2d");
    this.rows = [];
  }

  /** Take other rows, and paint everything. */
  reset(store, rows) {
    this.rows = [];
    for (const { slot } of rows) for (let gpu = 0; gpu < store.members[slot].gpus; gpu++) this.rows.push(slot);
    this.canvas.width = store.columns;
    this.canvas.height = Math.max(this.rows.length, 1);
    this.#paint(store, 0, store.columns);
  }

  /** Paint some windows again; `columns` ascend. */
  update(store, columns) {
    for (let at = 0, end; at < columns.length; at = end) {
      for (end = at + 1; columns[end] === columns[end - 1] + 1; ) end++;
      this.#paint(store, columns[at], end - at); // neighbours at once: after a pause there are many
    }
  }

  #paint(store, from, count) {
    const image = this.pen.createImageData(count, this.canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    const palette = PHASES.map((phase) => colors()[phase].rgb);
    for (let offset = 0; offset < count; offset++) {
      const column = from + offset;
      const whole = store.lengthsMs[column] * 1e6;
      let last = -1, pixel = 0;
      for (let row = 0; row < this.rows.length; row++) {
        const slot = this.rows[row];
        if (slot !== last) pixel = mix(store, column * store.size + slot, whole, palette);
        last = slot;
        pixels[row * count + offset] = pixel;
      }
    }
    this.pen.putImageData(image, from, 0);
  }
}

/** One pixel as little-endian RGBA. */
function mix(store, place, whole, palette) {
  const at = 4 * place;
  const covered = store.times[at];
  if (!covered) return 0;
  const prefill = store.times[at + 1] / covered;
  const decode = store.times[at + 2] / covered;
  const wait = store.times[at + 3] / covered;
  const idle = 1 - prefill - decode - wait;
  const [p, d, w, i] = palette;
  const red = p[0] * prefill + d[0] * decode + w[0] * wait + i[0] * idle;
  const green = p[1] * prefill + d[1] * decode + w[1] * wait + i[1] * idle;
  const blue = p[2] * prefill + d[2] * decode + w[2] * wait + i[2] * idle;
  const known = Math.min(covered / whole, 1) * (store.roles[place] & PROVISIONAL_BIT ? PROVISIONAL_ALPHA : 1);
  return ((Math.round(255 * known) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}
