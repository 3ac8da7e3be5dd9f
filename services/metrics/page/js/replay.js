// The past: moves the end of what is shown, by hand or window by window as time goes, only faster.

import { GPU_NS } from "./phases.js";

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
    if (this.playing) return this.stop();
    const run = (this.#run = new AbortController());
    const { columns, windowMs } = this.view.rangeOf;
    this.dispatchEvent(new Event("change"));
    if (!this.view.end) await this.#move(-columns * windowMs);
    while (!run.signal.aborted) {
      await new Promise((resolve) => setTimeout(resolve, PLAY_MS));
      const moved = run.signal.aborted || (await this.#move(windowMs, () => run.signal.aborted));
      if (!moved && !run.signal.aborted) this.stop();
    }
  }

  stop() {
    this.#run?.abort();
    this.#run = null;
    this.dispatchEvent(new Event("change"));
  }

  /** Move the end by so much, as far as windows are kept; whether it moved. */
  async #move(ms, stopped = () => false) {
    const { windowMs, columns, keptMs } = this.view.rangeOf;
    const aligned = (at) => Math.floor(at / windowMs) * windowMs;
    const latest = aligned(this.feed.latestMs - this.feed.settledMs);
    const from = this.view.endMs ?? latest;
    const earliest = Math.min(from, aligned(latest - keptMs) + columns * windowMs);
    const to = Math.min(latest, Math.max(earliest, aligned(from + ms)));
    const ahead = to > from;
    if (!ahead) this.view.set({ end: String(to) });
    await this.feed.moveTo(this.view.rangeOf, to);
    // What lies ahead is shown once it is here, unless somebody has stopped or gone back to what is live meanwhile.
    if (ahead && this.feed.paused && !stopped()) this.view.set({ end: String(to) });
    return to !== from;
  }
}

/** What figures are of: the finest windows up to number `settled`; of a past of which none are kept, those shown, up to
 * number `last`. */
export function figuresOf(live, shown, { ended, figureMs, settled, last }) {
  const count = figureMs / live.windowMs;
  if (!ended || shown === live || live.total("cluster", settled, count)[GPU_NS]) return { store: live, last: settled, count, past: false };
  return { store: shown, last, count: Math.max(1, Math.round(figureMs / shown.windowMs)), past: true };
}
