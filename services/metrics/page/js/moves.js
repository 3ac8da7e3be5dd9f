// Role moves and changes of mode on the time axis: a button for each; its reason opens on click.

import { clockText, GUTTER_PX } from "./chart.js";
import { PHASE_NAMES } from "./phases.js";

const ACTIONS = { role_moved: "moved", set_role: "decided", set_mode: "mode" };

export class Moves {
  #buttons = new Map();

  constructor(lane, dialog) {
    this.lane = lane;
    this.dialog = dialog;
  }

  /** Place the events that lie in [fromMs, toMs]. */
  draw(events, fromMs, toMs) {
    const shown = events.filter((event) => event.unix_ms >= fromMs && event.unix_ms <= toMs);
    const width = this.lane.clientWidth - GUTTER_PX;
    for (const [event, button] of this.#buttons) {
      if (shown.includes(event)) continue;
      button.remove();
      this.#buttons.delete(event);
    }
    for (const event of shown) {
      let button = this.#buttons.get(event);
      if (!button) this.#buttons.set(event, (button = this.#make(event)));
      button.style.left = `${GUTTER_PX + ((event.unix_ms - fromMs) / (toMs - fromMs)) * width}px`;
    }
    return shown.map((event) => event.unix_ms / 1000);
  }

  #make(event) {
    const button = this.lane.appendChild(document.createElement("button"));
    button.className = `move ${event.role}`;
    button.textContent = event.action === "set_mode" ? "M" : "▼";
    button.title = `${clockText(event.unix_ms / 1000)} ${describe(event)}`;
    button.setAttribute("aria-label", button.title);
    button.addEventListener("click", () => this.#open(event));
    return button;
  }

  #open(event) {
    this.dialog.querySelector("h2").textContent = describe(event);
    const list = this.dialog.querySelector("dl");
    list.replaceChildren();
    const facts = { when: clockText(event.unix_ms / 1000, true), who: event.actor || event.planner, why: event.reason };
    for (const [name, value] of Object.entries(facts)) {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).textContent = value || "not told";
    }
    this.dialog.showModal();
  }
}

function describe(event) {
  if (event.action === "set_mode") return "the planner's mode was changed";
  return `${event.worker} ${ACTIONS[event.action] ?? event.action} to ${PHASE_NAMES[event.role] ?? event.role}`;
}
