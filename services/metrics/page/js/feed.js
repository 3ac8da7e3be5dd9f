// Keeps the stores true to the service: history first, then the live stream; gaps are loaded again.

import { Alerts } from "./alerts.js";
import { LIVE_COLUMNS, LIVE_WINDOW_MS, rangeAt } from "./phases.js";
import { Store } from "./store.js";
import { follow } from "./stream.js";
import { load } from "./windows.js";

const MAX_WAITING_TICKS = 600; // that come while history loads
const TAIL_WINDOWS = 3; // of coarse windows, which are polled: the newest ones still change
const MAX_EVENTS = 500;
const RETRY_MS = 1000;
const LIVE_KEPT_MS = LIVE_COLUMNS * LIVE_WINDOW_MS - 5000; // some go while they are loaded

export class Feed extends EventTarget {
  constructor() {
    super();
    this.live = new Store(LIVE_WINDOW_MS, LIVE_COLUMNS);
    this.shown = this.live; // what charts are of
    this.range = null; // which windows those are, and how many
    this.endMs = null; // where they end; null: they are live
    this.depths = null;
    this.events = [];
    this.alerts = new Alerts();
    this.settledMs = 400;
    this.nowMs = Date.now(); // of the picture
    this.connected = false;
    this.problem = "";
    this.latestMs = Date.now(); // of the service, whatever is shown
    this.#members = { version: 0, workers: [] };
    this.#byId = new Map();
    this.#slots = [];
  }
  #members;
  #byId;
  #slots;
  #number = null;
  #waiting = null; // ticks that came while history loads; null when it does not
  #reloading = null; // aborts the loading of live windows
  #coarse = null; // aborts the loading and polling of coarse windows
  #whole = -1; // the coarse window up to which all are shown as they will stay

  /** Ids of the workers that `depths` are of, in its order. */
  get ids() {
    return this.#members.workers.map((worker) => worker.id);
  }

  get paused() {
    return this.endMs !== null;
  }

  /** Connect, and show a range that ends at `endMs`, or now where that is null. */
  start(range, endMs) {
    this.#refreshEvents();
    this.look(range, endMs);
    follow("/v1/occupancy/stream", {
      members: (members) => this.#takeMembers(members),
      tick: (tick) => this.#takeTick(tick),
      tell: (connected, problem) => this.#tell(connected, problem),
    });
  }

  /** Stop the picture where it stands. */
  freeze(endMs) {
    this.endMs = endMs;
    this.#coarse?.abort();
    this.#dropUnfinished();
    this.#changed();
  }

  /** What may still change is loaded again when the picture moves on: nobody tells what becomes of it meanwhile. */
  #dropUnfinished() {
    this.live.drop(Math.floor(this.endMs / LIVE_WINDOW_MS));
  }

  /** Show a range that ends at a moment, or now; of what is held only the rest is loaded. Done once it is shown. */
  look(range, endMs) {
    const before = this.endMs, ageMs = endMs === null ? 0 : this.latestMs - endMs;
    this.endMs = endMs;
    if (endMs === null) {
      if (before !== null) this.#replaceLive();
      return this.#show((this.range = range));
    }
    if (before !== endMs) this.depths = null; // which tell of now
    const spanMs = LIVE_WINDOW_MS * (range.windowMs === LIVE_WINDOW_MS ? range.columns : 1);
    const loading = this.#holds(endMs, spanMs) ? null : ageMs + spanMs < LIVE_KEPT_MS && this.#loadLive(endMs, ageMs);
    this.range = loading === false || range.windowMs !== LIVE_WINDOW_MS ? rangeAt(range, ageMs) : range;
    return Promise.all([loading, this.#show(this.range)]);
  }

  #replaceLive(count = LIVE_COLUMNS) {
    this.live = new Store(LIVE_WINDOW_MS, LIVE_COLUMNS);
    this.#setSlots();
    return this.#reload(count);
  }

  /** Whether the live windows of a span that ends then are here. */
  #holds(endMs, spanMs) {
    return this.live.has(Math.floor(endMs / LIVE_WINDOW_MS) - 1) && this.live.has(Math.floor((endMs - spanMs) / LIVE_WINDOW_MS));
  }

  #loadLive(endMs, ageMs) {
    const missing = Math.floor(endMs / LIVE_WINDOW_MS) - 1 - this.live.newest;
    const kept = Math.min(Math.floor((LIVE_KEPT_MS - ageMs) / LIVE_WINDOW_MS), LIVE_COLUMNS); // what is gone would come empty
    const goesOn = !this.#waiting && missing > 0 && missing <= kept;
    return goesOn ? this.#reload(missing) : this.#replaceLive(kept);
  }

  #takeMembers(members) {
    this.settledMs = members.settled_ms;
    this.#members = members;
    for (const worker of members.workers) this.#byId.set(worker.id, worker);
    if (this.paused) return;
    this.#setSlots();
    // Once the stream is there, so that no window falls between what is loaded and what comes.
    if (this.#number === null && !this.#waiting) this.#reload(LIVE_COLUMNS);
  }

  #setSlots() {
    this.#slots = this.#members.workers.map((worker) => this.live.slot(worker));
  }

  #takeTick(tick) {
    this.#tell(true, this.problem);
    this.latestMs = tick.now_unix_ms;
    for (const event of tick.events) this.#addEvent(event);
    this.alerts.take(tick.alerts);
    const gap = this.#number === null ? 0 : tick.number - this.#number - 1;
    this.#number = tick.number;
    if (this.paused) return;
    this.depths = tick.depths;
    if (this.#waiting) {
      if (this.#waiting.length < MAX_WAITING_TICKS) this.#waiting.push(tick);
      return;
    }
    if (gap !== 0) this.#refreshEvents();
    if (gap < 0 || gap > LIVE_COLUMNS) this.#reload(LIVE_COLUMNS);
    else if (gap > 0 || tick.version !== this.#members.version) this.#reload(Math.min(gap + 20, LIVE_COLUMNS));
    else {
      this.#enter(tick);
      this.#changed();
    }
  }

  #enter(tick) {
    this.nowMs = tick.now_unix_ms;
    if (tick.version !== this.#members.version) return;
    for (const [startMs, workers, covered, prefill, decode, kvWait, roles] of tick.windows) {
      const column = this.live.column(Math.round(startMs / LIVE_WINDOW_MS));
      if (column < 0) continue;
      for (let index = 0; index < covered.length; index++) {
        const slot = this.#slots[workers ? workers[index] : index];
        if (slot >= 0) this.live.put(column, slot, covered[index], prefill[index], decode[index], kvWait[index], roles[index]);
      }
    }
    this.live.settle();
  }

  /** Load live windows, until it succeeds or others are wanted. */
  async #reload(count) {
    this.#reloading?.abort();
    const { signal } = (this.#reloading = new AbortController());
    const { live, endMs } = this;
    this.#waiting = [];
    while (!(await this.#load(live, { window: "100ms", count, endMs, signal }))) {
      if (signal.aborted) return;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    const waiting = this.#waiting;
    this.#waiting = null;
    if (!this.paused) for (const tick of waiting) this.#enter(tick);
    else if (endMs === null) this.#dropUnfinished();
    live.revision++;
    this.#changed();
  }

  /** Whether windows were loaded; says why not. */
  async #load(store, query) {
    try {
      await load(store, { ...query, memberOf: (member) => this.#byId.get(member.id) ?? member });
    } catch (error) {
      if (!query.signal.aborted) this.#tell(this.connected, error.message);
      return false;
    }
    this.#tell(this.connected, "");
    return !query.signal.aborted;
  }

  /** Show windows of a range: live ones, or coarser ones that are polled where they do not end at a moment. */
  #show(range) {
    this.#coarse?.abort();
    if (range.windowMs === LIVE_WINDOW_MS) {
      this.shown = this.live;
      this.#changed();
      return undefined;
    }
    const store = this.shown, last = this.endMs === null ? -1 : Math.ceil(this.endMs / range.windowMs) - 1;
    const same = store.windowMs === range.windowMs && store.columns === range.columns;
    const missing = last - this.#whole;
    const goesOn = same && this.#whole >= 0 && last >= store.newest && missing < range.columns;
    if (!goesOn) [this.shown, this.#whole] = [new Store(range.windowMs, range.columns), -1];
    this.#changed();
    return this.#follow(this.shown, range, goesOn ? missing : range.columns);
  }

  async #follow(store, range, count) {
    const { signal } = (this.#coarse = new AbortController());
    const { endMs } = this;
    while (count && !signal.aborted) {
      const settled = Math.floor((this.latestMs - this.settledMs) / range.windowMs) - 1;
      const loaded = await this.#load(store, { window: range.window, count, endMs, signal });
      if (loaded) this.#whole = Math.min(settled, store.newest);
      if (loaded) this.#changed();
      if (loaded && endMs !== null) return;
      if (loaded) count = TAIL_WINDOWS;
      await new Promise((resolve) => setTimeout(resolve, Math.min(range.windowMs, 2000)));
    }
  }

  async #refreshEvents() {
    try {
      const events = await (await fetch("/v1/events?limit=500")).json();
      for (const event of events.reverse()) this.#addEvent(event);
      if (!(await this.alerts.load())) this.#tell(this.connected, "alerts could not be loaded");
      this.#changed();
    } catch {
      this.#tell(this.connected, "role moves could not be loaded");
    }
  }

  #addEvent(event) {
    if (this.events.some((known) => known.number === event.number && known.unix_ms === event.unix_ms)) return;
    this.events.push(event);
    if (this.events.length > MAX_EVENTS) this.events.shift();
  }

  #tell(connected, problem) {
    const changed = connected !== this.connected || problem !== this.problem;
    [this.connected, this.problem] = [connected, problem];
    if (changed) this.dispatchEvent(new Event("status"));
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}
