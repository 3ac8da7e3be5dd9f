// The views of the page: the cluster live, demand to come, and the models of a pool. One is shown, and it alone asks.

import { TABS } from "../view.js";

const $ = (id) => document.getElementById(id);
const TITLES = { live: "Live", forecast: "Forecast", models: "Models" };

/** `shown` has by name what is to know that its view is shown (`show`) and is no more (`hide`). */
export function makeTabs(view, shown) {
  const buttons = new Map();
  for (const name of TABS) {
    const button = $("tabs").appendChild(document.createElement("button"));
    button.textContent = TITLES[name];
    button.addEventListener("click", () => view.set({ tab: name }));
    buttons.set(name, button);
  }
  let now = "";
  return function draw() {
    if (view.tab === now) return;
    shown[now]?.hide();
    now = view.tab;
    document.body.dataset.tab = now;
    for (const [name, button] of buttons) {
      $(name).hidden = name !== now;
      if (name === now) button.setAttribute("aria-current", "page");
      else button.removeAttribute("aria-current");
    }
    shown[now]?.show();
  };
}

/** Calls `look` now and again while it is shown, `everyMs` after the last has ended. */
export class Poll {
  #timer = 0;
  #turn = 0;

  constructor(look, everyMs) {
    Object.assign(this, { look, everyMs });
  }

  start() {
    this.stop();
    this.#go(this.#turn);
  }

  stop() {
    this.#turn++;
    clearTimeout(this.#timer);
  }

  async #go(turn) {
    if (!document.hidden) await this.look();
    if (turn === this.#turn) this.#timer = setTimeout(() => this.#go(turn), this.everyMs);
  }
}

/** JSON of an answer; an Error in the service's words where it refuses, or does not answer. */
export async function jsonOf(asking) {
  let answer, body;
  try {
    answer = await asking;
    body = await answer.json();
  } catch {
    throw new Error("the metrics service does not answer");
  }
  if (!answer.ok) throw new Error(body.error?.message ?? answer.statusText);
  return body;
}
