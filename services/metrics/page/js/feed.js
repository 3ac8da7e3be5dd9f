// Keeps the stores true to the service: history first, then the live stream; gaps are loaded again.

import { Alerts } from "./alerts.js";
import { LIVE_COLUMNS, LIVE_WINDOW_MS } from "./phases.js";
import { Store } from "./store.js";
import { load } from "./windows.js";

const MAX_WAITING_TICKS = 600; // that come while history loads
const TAIL_WINDOWS = 3; // of coarse windows, which are polled: the newest ones still change
const MAX_EVENTS = 500;
const RETRY_MS = 1000;

export class Feed extends EventTarget {
  constructor() {
    super();
    this.live = new Store(LIVE_WINDOW_MS, LIVE_COLUMNS);
    this.shown = this.live; // what charts are of
    this.depths = null;
    this.events = [];
    this.alerts = new Alerts();
    this.settledMs = 400;
    this.nowMs = Date.now();
    this.latestMs = this.nowMs; // as the service told last, also while nothing moves
    this.connected = false;
    this.problem = "";
    this.paused = false;
    this.#members = { version: 0, workers: [] };
    this.#byId = new Map();
    this.#slots = [];
  }
  #members;
  #byId;
  #slots;
  #number = null;
  #waiting = null; // ticks that came while history loads; null when it does not
  #coarse = null; // aborts the loading and polling of coarse windows

  /** Ids of the workers that `depths` are of, in its order. */
  get ids() {
    return this.#members.workers.map((worker) => worker.id);
  }

  /** Connect; with `endMs` show what was then, and nothing after. */
  start(endMs) {
    this.#refreshEvents();
    this.paused = endMs !== null;
    this.#connect(endMs);
  }

  #connect(endMs) {
    const source = new EventSource("/v1/occupancy/stream");
    source.addEventListener("members", (message) => this.#takeMembers(JSON.parse(message.data), endMs));
    source.addEventListener("tick", (message) => this.#takeTick(JSON.parse(message.data)));
    source.addEventListener("open", () => this.#tell(true, ""));
    source.addEventListener("error", () => {
      this.#tell(false, "the metrics service does not answer");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => this.#connect(null), RETRY_MS);
    });
  }

  #takeMembers(members, endMs) {
    this.settledMs = members.settled_ms;
    this.#members = members;
    for (const worker of members.workers) this.#byId.set(worker.id, worker);
    if (this.#number === null && this.#waiting === null) this.#reload(LIVE_COLUMNS, endMs);
    if (!this.paused) this.#slots = members.workers.map((worker) => this.live.slot(worker));
  }

  #takeTick(tick) {
    this.#tell(true, this.problem);
    for (const event of tick.events) this.#addEvent(event);
    this.alerts.take(tick.alerts);
    this.depths = tick.depths;
    this.latestMs = tick.now_unix_ms;
    if (this.paused) {
      this.#number = tick.number;
      return;
    }
    const gap = this.#number === null ? 0 : tick.number - this.#number - 1;
    this.#number = tick.number;
    if (this.#waiting) {
      if (this.#waiting.length < MAX_WAITING_TICKS) this.#waiting.push(tick);
      return;
    }
    if (gap !== 0) this.#refreshEvents();
    if (gap < 0 || gap > LIVE_COLUMNS) this.#reload(LIVE_COLUMNS, null);
    else if (gap > 0 || tick.version !== this.#members.version) this.#reload(Math.min(gap + 20, LIVE_COLUMNS), null);
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

  async #reload(count, endMs) {
    this.#waiting = [];
    try {
      await load(this.live, { window: "100ms", columns: LIVE_COLUMNS, count, endMs, memberOf: (id) => this.#member(id) });
      this.#tell(this.connected, "");
    } catch (error) {
      this.#tell(this.connected, error.message);
    }
    const waiting = this.#waiting;
    this.#waiting = null;
    if (!this.paused) for (const tick of waiting) this.#enter(tick);
    this.live.revision++;
    this.#changed();
  }

  #member(id) {
    return this.#byId.get(id) ?? { id, node: "not heard of", model: "not heard of", gpus: 1, engine: "" };
  }

  /** Stop the picture, or catch up with what came meanwhile. */
  pause(paused) {
    this.paused = paused;
    if (!paused) {
      this.#slots = this.#members.workers.map((worker) => this.live.slot(worker));
      this.#reload(LIVE_COLUMNS, null);
    }
    this.#changed();
  }

  /** Show what was until `endMs`, and stop there; of what is held only the rest is loaded. */
  async moveTo(range, endMs) {
    this.paused = true;
    const store = this.shown;
    const missing = Math.ceil(endMs / range.windowMs) - 1 - store.newest;
    if (store !== this.live && (missing < 0 || missing > range.columns)) return this.show(range, endMs);
    if (missing > 0) {
      this.#coarse?.abort();
      const { signal } = (this.#coarse = new AbortController());
      const count = Math.min(missing, store.columns);
      try {
        await load(store, { ...range, columns: store.columns, count, endMs, memberOf: (id) => this.#member(id), signal });
        this.#tell(this.connected, "");
      } catch (error) {
        if (!signal.aborted) this.#tell(this.connected, error.message);
      }
    }
    this.#changed();
  }

  /** Show windows of a range: live ones, or coarser ones that are polled. */
  async show(range, endMs) {
    this.#coarse?.abort();
    if (range.windowMs === LIVE_WINDOW_MS) {
      this.shown = this.live;
      this.#changed();
      return;
    }
    const { signal } = (this.#coarse = new AbortController());
    const store = (this.shown = new Store(range.windowMs, range.columns));
    const memberOf = (id) => this.#member(id);
    let count = range.columns, end = endMs;
    while (!signal.aborted) {
      try {
        if (!this.paused || count > TAIL_WINDOWS) await load(store, { ...range, count, endMs: end, memberOf, signal });
        this.#changed();
        if (end !== null) return;
        count = TAIL_WINDOWS;
      } catch (error) {
        if (!signal.aborted) this.#tell(this.connected, error.message);
      }
      await new Promise((resolve) => setTimeout(resolve, Math.min(range.windowMs, 2000)));
      end = null;
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
