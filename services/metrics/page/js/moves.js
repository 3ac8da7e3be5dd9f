// Role moves, changes of mode and alerts on the time axis: a button for each; its reason opens on click.

import { factsOf, markOf, titleOf } from "./alerts.js";
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
    const [kind, text] = event.alert ? markOf(event) : [event.role, event.action === "set_mode" ? "M" : "▼"];
    button.className = `move ${kind}`;
    button.textContent = text;
    button.title = `${clockText(event.unix_ms / 1000)} ${describe(event)}`;
    button.setAttribute("aria-label", button.title);
    button.addEventListener("click", () => this.#open(event));
    return button;
  }

  #open(event) {
    this.dialog.querySelector("h2").textContent = describe(event);
    const list = this.dialog.querySelector("dl");
    list.replaceChildren();
    for (const [name, value] of Object.entries(event.alert ? factsOf(event) : factsOfMove(event))) {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).append(value || "not told");
    }
    this.dialog.showModal();
  }
}

const factsOfMove = (event) => ({ when: clockText(event.unix_ms / 1000, true), who: event.actor || event.planner, why: event.reason });

function describe(event) {
  if (event.alert) return titleOf(event);
  if (event.action === "set_mode") return "the planner's mode was changed";
  return `${event.worker} ${ACTIONS[event.action] ?? event.action} to ${PHASE_NAMES[event.role] ?? event.role}`;
}
