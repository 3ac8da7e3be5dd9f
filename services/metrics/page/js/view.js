// What is looked at, kept in the address so that a link shows the same.

import { RANGES } from "./phases.js";

export const TABS = ["live", "forecast", "models"];
const DEFAULTS = { range: "30s", scope: "cluster", sort: "node", theme: "", end: "", filter: "", order: "name", tab: "live" };
const ALLOWED = {
  range: (value) => Object.hasOwn(RANGES, value),
  sort: (value) => ["node", "pool", "model", "busy"].includes(value),
  theme: (value) => ["", "light", "dark"].includes(value),
  end: (value) => /^\d{13}$/.test(value) || value === "",
  scope: (value) => value === "cluster" || /^(pool|model|node|group|worker):./.test(value),
  filter: () => true,
  tab: (value) => TABS.includes(value),
  order: (value) => /^-?[a-z_]+$/.test(value),
};

export class View extends EventTarget {
  constructor() {
    super();
    this.#read();
    addEventListener("popstate", () => {
      this.#read();
      this.dispatchEvent(new Event("change"));
    });
  }

  #read() {
    const query = new URLSearchParams(location.hash.slice(1));
    for (const [name, value] of Object.entries(DEFAULTS)) {
      const given = query.get(name);
      this[name] = given !== null && ALLOWED[name](given) ? given : value;
    }
  }

  get rangeOf() {
    return RANGES[this.range];
  }

  get endMs() {
    return this.end ? Number(this.end) : null;
  }

  /** Change some of it; a change of scope can be gone back from, and others where it is said. */
  set(changes, { back = "scope" in changes || "tab" in changes } = {}) {
    Object.assign(this, changes);
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(DEFAULTS)) if (this[name] !== value) query.set(name, this[name]);
    const url = query.size ? `#${query}` : location.pathname;
    if (back) history.pushState(null, "", url);
    else history.replaceState(null, "", url);
    this.dispatchEvent(new Event("change"));
  }
}
