// What the service says of the cluster, asked once a second; and what it said before, for charts and for times past.

import { ask } from "../ask.js";

const POLL_MS = 1000;
const TAIL_WINDOWS = 5; // asked again: the newest still change
const TIERS = [
  { window: "1s", windowMs: 1000, kept: 3600 },
  { window: "10s", windowMs: 10000, kept: 2160 },
  { window: "60s", windowMs: 60000, kept: 2880 },
];
const MAX_COLUMNS = 3600; // in one answer

export class StatusFeed extends EventTarget {
  now = null; // the last answer of /v1/status
  problem = ""; // why there is none
  #heardAt = 0; // when it came
  #rows = new Map(); // number of a window -> {models, traffic}, as far as they are known
  #verdicts = []; // of the span that is shown
  #tier = TIERS[0];
  #wanted = null; // {key, endMs, spanMs} of what is shown
  #loaded = ""; // its key, once it has been loaded

  /** Poll for as long as the page lives. */
  async start() {
    for (;;) {
      if (!document.hidden) await this.#look();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  /** Show a span that ends at `endMs`, or now where that is null. */
  look(spanMs, endMs, nowMs) {
    const ageMs = endMs === null ? 0 : Math.max(nowMs - endMs, 0);
    const tier = TIERS.find(({ windowMs, kept }) => spanMs / windowMs <= MAX_COLUMNS && kept * windowMs >= ageMs + spanMs) ?? TIERS.at(-1);
    const key = `${tier.window} ${spanMs} ${endMs}`;
    if (this.#wanted?.key === key) return;
    if (tier !== this.#tier || endMs !== null || this.#wanted?.endMs !== null) this.#rows.clear();
    this.#tier = tier;
    this.#wanted = { key, endMs, spanMs };
    this.#loaded = "";
    this.#follow();
  }

  /** How old the answer is, and the moment it is about, in ms; null before the first. */
  get ageMs() {
    return this.now === null ? null : performance.now() - this.#heardAt + (this.now.age_ms ?? 0);
  }

  get windowMs() {
    return this.#tier.windowMs;
  }

  /** Rows of windows that start in [fromMs, toMs): [times in s, rows or null]. */
  rows(fromMs, toMs) {
    const times = [], rows = [], { windowMs } = this.#tier;
    for (let number = Math.floor(fromMs / windowMs); number * windowMs < toMs; number++) {
      times.push(((number + 0.5) * windowMs) / 1000);
      rows.push(this.#rows.get(number) ?? null);
    }
    return [times, rows];
  }

  /** The figures of the newest window before a moment, and the verdict that stood then; null where none is known. */
  at(endMs) {
    const { windowMs } = this.#tier;
    const last = Math.ceil(endMs / windowMs) - 1;
    const row = [last, last - 1, last - 2].map((number) => this.#rows.get(number)).find(Boolean) ?? null;
    const verdict = this.#verdicts.filter((each) => each.unix_ms <= endMs).at(-1) ?? null;
    return row || verdict ? { row, verdict } : null;
  }

  async #look() {
    try {
      const answer = await ask("v1/status");
      const reported = await answer.json();
      if (!answer.ok) throw new Error(reported.error?.message ?? answer.statusText);
      [this.now, this.#heardAt, this.problem] = [reported, performance.now(), ""];
    } catch (error) {
      this.problem = error.name === "SyntaxError" || error.name === "TypeError" ? "the metrics service does not answer" : error.message;
    }
    if (this.#wanted) await this.#follow();
    this.dispatchEvent(new Event("change"));
  }

  /** Load what is wanted and not there: all of it, or the newest windows of what moves. */
  async #follow() {
    const wanted = this.#wanted, { window, windowMs } = this.#tier;
    if (this.#loaded === wanted.key && wanted.endMs !== null) return;
    const spanMs = this.#loaded === wanted.key ? TAIL_WINDOWS * windowMs : Math.max(wanted.spanMs, windowMs);
    const query = new URLSearchParams({ window, span: `${Math.ceil(spanMs / windowMs) * (windowMs / 1000)}s` });
    if (wanted.endMs !== null) query.set("end_unix_ms", wanted.endMs);
    try {
      const answer = await ask(`v1/status/history?${query}`);
      if (!answer.ok) return;
      const reported = await answer.json();
      if (this.#wanted !== wanted) return;
      this.#enter(reported, this.#loaded !== wanted.key);
      this.#loaded = wanted.key;
      this.dispatchEvent(new Event("change"));
    } catch {
      // Asked again with the next status.
    }
  }

  #enter(reported, whole) {
    const first = Math.round(reported.first_start_unix_ms / reported.window_ms);
    const count = reported.traffic.requests_per_s.length;
    for (let index = 0; index < count; index++) {
      const models = {};
      for (const [name, columns] of Object.entries(reported.models)) {
        if (columns.prefill[index] !== null || columns.decode[index] !== null || columns.running[index] !== null) models[name] = pick(columns, index);
      }
      const traffic = pick(reported.traffic, index);
      const known = Object.keys(models).length || traffic.requests_per_s !== null;
      if (known) this.#rows.set(first + index, { models, traffic });
    }
    const oldest = first + count - Math.ceil(this.#wanted.spanMs / reported.window_ms) - TAIL_WINDOWS;
    for (const number of this.#rows.keys()) if (number < oldest) this.#rows.delete(number);
    if (whole) this.#verdicts = reported.verdicts;
    else for (const verdict of reported.verdicts) if (!this.#verdicts.some((known) => known.unix_ms === verdict.unix_ms)) this.#verdicts.push(verdict);
  }
}

const pick = (columns, index) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]]));
