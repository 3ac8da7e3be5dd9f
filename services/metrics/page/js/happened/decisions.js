// What the planner decided, the newest first; a click tells what was weighed, predicted, and seen afterwards.

import { ask } from "../ask.js";
import { clockText } from "../chart.js";
import { pressureText } from "../status/words.js";

const POLL_MS = 3000;
const GATHER_MS = 50; // decisions that come together are asked for once
const MAX_ROWS = 100;
const SEEN = "role_moved"; // tells that it was done, and stands in the list of what happened
const MAX_NAMED = 4;

export class Decisions {
  #decisions = [];
  #shown = "";
  #news = false; // of a decision that was not asked for yet
  #wake = () => {};

  constructor(body, note, dialog) {
    Object.assign(this, { body, note, dialog });
    body.addEventListener("click", (event) => {
      const id = event.target.closest("button")?.dataset.id;
      const decision = this.#decisions.find((each) => each.id === id);
      if (decision) this.#open(decision);
    });
  }

  /** The stream has brought word of one: ask now. */
  ask() {
    this.#news = true;
    this.#wake();
  }

  /** Poll for as long as the page lives. */
  async follow() {
    for (;;) {
      this.#news = false;
      if (!document.hidden) {
        try {
          const answer = await ask(`v1/decisions?limit=${MAX_ROWS}`);
          if (!answer.ok) throw new Error(answer.statusText);
          this.#fill((await answer.json()).filter(({ action }) => action !== SEEN));
        } catch {
          this.note.textContent = "not known now";
        }
      }
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, this.#news ? GATHER_MS : POLL_MS);
        this.#wake = () => {
          clearTimeout(timer);
          setTimeout(resolve, GATHER_MS);
        };
      });
    }
  }

  #fill(decisions) {
    this.#decisions = decisions;
    this.note.textContent = decisions.length ? "" : "none has changed a worker since this service started";
    const shown = decisions.map((each) => `${each.id} ${each.measured !== null}`).join();
    if (shown === this.#shown) return;
    this.#shown = shown;
    const focused = document.activeElement?.dataset?.id;
    this.body.replaceChildren(...decisions.map(rowOf));
    if (focused) this.body.querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
  }

  #open(decision) {
    this.dialog.querySelector("h2").textContent = `${decision.action.replace("_", " ")} ${workersOf(decision)}`;
    const list = this.dialog.querySelector("dl");
    list.replaceChildren();
    const add = (name, value) => {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).append(value);
    };
    add("when", clockText(decision.unix_ms / 1000, 1));
    add("why", decision.reason);
    add("mode", decision.mode);
    for (const each of decision.changes) add(each.worker, `${each.role}${each.budget_tokens ? `, ${each.budget_tokens} prompt tokens a step` : ""}`);
    if (decision.candidates.length) add("weighed", tableOf(["prefill", "decode", "prefill pressure", "decode pressure", "TTFT", "TPOT", "in time"], decision.candidates.map(candidateCells)));
    if (decision.measured) {
      const { before, after, after_ms: ms } = decision.measured;
      add("seen", tableOf(["", "prefill", "decode", "prefill pressure", "decode pressure"], [seenCells("before", before), seenCells(`${(ms / 1000).toFixed(1)} s after`, after)]));
      add("", "Other things happened too, so this is no proof.");
    }
    this.dialog.showModal();
  }
}

function rowOf(decision) {
  const row = document.createElement("tr");
  const at = row.insertCell().appendChild(document.createElement("button"));
  [at.textContent, at.dataset.id, at.title] = [clockText(decision.unix_ms / 1000), decision.id, "alternatives and outcome"];
  row.insertCell().textContent = decision.action.replace("_", " ");
  row.insertCell().textContent = workersOf(decision);
  row.insertCell().textContent = decision.reason;
  row.insertCell().textContent = cameOf(decision);
  return row;
}

/** Pressure before, as predicted, and as seen afterwards, of the phase that pressed more before. */
function cameOf({ measured, changes, candidates: [predicted] }) {
  if (!measured || !predicted || !changes.length) return "";
  const field = measured.before.prompt_pressure >= measured.before.decode_pressure ? "prompt_pressure" : "decode_pressure";
  return `${pressureText(measured.before[field])} → ${pressureText(predicted[field])}, seen ${pressureText(measured.after[field])}`;
}

function workersOf({ changes }) {
  const names = changes.map(({ worker }) => worker);
  return names.length > MAX_NAMED ? `${names.slice(0, MAX_NAMED).join(", ")} and ${names.length - MAX_NAMED} more` : names.join(", ");
}

const candidateCells = (each) => [each.prefill, each.decode, pressureText(each.prompt_pressure), pressureText(each.decode_pressure), `${(each.ttft_ms / 1000).toFixed(2)} s`, `${each.tpot_ms.toFixed(0)} ms`, `${(100 * each.served).toFixed(0)} %`];
const seenCells = (name, each) => [name, each.prefill, each.decode, pressureText(each.prompt_pressure), pressureText(each.decode_pressure)];

function tableOf(heads, rows) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const text of heads) head.appendChild(document.createElement("th")).textContent = text;
  const body = table.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    for (const text of cells) row.insertCell().textContent = text;
  }
  return table;
}
