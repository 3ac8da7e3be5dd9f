// The past: moves the end of what is shown, by hand or window by window as time goes, only faster.

import { KEPT_MS } from "./phases.js";

const STEP = 0.5; // of the range, at a time
const PLAY_MS = 100; // a window each

export class Replay extends EventTarget {
  #run = null; // aborts what plays

  constructor(view, feed) {
    super();
    this.view = view;
    this.feed = feed;
  }

  get playing() {
    return this.#run !== null;
  }

  /** Half a range earlier (-1) or later (1). */
  step(direction) {
    this.stop();
    const { columns, windowMs } = this.view.rangeOf;
    return this.#move(direction * STEP * columns * windowMs);
  }

  /** Play on from where the view ends, a range back where it is live; or stop. */
  async toggle() {
    if (this.playing) {
      this.stop();
      // A window that is still on its way is not shown any more: it would move what stands still.
      if (this.feed.endMs !== this.view.endMs) this.feed.look(this.view.rangeOf, this.view.endMs);
      return;
    }
    const run = (this.#run = new AbortController());
    const { columns, windowMs } = this.view.rangeOf;
    this.dispatchEvent(new Event("change"));
    if (!this.view.end) await this.#move(-columns * windowMs);
    while (!run.signal.aborted) {
      await new Promise((resolve) => setTimeout(resolve, PLAY_MS));
      const moved = run.signal.aborted || (await this.#move(this.feed.range.windowMs));
      if (!moved && !run.signal.aborted) this.stop();
    }
  }

  stop() {
    this.#run?.abort();
    this.#run = null;
    this.dispatchEvent(new Event("change"));
  }

  /** Move the end by so much, as far as anything is kept; whether it moved. */
  async #move(ms) {
    const { windowMs, columns } = this.view.rangeOf;
    const aligned = (at) => Math.floor(at / windowMs) * windowMs;
    const latest = aligned(this.feed.latestMs - this.feed.settledMs);
    const from = this.view.endMs ?? latest;
    const earliest = Math.min(from, aligned(latest - KEPT_MS) + columns * windowMs);
    const to = Math.min(latest, Math.max(earliest, aligned(from + ms)));
    const looking = this.feed.look(this.view.rangeOf, to);
    if (to <= from) this.view.set({ end: String(to) });
    await looking;
    // What lies ahead is shown once it is here, unless somebody has gone elsewhere or stopped meanwhile.
    if (to > from && this.feed.endMs === to) this.view.set({ end: String(to) });
    return to !== from;
  }
}

/** What figures are of: the newest settled windows where they are live, or were when all was stopped; of a past of which
 * no such are here, the last of those shown that were over by then. */
export function figuresOf(live, shown, { endMs, settledMs, figureMs }) {
  const at = endMs ?? settledMs, past = endMs !== null && !live.has(Math.floor(at / live.windowMs) - 1);
  const store = past ? shown : live;
  const last = Math.floor(at / store.windowMs) - 1, count = Math.ceil(figureMs / store.windowMs);
  return { store, last, count, past, asOfMs: (last + 1) * store.windowMs, windowMs: count * store.windowMs };
}
