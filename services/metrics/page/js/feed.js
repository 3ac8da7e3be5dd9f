// Keeps the stores true to the service: history first, then the live stream; gaps are loaded again.

import { Alerts } from "./alerts.js";
import { ask } from "./ask.js";
import { Live } from "./live.js";
import { LIVE_COLUMNS, LIVE_WINDOW_MS, rangeAt } from "./phases.js";
import { Store } from "./store.js";
import { follow } from "./stream.js";
import { load } from "./windows.js";

const TAIL_WINDOWS = 3; // of coarse windows, which are polled: the newest ones still change
const MAX_EVENTS = 500;
const RETRY_MS = 1000;
const LIVE_KEPT_MS = LIVE_COLUMNS * LIVE_WINDOW_MS - 5000; // some go while they are loaded
const LATE_MS = 5000; // a stream that is so much later than it was: the line or this page is too slow for all of it
const SETBACK_MS = 1000; // by which a service's time lies behind what it sent before: its clock was corrected

export class Feed extends EventTarget {
  constructor() {
    super();
    this.#live = new Live((store, query) => this.#load(store, query), () => this.#changed());
    this.range = null; // which windows those are, and how many
    this.endMs = null; // where they end; null: they are live
    this.depths = null;
    this.queues = [];
    this.events = [];
    this.alerts = new Alerts();
    this.settledMs = 400;
    this.ageMs = null; // how old the data were when that was sent; null: nobody is there
    this.connected = false;
    this.problem = "";
    this.latestMs = Date.now(); // of the service, whatever is shown
    this.#members = { version: 0, workers: [] };
    this.#byId = new Map();
  }
  #live;
  #members;
  #byId;
  #number = null;
  #agedAt = 0; // when that was
  #lateMs = 0; // how much longer the last tick was on its way than the quickest
  #quickestMs = Infinity; // of this connection, with how far the clocks are apart
  #coarse = null; // aborts the loading and polling of coarse windows
  #coarseLoading = false; // what is polled later is no loading
  #whole = -1; // the coarse window up to which all are shown as they will stay
  #coarseStore = null; // where charts are of coarse windows
  #asked = 0; // how often events were to be loaded
  #asking = false;

  /** The newest windows of 100 ms. */
  get live() {
    return this.#live.store;
  }

  /** The windows that charts are of. */
  get shown() {
    return this.#coarseStore ?? this.live;
  }

  /** The time that a live picture is of. */
  get nowMs() {
    return this.#live.nowMs;
  }

  /** Ids of the workers that `depths` are of, in its order. */
  get ids() {
    return this.#members.workers.map((worker) => worker.id);
  }

  /** Whether windows of the time shown are still to come. */
  get loading() {
    return this.#live.loads || this.#coarseLoading;
  }

  /** How far what is live lies behind now, in ms. */
  get behindMs() {
    if (this.ageMs === null) return 0;
    const picture = this.paused ? 0 : Math.max(this.latestMs - this.nowMs, 0); // ticks that wait while windows load
    return this.ageMs + performance.now() - this.#agedAt + picture + this.#lateMs;
  }

  get paused() {
    return this.endMs !== null;
  }

  /** Connect, and show a range that ends at `endMs`, or now where that is null. */
  start(range, endMs) {
    this.#refreshEvents();
    this.look(range, endMs);
    follow("v1/occupancy/stream", {
      members: (members) => this.#takeMembers(members),
      tick: (tick) => this.#takeTick(tick),
      opened: () => (this.#quickestMs = Infinity),
      tell: (connected, problem) => this.#tell(connected, problem),
    });
  }

  /** Stop the picture where it stands. */
  freeze(endMs) {
    this.endMs = endMs;
    this.#coarse?.abort();
    this.#live.freeze(endMs);
    this.#changed();
  }

  /** Show a range that ends at a moment, or now; of what is held only the rest is loaded. Done once it is shown. */
  look(range, endMs) {
    const before = this.endMs, ageMs = endMs === null ? 0 : this.latestMs - endMs;
    this.endMs = this.#live.endMs = endMs;
    if (endMs === null) {
      if (before !== null) this.#live.replace();
      return this.#show((this.range = range));
    }
    if (before !== endMs) this.depths = null; // which are of now
    const spanMs = LIVE_WINDOW_MS * (range.windowMs === LIVE_WINDOW_MS ? range.columns : 1);
    const loading = this.#live.holds(endMs, spanMs) ? null : ageMs + spanMs < LIVE_KEPT_MS && this.#loadLive(endMs, ageMs);
    this.range = loading === false || range.windowMs !== LIVE_WINDOW_MS ? rangeAt(range, ageMs) : range;
    return Promise.all([loading, this.#show(this.range)]);
  }

  #loadLive(endMs, ageMs) {
    const missing = Math.floor(endMs / LIVE_WINDOW_MS) - 1 - this.live.newest;
    const kept = Math.min(Math.floor((LIVE_KEPT_MS - ageMs) / LIVE_WINDOW_MS), LIVE_COLUMNS); // what is gone would come empty
    const goesOn = !this.#live.loads && missing > 0 && missing <= kept;
    return goesOn ? this.#live.reload(missing) : this.#live.replace(kept);
  }

  #takeMembers(members) {
    this.settledMs = members.settled_ms;
    this.#members = members;
    for (const worker of members.workers) this.#byId.set(worker.id, worker);
    this.#live.follow(members);
    // Once the stream is there, so that no window falls between what is loaded and what comes.
    if (!this.paused && this.#number === null && !this.#live.loads) this.#live.reload(LIVE_COLUMNS);
  }

  /** False where the stream lies so far behind that it is better begun anew, at now. */
  #takeTick(tick) {
    const wayMs = performance.now() - tick.now_unix_ms;
    this.#quickestMs = Math.min(this.#quickestMs, wayMs);
    this.#lateMs = wayMs - this.#quickestMs;
    this.#tell(true, this.problem);
    const setBack = tick.now_unix_ms < this.latestMs - SETBACK_MS && this.#number !== null;
    const gap = this.#number === null ? 0 : tick.number - this.#number - 1;
    this.latestMs = tick.now_unix_ms;
    this.#number = tick.number;
    for (const event of tick.events) this.#addEvent(event);
    this.alerts.take(tick.alerts);
    if (tick.depths) [this.ageMs, this.#agedAt] = [tick.age_ms, performance.now()];
    if (gap !== 0) this.#refreshEvents();
    const late = this.#lateMs > LATE_MS;
    if (this.paused) {
      if (tick.events.length || tick.alerts.length) this.#changed(); // alerts fire and end all the same
      return !late;
    }
    if (tick.depths) [this.depths, this.queues] = [tick.depths, tick.queues]; // between two windows nothing is said of them
    if (gap < 0 || setBack) this.#startAnew();
    else this.#live.take(tick, gap > 0);
    return !late;
  }

  /** Another service, or another time. */
  #startAnew() {
    this.#live.nowMs = this.latestMs;
    this.#live.replace();
    this.#show(this.range);
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
    this.#coarseLoading = false;
    if (range.windowMs === LIVE_WINDOW_MS) {
      this.#coarseStore = null;
      this.#changed();
      return undefined;
    }
    const store = this.shown, last = this.endMs === null ? -1 : Math.ceil(this.endMs / range.windowMs) - 1;
    const same = store.windowMs === range.windowMs && store.columns === range.columns;
    const missing = last - this.#whole;
    const goesOn = same && this.#whole >= 0 && last >= store.newest && missing < range.columns;
    if (!goesOn) [this.#coarseStore, this.#whole] = [new Store(range.windowMs, range.columns), -1];
    this.#changed();
    return this.#follow(this.shown, range, goesOn ? missing : range.columns);
  }

  async #follow(store, range, count) {
    const { signal } = (this.#coarse = new AbortController());
    const { endMs } = this;
    this.#coarseLoading = count > 0;
    while (count && !signal.aborted) {
      const settled = Math.floor((this.latestMs - this.settledMs) / range.windowMs) - 1;
      const loaded = await this.#load(store, { window: range.window, count, endMs, signal });
      if (loaded) {
        this.#whole = Math.min(settled, store.newest);
        this.#coarseLoading = false;
        this.#changed();
        if (endMs !== null) return;
        count = TAIL_WINDOWS;
      }
      await new Promise((resolve) => setTimeout(resolve, Math.min(range.windowMs, 2000)));
    }
  }

  /** Load role moves and alerts, again for as long as it fails, or once more where it was asked for meanwhile. */
  async #refreshEvents() {
    this.#asked++;
    if (this.#asking) return;
    this.#asking = true;
    for (let done = 0; done !== this.#asked; ) {
      const asked = this.#asked;
      const loaded = await this.#loadEvents();
      if (loaded) done = asked;
      else await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
    this.#asking = false;
  }

  async #loadEvents() {
    const missing = "role moves and alerts could not be loaded";
    try {
      const events = await (await ask("v1/events?limit=500")).json();
      for (const event of events.reverse()) this.#addEvent(event);
      if (!(await this.alerts.load())) throw new Error(missing);
    } catch {
      this.#tell(this.connected, missing);
      return false;
    }
    if (this.problem === missing) this.#tell(this.connected, "");
    this.#changed();
    return true;
  }

  #addEvent(event) {
    if (this.events.some((known) => known.number === event.number && known.unix_ms === event.unix_ms)) return;
    this.events.push(event);
    if (event.planner) this.dispatchEvent(new Event("decision"));
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
