// Role moves, changes of mode and alerts on the time axis: a button for each, or for those that stand too close; its
// reasons open on click.

import { factsOf } from "./alerts.js";
import { clockText, GUTTER_PX } from "./chart.js";
import { describe, signOf } from "./happened/event.js";

const APART_PX = 28; // as wide as a sign with a count of two digits
const MAX_TOLD = 30; // of a mark's events

export class Moves {
  #marks = new Map();

  constructor(lane, dialog) {
    this.lane = lane;
    this.dialog = dialog;
  }

  /** Place the events that lie in [fromMs, toMs]; where marks are, in Unix s. */
  draw(events, fromMs, toMs) {
    const width = Math.max(this.lane.clientWidth - GUTTER_PX, 1);
    const bucketMs = (APART_PX / width) * (toMs - fromMs); // of fixed bounds, so that marks stay what they are as time moves
    const shown = apart(Map.groupBy(
      events.filter((event) => event.unix_ms >= fromMs && event.unix_ms <= toMs),
      (event) => Math.floor(event.unix_ms / bucketMs),
    ), bucketMs);
    for (const [bucket, mark] of this.#marks) {
      if (shown.get(bucket)?.length === mark.count && mark.bucketMs === bucketMs) continue;
      mark.button.remove();
      this.#marks.delete(bucket);
    }
    const times = [];
    for (const [bucket, together] of shown) {
      const atMs = firstMs(together);
      let mark = this.#marks.get(bucket);
      if (!mark) this.#marks.set(bucket, (mark = { button: this.#make(together), count: together.length, bucketMs }));
      mark.button.style.left = `${GUTTER_PX + ((atMs - fromMs) / (toMs - fromMs)) * width}px`;
      times.push(atMs / 1000);
    }
    return times;
  }

  #make(events) {
    const button = this.lane.appendChild(document.createElement("button"));
    const [kind, text] = looks(events);
    button.className = `move ${kind}`;
    button.textContent = text;
    button.title = `${clockText(events[0].unix_ms / 1000)} ${headOf(events)}`;
    button.setAttribute("aria-label", button.title);
    button.addEventListener("click", () => this.#open(events));
    return button;
  }

  #open(events) {
    this.dialog.querySelector("h2").textContent = headOf(events);
    const list = this.dialog.querySelector("dl");
    list.replaceChildren();
    const add = (name, value) => {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).append(value || "unknown");
    };
    if (events.length === 1) for (const [name, value] of Object.entries(facts(events[0]))) add(name, value);
    for (const event of events.length === 1 ? [] : events.slice(0, MAX_TOLD)) {
      add(clockText(event.unix_ms / 1000, 1), `${describe(event)}: ${facts(event).why || "no reason given"}`);
    }
    if (events.length > MAX_TOLD) add("", `${events.length - MAX_TOLD} more; a shorter time range shows them apart`);
    this.dialog.showModal();
  }
}

/** The buckets with those joined whose first events stand too close, as at the end of one and the begin of the next. */
function apart(buckets, leastMs) {
  const joined = new Map();
  let key = null;
  for (const [bucket, events] of [...buckets].sort(([a], [b]) => a - b)) {
    if (key !== null && firstMs(events) - firstMs(joined.get(key)) < leastMs) joined.set(key, [...joined.get(key), ...events]);
    else joined.set((key = bucket), events);
  }
  return joined;
}

/** Class and text of a mark. */
function looks(events) {
  const each = events.map(signOf);
  const [kind] = each.find(([name]) => name.includes("critical")) ?? each.find(([name]) => name.includes("warning")) ?? each[0];
  const texts = new Set(each.map(([, text]) => text));
  const text = texts.size === 1 ? each[0][1] : "◆";
  return [kind, events.length === 1 ? text : `${text}${events.length}`];
}

const firstMs = (events) => Math.min(...events.map((event) => event.unix_ms));
const headOf = (events) => (events.length === 1 ? describe(events[0]) : `${events.length} changes: ${describe(events[0])}, …`);
const facts = (event) => (event.alert ? factsOf(event) : factsOfMove(event));
const factsOfMove = (event) => ({ when: clockText(event.unix_ms / 1000, 1), who: event.actor || event.planner, why: event.reason });
