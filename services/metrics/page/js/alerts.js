// Alerts: those that fire, and their changes as marks on the time axis. A click tells reason and runbook.

import { ask } from "./ask.js";
import { clockText } from "./chart.js";

const MAX_CHANGES = 500;
const MAX_ALIKE = 3; // listed one by one
const MAX_NAMED = 8; // of more

export class Alerts {
  firing = new Map(); // id -> alert
  changes = []; // {unix_ms, alert}, as they came

  /** Load what fires and what has changed; false when the service does not tell. */
  async load() {
    try {
      const { firing, recent } = await (await ask(`/v1/alerts?limit=${MAX_CHANGES}`)).json();
      this.take(recent.reverse());
      this.firing = new Map(firing.map((alert) => [alert.id, alert]));
      return true;
    } catch {
      return false;
    }
  }

  /** Enter changes, the oldest first. */
  take(changed) {
    for (const alert of changed) {
      if (alert.state === "firing") this.firing.set(alert.id, alert);
      else this.firing.delete(alert.id);
      const unix_ms = alert.ended_unix_ms ?? alert.started_unix_ms;
      if (this.changes.some((known) => known.alert.number === alert.number && known.unix_ms === unix_ms)) continue;
      this.changes.push({ unix_ms, alert });
      if (this.changes.length > MAX_CHANGES) this.changes.shift();
    }
  }
}

/** How a change looks on the time axis: class and text. */
export const markOf = ({ alert }) =>
  alert.state === "firing" ? [`alert ${alert.severity}`, "▲"] : ["alert over", "△"];

/** One line that names an alert, what it is about, and whether it is over. */
export function titleOf({ alert }) {
  return `${nameOf(alert)} ${alert.state === "firing" ? "fires" : "is over"}`;
}

/** What a click on a change tells, by name. */
export function factsOf({ unix_ms, alert }) {
  const facts = { when: clockText(unix_ms / 1000, 1), about: aboutOf(alert), why: alert.reason };
  if (alert.state !== "firing") facts["over because"] = alert.ended_because;
  return { ...facts, runbook: linkOf(alert) };
}

/** The badge in the header and the list below it. */
export class AlertList {
  #shown = "";

  constructor(badge, list) {
    this.badge = badge;
    this.list = list;
    badge.addEventListener("click", () => list.scrollIntoView({ block: "nearest" }));
  }

  draw(alerts) {
    const firing = [...alerts.firing.values()].sort(worstFirst);
    const shown = firing.map((alert) => alert.number).join();
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.badge.hidden = this.list.hidden = firing.length === 0;
    this.badge.textContent = firing.length === 1 ? "1 alert" : `${firing.length} alerts`;
    this.badge.classList.toggle("critical", firing.some((alert) => alert.severity === "critical"));
    const byKind = Map.groupBy(firing, (alert) => `${alert.severity} ${alert.name}`);
    const entries = [...byKind.values()].flatMap((alike) => (alike.length > MAX_ALIKE ? [entryOf(alike[0], alike)] : alike.map((alert) => entryOf(alert))));
    this.list.replaceChildren(...entries);
  }
}

const worstFirst = (a, b) => (b.severity === "critical") - (a.severity === "critical") || b.started_unix_ms - a.started_unix_ms;

/** A line for one alert, or for `alike` of its name and severity. */
function entryOf(alert, alike = [alert]) {
  const entry = document.createElement("li");
  entry.className = alert.severity;
  const name = entry.appendChild(document.createElement("b"));
  name.textContent = alike.length > 1 ? `${wordsOf(alert)} × ${alike.length}` : nameOf(alert);
  const reason = entry.appendChild(document.createElement("span"));
  reason.textContent = alike.length > 1 ? `${namesOf(alike)}; the last: ${alert.reason}` : alert.reason;
  const more = entry.appendChild(document.createElement("small"));
  more.append(`since ${clockText(Math.min(...alike.map((each) => each.started_unix_ms)) / 1000)} · `, linkOf(alert));
  return entry;
}

function namesOf(alike) {
  const names = alike.slice(0, MAX_NAMED).map(subjectOf).join(", ");
  return alike.length > MAX_NAMED ? `${names} and ${alike.length - MAX_NAMED} more` : names;
}

const aboutOf = (alert) => Object.entries(alert.labels).map(([name, value]) => `${name} ${value}`).join(", ");

function wordsOf({ name }) {
  const words = name.replace(/^Fulcrum/, "").replace(/(?!^)([A-Z])/g, " $1").toLowerCase();
  return words.replace("kv", "KV").replace("slo", "SLO");
}

const subjectOf = ({ labels: { worker, phase, slo, model } }) => worker ?? phase ?? slo ?? model;

const nameOf = (alert) => [wordsOf(alert), subjectOf(alert)].filter(Boolean).join(" · ");

function linkOf(alert) {
  const link = document.createElement("a");
  link.href = `/runbook/${encodeURIComponent(alert.name)}`;
  link.textContent = "runbook";
  return link;
}
