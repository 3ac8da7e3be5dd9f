// The newest windows of 100 ms: loaded once, kept up by the stream's ticks. What falls between is loaded again.

import { LIVE_COLUMNS, LIVE_WINDOW_MS } from "./phases.js";
import { Store } from "./store.js";

const MAX_WAITING_TICKS = 600; // that come while windows load
const REVISED_WINDOWS = 20; // before a gap: ticks that were missed may have changed them
const RETRY_MS = 1000;
const SPARE_SLOTS = 64; // of workers that have gone, beside as many as there are

export class Live {
  store = new Store(LIVE_WINDOW_MS, LIVE_COLUMNS);
  endMs = null; // where the picture stands; null: it moves
  nowMs = Date.now(); // of the service, at the newest tick that is in the picture
  #members = { version: 0, workers: [] };
  #slots = [];
  #waiting = null; // ticks that came while windows load; null when none do
  #missedMs = null; // from when on some were missed meanwhile
  #takenMs = 0;
  #loading = null; // aborts it

  /** `loadInto(store, query)` says whether windows came; `changed` is called when they have. */
  constructor(loadInto, changed) {
    this.loadInto = loadInto;
    this.changed = changed;
  }

  get loads() {
    return this.#waiting !== null;
  }

  /** Follow these workers. */
  follow(members) {
    this.#members = members;
    if (this.endMs !== null) return;
    const gone = this.store.members.length - members.workers.length;
    if (gone > members.workers.length + SPARE_SLOTS) this.replace();
    else this.#setSlots();
  }

  #setSlots() {
    this.#slots = this.#members.workers.map((worker) => this.store.slot(worker));
  }

  /** Hold nothing but what is loaded now: `count` windows up to the end. Done once they are there. */
  replace(count = LIVE_COLUMNS) {
    this.store = new Store(LIVE_WINDOW_MS, LIVE_COLUMNS);
    this.#setSlots();
    return this.reload(count);
  }

  /** Stop at a moment. What may still change then is loaded again when the picture moves on: nobody announces it meanwhile. */
  freeze(endMs) {
    this.endMs = endMs;
    this.store.drop(Math.floor(endMs / LIVE_WINDOW_MS));
  }

  /** Whether the windows of a span that ends then are here. */
  holds(endMs, spanMs) {
    return this.store.has(Math.floor(endMs / LIVE_WINDOW_MS) - 1) && this.store.has(Math.floor((endMs - spanMs) / LIVE_WINDOW_MS));
  }

  /** Enter a tick of a moving picture; `missed`: the stream has left out others before it. */
  take(tick, missed) {
    if (this.#waiting) {
      const full = this.#waiting.length === MAX_WAITING_TICKS;
      if (full || missed) this.#missedMs ??= this.#takenMs;
      if (!full) this.#waiting.push(tick);
    } else if (missed || tick.version !== this.#members.version) {
      this.reload(windowsSince(this.#takenMs, tick.now_unix_ms));
    } else {
      this.#enter(tick);
      this.changed();
    }
    this.#takenMs = tick.now_unix_ms;
  }

  #enter(tick) {
    this.nowMs = tick.now_unix_ms;
    for (const [place, [startMs, workers, covered, prefill, decode, kvWait, roles]] of tick.windows.entries()) {
      const encode = tick.encode?.[place];
      const column = this.store.column(Math.round(startMs / LIVE_WINDOW_MS));
      if (column < 0) continue;
      for (let index = 0; index < covered.length; index++) {
        const slot = this.#slots[workers ? workers[index] : index];
        if (slot >= 0) this.store.put(column, slot, covered[index], prefill[index], decode[index], kvWait[index], roles[index], encode?.[index]);
      }
    }
    this.store.settle();
  }

  /** Load the last windows, until it succeeds or others are wanted. */
  async reload(count) {
    this.#loading?.abort();
    const { signal } = (this.#loading = new AbortController());
    const { store, endMs } = this;
    [this.#waiting, this.#missedMs] = [[], null];
    while (!(await this.loadInto(store, { window: "100ms", count, endMs, signal })) && !signal.aborted) {
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    if (signal.aborted) return;
    const [waiting, missedMs] = [this.#waiting, this.#missedMs ?? this.#strange(this.#waiting)];
    this.#waiting = null;
    if (this.endMs === null) for (const tick of waiting) if (tick.version === this.#members.version) this.#enter(tick);
    if (this.endMs !== null && endMs === null) this.freeze(this.endMs);
    this.changed();
    if (missedMs !== null && this.endMs === null) await this.reload(windowsSince(missedMs, this.#takenMs));
  }

  /** When the first of the ticks came that is not of the workers there are now; null without one. */
  #strange(ticks) {
    return ticks.find((tick) => tick.version !== this.#members.version)?.now_unix_ms ?? null;
  }
}

function windowsSince(fromMs, toMs) {
  return Math.min(Math.ceil((toMs - fromMs) / LIVE_WINDOW_MS) + REVISED_WINDOWS, LIVE_COLUMNS);
}
