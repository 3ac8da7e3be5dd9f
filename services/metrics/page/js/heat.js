// The heat map: every GPU by phase over time. Arrow keys or the mouse point at a window, Enter or a click opens a worker.

import { clockText, GUTTER_PX } from "./chart.js";
import { colors, hatch } from "./colors.js";
import { order } from "./order.js";
import { Picture } from "./paint.js";
import { percent, PHASE_NAMES, PHASES, phaseTimes, PROVISIONAL_BIT, ROLES } from "./phases.js";

const TALLEST_ROW_PX = 16;
const WANTED_PX = 420;
const LABEL_PX = 11;
const ORDER_MS = 2000; // rows are put in order anew so often

export class HeatMap {
  #picture = new Picture();
  #rows = [];
  #shape = "";
  #orderedAt = 0;
  #loads = 0; // of the store, when rows were put in order
  #painted = 0; // the last of the store's writes that is in the picture
  #span = null;
  #point = null;

  constructor(canvas, readout, onOpen) {
    this.canvas = canvas;
    this.readout = readout;
    this.onOpen = onOpen;
    canvas.addEventListener("pointermove", (event) => this.#pointAt(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.#aim(null));
    canvas.addEventListener("click", () => this.#open());
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Forget what was painted: theme, store or order changed. */
  invalidate() {
    this.#shape = "";
    this.#orderedAt = 0;
  }

  /** Show windows `first` to `last` of the store. */
  draw(store, live, scope, sort, first, last) {
    if (this.store !== store) this.invalidate();
    this.store = store;
    this.#span = [first, last];
    this.#refreshRows(store, live, scope, sort, first, last);
    this.#refreshPicture(store);
    this.#paint(store, first, last);
    if (this.#point) this.#tell();
  }

  #refreshRows(store, live, scope, sort, first, last) {
    const now = performance.now();
    if (now - this.#orderedAt < ORDER_MS && this.#loads === store.loads) return;
    [this.#orderedAt, this.#loads] = [now, store.loads];
    this.#rows = order(store, live, scope, sort, first, last);
    let top = 0;
    for (const row of this.#rows) {
      row.top = top;
      top += store.members[row.slot].gpus;
    }
    this.gpus = top;
  }

  #refreshPicture(store) {
    const shape = `${store.loads} ${store.windowMs} ${store.columns} ${store.size} ${this.#rows.map((row) => row.slot).join()}`;
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#picture.reset(store, this.#rows);
    } else {
      this.#picture.update(store, store.writtenAfter(this.#painted));
    }
    this.#painted = store.writes;
  }

  #paint(store, first, last) {
    const scale = devicePixelRatio;
    const rowPx = Math.max(1, Math.min(TALLEST_ROW_PX, Math.floor(WANTED_PX / Math.max(this.gpus, 1))));
    const width = this.canvas.clientWidth, height = Math.max(this.gpus * rowPx, rowPx);
    if (this.canvas.height !== height * scale || this.canvas.width !== Math.round(width * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = height * scale;
      this.canvas.style.height = `${height}px`;
    }
    this.rowPx = rowPx;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = hatch(pen);
    pen.fillRect(GUTTER_PX, 0, width - GUTTER_PX, height);
    const perColumn = (width - GUTTER_PX) / (last - first + 1);
    for (const [from, to] of pieces(store, first, last)) {
      pen.drawImage(
        this.#picture.canvas, from % store.columns, 0, to - from + 1, this.#picture.canvas.height,
        GUTTER_PX + (from - first) * perColumn, 0, (to - from + 1) * perColumn, height,
      );
    }
    this.#label(pen, width);
    if (this.#point) {
      pen.strokeStyle = colors().text.css;
      const row = this.#rows[this.#point.row];
      if (row) pen.strokeRect(GUTTER_PX + (this.#point.number - first) * perColumn, row.top * rowPx - 0.5, Math.max(perColumn, 2), store.members[row.slot].gpus * rowPx + 1);
    }
  }

  /** Names left of the rows: of workers where there is room, else of groups. */
  #label(pen, width) {
    pen.font = `${LABEL_PX - 1}px system-ui, sans-serif`;
    pen.fillStyle = colors().faint.css;
    pen.strokeStyle = colors().panel.css;
    pen.textBaseline = "middle";
    const room = this.rowPx >= LABEL_PX;
    let group = null, free = 0;
    for (const row of this.#rows) {
      const y = row.top * this.rowPx;
      const begins = row.group !== group;
      if (begins && group !== null && this.rowPx >= 3) pen.strokeRect(0, y, width, 0.01);
      const text = room ? this.store.members[row.slot].id : begins ? row.group : "";
      group = row.group;
      if (!text || y < free) continue;
      pen.fillText(shorten(pen, text, GUTTER_PX - 6), 0, y + (room ? this.rowPx / 2 : LABEL_PX / 2));
      free = y + LABEL_PX;
    }
  }

  #pointAt(x, y) {
    if (!this.#span || x < GUTTER_PX) return this.#aim(null);
    const [first, last] = this.#span;
    const share = (x - GUTTER_PX) / (this.canvas.clientWidth - GUTTER_PX);
    const gpu = Math.floor(y / this.rowPx);
    const row = this.#rows.findLastIndex((each) => each.top <= gpu);
    this.#aim({ row, number: first + Math.min(last - first, Math.floor(share * (last - first + 1))) });
  }

  #aim(point) {
    this.#point = point;
    if (point) this.#tell();
    else this.#say("");
  }

  #tell() {
    const row = this.#rows[this.#point.row];
    if (!row) return;
    const { store } = this, { number } = this.#point;
    const { id, node } = store.members[row.slot];
    const place = (number % store.columns) * store.size + row.slot;
    const at = clockText((number * store.windowMs) / 1000, 1);
    const covered = store.has(number) ? store.times[4 * place] : 0;
    if (!covered) {
      this.#say(`${at} ${id} on ${node}: no telemetry`);
      return;
    }
    const times = phaseTimes(store.times.subarray(4 * place, 4 * place + 4));
    const shares = PHASES.map((phase, index) => `${PHASE_NAMES[phase]} ${percent(times[index], covered, 0)}`).join(", ");
    const flag = store.roles[place] & PROVISIONAL_BIT ? ", provisional" : "";
    this.#say(`${at} ${id} on ${node}, ${ROLES[store.roles[place] & 127]}: ${shares}; coverage ${percent(covered, store.lengthsMs[number % store.columns] * 1e6, 0)}${flag}`);
  }

  /** Once: it is read aloud. */
  #say(text) {
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  #open() {
    const row = this.#point && this.#rows[this.#point.row];
    if (row) this.onOpen(this.store.members[row.slot].id, (this.#point.number + 1) * this.store.windowMs);
  }

  #key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter") this.#open();
    else if (step && this.#span) {
      const { row, number } = this.#point ?? { row: -step[0], number: this.#span[1] - step[1] };
      const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
      this.#aim({ row: clamp(row + step[0], 0, this.#rows.length - 1), number: clamp(number + step[1], ...this.#span) });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Runs of windows in [first, last] that are held and stand side by side in the ring. */
function pieces(store, first, last) {
  const found = [];
  for (let number = Math.max(first, 0); number <= Math.min(last, store.newest); number++) {
    if (!store.has(number)) continue;
    const run = found.at(-1);
    if (run?.[1] === number - 1 && number % store.columns !== 0) run[1] = number;
    else found.push([number, number]);
  }
  return found;
}

function shorten(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let kept = text;
  while (kept.length > 1 && pen.measureText(`…${kept}`).width > room) kept = kept.slice(1);
  return `…${kept}`;
}
