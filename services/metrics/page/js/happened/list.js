// What happened, the newest first: moves, decisions, workers that came or died, alerts. A click shows the time around it.

import { factsOf as factsOfAlert, titleOf } from "../alerts.js";
import { clockText } from "../chart.js";
import { describe, groupOf, signOf } from "./event.js";

const MAX_ROWS = 100;

export class HappenedList {
  #rows = new Map(); // key -> row
  #shown = "";

  constructor(list, select, onTime) {
    [this.list, this.select] = [list, select];
    list.addEventListener("click", (event) => {
      const row = event.target.closest("button[data-unix-ms]");
      if (row) onTime(Number(row.dataset.unixMs));
    });
  }

  /** Events up to a moment, or all where `endMs` is null. */
  draw(events, endMs) {
    const wanted = this.select.value;
    const all = events.filter((event) => (endMs === null || event.unix_ms <= endMs) && (wanted === "all" || groupOf(event) === wanted));
    const newest = all.sort((a, b) => b.unix_ms - a.unix_ms).slice(0, MAX_ROWS);
    const keys = newest.map(keyOf);
    if (keys.join() === this.#shown) return;
    this.#shown = keys.join();
    for (const [key, row] of this.#rows) {
      if (keys.includes(key)) continue;
      row.remove();
      this.#rows.delete(key);
    }
    for (const [index, event] of newest.entries()) {
      const key = keys[index];
      let row = this.#rows.get(key);
      if (!row) this.#rows.set(key, (row = makeRow(event)));
      if (this.list.children[index] !== row) this.list.insertBefore(row, this.list.children[index] ?? null);
    }
  }
}

const keyOf = (event) => (event.alert ? `a${event.alert.number}` : `e${event.number}-${event.unix_ms}`);

function makeRow(event) {
  const row = document.createElement("li");
  const button = row.appendChild(document.createElement("button"));
  button.dataset.unixMs = event.unix_ms;
  button.title = "show the time around it";
  button.textContent = clockText(event.unix_ms / 1000);
  const [kind, sign] = signOf(event);
  const mark = row.appendChild(document.createElement("span"));
  [mark.className, mark.textContent] = [`move ${kind}`, sign];
  const text = row.appendChild(document.createElement("span"));
  text.appendChild(document.createElement("b")).textContent = event.alert ? titleOf(event) : describe(event);
  const why = event.alert ? (factsOfAlert(event)["over because"] ?? event.alert.reason) : event.reason;
  text.append(why ? `: ${why}` : "");
  const actor = event.actor || event.planner;
  if (actor && !event.alert) text.appendChild(document.createElement("small")).textContent = ` ${actor}`;
  return row;
}
