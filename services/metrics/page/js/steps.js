// The engine steps of one worker behind its figures: asked for while a worker is looked at, as a timeline and a table.

import { ask } from "./ask.js";
import { clockText } from "./chart.js";
import { millis, percent } from "./phases.js";
import { Timeline } from "./timeline.js";

const POLL_MS = 1000;
const WAKE_MS = 100; // how soon what is looked at is seen to have changed
const MAX_STEPS = 5000; // of an answer
const MAX_ROWS = 200; // of the table: the newest
const MS_NS = 1e6;
const GONE = 410; // HTTP's word for what was known once
const HEADS = ["began", "took", "phase", "prompt tokens", "prompts", "sequences decoded", "KV tokens read", "prefill", "decode"];

/** Sums and lists of a window of one worker; `look()` is {worker, endMs, windowMs, past}, or null where none is shown. */
export class Steps {
  #body;
  #rows = [];

  constructor(section) {
    const find = (name) => section.querySelector(name);
    [this.section, this.title, this.sums, this.note, this.file] = [section, find("h2 span"), find(".sums"), find(".note"), find("a")];
    this.timeline = new Timeline(find("canvas"), find(".readout"), (index) => this.#mark(index));
    const head = find("thead").insertRow();
    for (const text of HEADS) {
      const cell = head.appendChild(document.createElement("th"));
      [cell.scope, cell.textContent] = ["col", text];
    }
    this.#body = find("tbody");
    this.#body.addEventListener("pointerover", (event) => this.timeline.aim(Number(event.target.closest("tr")?.dataset.index ?? -1)));
  }

  /** Ask for as long as the page lives. */
  async follow(look) {
    for (let shown = null, due = 0; ; ) {
      const at = look();
      const key = at && JSON.stringify([at.worker, at.windowMs, at.past && at.endMs]);
      this.section.hidden = !at;
      if (at && key !== shown) {
        this.#clear(at);
        due = 0;
      }
      shown = key;
      if (at && !document.hidden && performance.now() >= due) {
        const done = await this.#ask(at);
        due = done ? Infinity : performance.now() + POLL_MS;
      }
      await new Promise((resolve) => setTimeout(resolve, WAKE_MS));
    }
  }

  /** Whether nothing else will come of asking again. */
  async #ask({ worker, endMs, windowMs, past }) {
    const query = new URLSearchParams({ worker, window: `${windowMs}ms`, end_unix_ms: endMs, limit: MAX_STEPS });
    const url = `v1/steps?${query}`;
    try {
      const answer = await ask(url);
      const reported = await answer.json();
      if (!answer.ok) {
        this.#clear({ worker });
        this.note.textContent = answer.status === GONE ? "The steps of that time are no longer stored." : reported.error.message;
        return answer.status < 500 && past;
      }
      this.file.href = url;
      this.#show(reported);
      return past;
    } catch {
      this.note.textContent = "the metrics service does not answer";
      return false;
    }
  }

  #clear({ worker }) {
    this.title.textContent = `Steps of ${worker}`;
    this.sums.textContent = "";
    this.note.textContent = "loading";
    this.file.hidden = true;
    this.timeline.show(null);
    this.#body.replaceChildren();
    this.#rows = [];
    delete this.section.dataset.asOfUnixMs;
  }

  #show(reported) {
    const { steps, gpus, gpu_ns: spent, as_of_unix_ns: endNs, window_ms: windowMs } = reported;
    const endMs = Math.round(endNs / MS_NS);
    this.title.textContent = `Steps of ${reported.worker}`;
    const part = (name, ns) => `${name} ${millis(ns / gpus)} (${percent(ns, spent.covered)})`;
    this.sums.textContent =
      `${steps.length + reported.left_out} steps in ${windowMs / 1000} s to ${clockText(endMs / 1000, 1)}: ` +
      [part("prefill", spent.prefill), part("decode", spent.decode), part("KV wait", spent.kv_wait), part("idle", spent.idle)].join(", ");
    const notes = [];
    if (!reported.complete) notes.push(`steps before ${clockText(reported.kept_from_unix_ns / 1e9, 1)} are no longer stored`);
    if (reported.left_out) notes.push(`${reported.left_out} later steps are left out`);
    if (steps.length > MAX_ROWS) notes.push(`the table has the last ${MAX_ROWS}, the file ${reported.left_out ? "the first" : "all"} ${steps.length}`);
    this.note.textContent = notes.join("; ");
    this.file.hidden = false;
    this.timeline.show(reported);
    this.#fill(steps);
    const { dataset } = this.section;
    dataset.asOfUnixMs = endMs;
    dataset.steps = steps.length + reported.left_out;
    dataset.gpuNs = [spent.covered, spent.prefill, spent.decode, spent.kv_wait, spent.idle].join();
    dataset.stepNs = ["prefill_ns", "decode_ns"].map((field) => gpus * steps.reduce((sum, step) => sum + step[field], 0)).join();
  }

  #fill(steps) {
    this.#rows = [];
    const from = Math.max(steps.length - MAX_ROWS, 0);
    for (let index = steps.length - 1; index >= from; index--) {
      const step = steps[index];
      const row = document.createElement("tr");
      row.dataset.index = index;
      for (const text of cellsOf(step)) row.insertCell().textContent = text;
      row.cells[2].className = step.kind;
      this.#rows[index] = row;
    }
    this.#body.replaceChildren(...this.#rows.filter(Boolean).reverse());
    this.#mark(this.timeline.pointed);
  }

  #mark(index) {
    this.#body.querySelector(".pointed")?.classList.remove("pointed");
    this.#rows[index]?.classList.add("pointed");
  }
}

function cellsOf(step) {
  const count = (value) => (value ? value.toLocaleString("en") : "");
  return [
    clockText(step.start_unix_ns / 1e9, 3),
    step.running ? `${millis(step.end_unix_ns - step.start_unix_ns)} so far` : millis(step.end_unix_ns - step.start_unix_ns),
    step.kind,
    count(step.prefill_tokens),
    count(step.prefill_sequences),
    count(step.decode_sequences),
    count(step.decode_kv_tokens),
    step.prefill_ns ? millis(step.prefill_ns) : "",
    step.decode_ns ? millis(step.decode_ns) : "",
  ];
}
