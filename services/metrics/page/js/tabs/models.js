// The view of models that share a pool: state, load time, last and next use; how many are in use now and soon, GPUs
// reserved against needed, and what would lose its worker next. The planner knows it.

import { ask } from "../ask.js";
import { DASH, millis, plural, span } from "../status/words.js";
import { jsonOf, Poll } from "./tabs.js";

const EVERY_MS = 2_000;
const MAX_ROWS = 500;
const $ = (id) => document.getElementById(id);
const plain = (value) => (value == null ? DASH : String(Math.round(10 * value) / 10));

const HEADS = ["model", "state", "worker", "in flight", "waiting", "a request would wait", "load", "last use", "next likely use", "TTFT", "TPOT", "kept by"];

export class ModelsTab {
  #poll = new Poll(() => this.#look(), EVERY_MS);

  constructor() {
    const row = $("models-table").tHead.insertRow();
    for (const text of HEADS) row.appendChild(document.createElement("th")).textContent = text;
  }

  show() {
    this.#poll.start();
  }

  hide() {
    this.#poll.stop();
  }

  async #look() {
    try {
      this.#draw(await jsonOf(ask("v1/models")));
    } catch (error) {
      $("models-note").textContent = error.message === "Not Found" ? "this suite has no pool of models: `fulcrum up --engine sim --model A --model B --pool 2`" : error.message;
      for (const id of ["models-figures", "models-panel", "evictions-panel"]) $(id).hidden = true;
    }
  }

  #draw(found) {
    $("models-note").textContent = `${plural(found.cold_starts, "cold start")} so far`;
    $("models-figures").replaceChildren(...figuresOf(found));
    $("models-figures").hidden = $("models-panel").hidden = false;
    const shown = [...found.models].sort(byUse).slice(0, MAX_ROWS);
    $("models-count").textContent = shown.length < found.models.length ? `the first ${MAX_ROWS} of ${found.models.length}` : `${found.models.length}`;
    $("models-table").tBodies[0].replaceChildren(...shown.map(rowOf));
    $("evictions-panel").hidden = found.next_evicted.length === 0;
    $("evictions").replaceChildren(...found.next_evicted.map(({ model, worker, why }) => Object.assign(document.createElement("li"), { textContent: `${model} on ${worker}: ${why}` })));
  }
}

function figuresOf(found) {
  const outcomes = (each) => (each ? [plain(each.expected), `p50 ${each.p50} · p90 ${each.p90} · p99 ${each.p99}`] : [DASH, "not known yet"]);
  const figures = [
    ["GPUs busy now", String(found.active_now), `of ${found.gpus} in the pool`],
    [`at once within ${span(1000 * found.window_s)}`, ...outcomes(found.at_once)],
    ...Object.entries(found.asked_within).map(([seconds, each]) => [`models requested within ${span(1000 * Number(seconds))}`, ...outcomes(each)]),
    ["GPUs to reserve", found.reserve_gpus == null ? DASH : String(found.reserve_gpus), "enough in 99 of 100 windows"],
    ["GPUs kept", String(found.kept_gpus), `by floors, pins and reservations · ${found.needed_gpus} needed now`],
  ];
  return figures.map(([name, value, more]) => {
    const box = document.createElement("div");
    box.appendChild(document.createElement("dt")).textContent = name;
    const shown = box.appendChild(document.createElement("dd"));
    shown.appendChild(document.createElement("b")).textContent = value;
    shown.appendChild(document.createElement("small")).textContent = more;
    return box;
  });
}

/** Those in use first, then those asked soonest. */
const byUse = (a, b) => b.in_flight + b.waiting - a.in_flight - a.waiting || (a.next_use_s ?? Infinity) - (b.next_use_s ?? Infinity) || a.name.localeCompare(b.name);

function rowOf(model) {
  const row = document.createElement("tr");
  const head = row.appendChild(document.createElement("th"));
  [head.textContent, head.title, head.scope] = [model.name, `${model.name}: ${model.source}`, "row"];
  const state = row.insertCell();
  [state.textContent, state.title, state.className] = [model.state.replaceAll("_", " "), model.error, `state ${model.state}`];
  const cells = [
    model.workers.join(", ") || DASH,
    String(model.in_flight),
    String(model.waiting),
    model.expected_wait_s ? millis(1000 * model.expected_wait_s) : "nothing",
    `${millis(1000 * model.load_s)}${model.load_measured ? "" : " reckoned"}`,
    model.last_use ? `${span(Date.now() - Date.parse(model.last_use))} ago` : DASH,
    model.next_use_s == null ? DASH : `in ${span(1000 * model.next_use_s)}`,
    model.ttft_ms == null ? DASH : `≤ ${millis(model.ttft_ms)}`,
    model.tpot_ms == null ? DASH : `≤ ${millis(model.tpot_ms)}`,
    keptBy(model) || DASH,
  ];
  for (const text of cells) row.insertCell().textContent = text;
  return row;
}

const keptBy = ({ pinned, floor, priority, reservations }) =>
  [
    pinned && "pin",
    floor && `floor ${floor}`,
    ...reservations.map(({ gpus, from_time: from, to_time: to }) => `${gpus} GPU${gpus === 1 ? "" : "s"} ${from === to ? "all day" : `${from} to ${to} UTC`}`),
    priority && `priority ${priority}`,
  ]
    .filter(Boolean)
    .join(", ");
