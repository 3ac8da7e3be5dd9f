// Alerts: those that fire, and their changes as marks on the time axis. A click tells reason and runbook.

import { askWith, change } from "./admin.js";
import { ask } from "./ask.js";
import { clockText } from "./chart.js";
import { span } from "./status/words.js";

const MAX_CHANGES = 500;
const MAX_ALIKE = 3; // listed one by one
const MAX_NAMED = 8; // of more

export class Alerts {
  firing = new Map(); // id -> alert
  changes = []; // {unix_ms, alert}, as they came
  silences = []; // that hold, acknowledgements among them

  /** Load what fires and what has changed; false when the service does not tell. */
  async load() {
    try {
      const { firing, recent, silences = [] } = await (await ask(`v1/alerts?limit=${MAX_CHANGES}`)).json();
      this.take(recent.reverse());
      this.firing = new Map(firing.map((alert) => [alert.id, alert]));
      this.silences = silences;
      return true;
    } catch {
      return false;
    }
  }

  /** Load what is silent, and how what fires is by now: the stream does not say it. */
  async loadSilences() {
    try {
      const { firing, silences = [] } = await (await ask("v1/alerts?limit=0")).json();
      this.silences = silences;
      for (const alert of firing) if (this.firing.has(alert.id)) this.firing.set(alert.id, alert);
    } catch {
      // What was known stands.
    }
  }

  /** That which keeps an alert silent, and that by which somebody looks after it. */
  quietOf({ id }) {
    const of = this.silences.filter((each) => each.alerts.includes(id));
    return { silent: of.find((each) => !each.alert_id), seen: of.find((each) => each.alert_id) };
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

  /** `onOpen`: somebody wants to see the list. */
  constructor(badge, list, dialog, onOpen) {
    Object.assign(this, { badge, list, dialog });
    badge.addEventListener("click", onOpen);
  }

  draw(alerts) {
    const firing = [...alerts.firing.values()].sort(worstFirst);
    const shown = JSON.stringify([firing.map(({ number, now, clearing }) => [number, now, clearing]), alerts.silences]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const quiet = new Map(firing.map((alert) => [alert, alerts.quietOf(alert)]));
    const calls = firing.filter((alert) => !quiet.get(alert).silent && !quiet.get(alert).seen);
    this.list.hidden = firing.length === 0;
    this.badge.hidden = calls.length === 0;
    this.badge.textContent = calls.length === 1 ? "1 alert" : `${calls.length} alerts`;
    this.badge.classList.toggle("critical", calls.some((alert) => alert.severity === "critical"));
    const rank = (alert) => (quiet.get(alert).silent ? 2 : 0) + (quiet.get(alert).seen ? 1 : 0);
    const byKind = Map.groupBy(firing.toSorted((a, b) => rank(a) - rank(b)), (alert) => `${rank(alert)} ${alert.severity} ${alert.name}`);
    const entries = [...byKind.values()].flatMap((alike) => (alike.length > MAX_ALIKE ? [this.#entryOf(alerts, alike[0], alike)] : alike.map((alert) => this.#entryOf(alerts, alert))));
    this.list.replaceChildren(...entries);
  }

  #entryOf(alerts, alert, alike = [alert]) {
    const entry = entryOf(alert, alike);
    const { silent, seen } = alerts.quietOf(alert);
    entry.classList.toggle("silent", Boolean(silent));
    const button = entry.querySelector("small").appendChild(document.createElement("button"));
    [button.textContent, button.title] = ["…", "silence or acknowledge"];
    button.setAttribute("aria-label", `silence or acknowledge ${nameOf(alert)}`);
    button.addEventListener("click", () => this.#open(alerts, alert, alike));
    for (const each of [silent, seen].filter(Boolean)) {
      const line = entry.appendChild(document.createElement("span"));
      line.className = "quiet";
      line.textContent = quietText(each);
    }
    return entry;
  }

  #open(alerts, alert, alike) {
    const { silent, seen } = alerts.quietOf(alert);
    const [$, several] = [(id) => document.getElementById(id), alike.length > 1];
    this.dialog.querySelector("h2").textContent = several ? `${wordsOf(alert)} × ${alike.length}` : nameOf(alert);
    $("quiet-what").textContent = [silent, seen].filter(Boolean).map(quietText).join("; ") || "A silenced alert still fires, but notifies nobody. An acknowledged one is left out of the count until it is over.";
    $("quiet-end").hidden = !silent && !seen;
    $("quiet-ack").hidden = several || Boolean(seen);
    const field = $("quiet-token"), said = () => ({ actor: "the page", reason: $("quiet-reason").value });
    askWith(this.dialog, field, $("quiet-refused"), async (wanted) => {
      if (wanted === "end") await change("DELETE", `v1/alerts/silences/${(silent ?? seen).id}`, null, field);
      else if (wanted === "ack") await change("POST", "v1/alerts/acks", { alert_id: alert.id, ...said() }, field);
      else await change("POST", "v1/alerts/silences", { alert_name: alert.name, labels: several ? {} : alert.labels, for_s: Number($("quiet-for").value), ...said() }, field);
      await alerts.loadSilences();
      this.draw(alerts);
    });
  }
}

/** Until when, by whom, and why. */
function quietText(each) {
  const why = each.reason ? `: ${each.reason}` : "";
  if (each.alert_id) return `acknowledged by ${each.actor} for ${span(Date.now() - each.made_unix_ms)}${why}`;
  return `silent for ${span(each.until_unix_ms - Date.now())} more, by ${each.actor}${why}`;
}

const worstFirst = (a, b) => (b.severity === "critical") - (a.severity === "critical") || b.started_unix_ms - a.started_unix_ms;

/** A line for one alert, or for `alike` of its name and severity. */
function entryOf(alert, alike = [alert]) {
  const entry = document.createElement("li");
  entry.className = alert.severity;
  const name = entry.appendChild(document.createElement("b"));
  name.textContent = alike.length > 1 ? `${wordsOf(alert)} × ${alike.length}` : nameOf(alert);
  const reason = entry.appendChild(document.createElement("span"));
  reason.textContent = alike.length > 1 ? `${namesOf(alike)}; the last: ${reasonOf(alert)}` : reasonOf(alert);
  const more = entry.appendChild(document.createElement("small"));
  more.append(`since ${clockText(Math.min(...alike.map((each) => each.started_unix_ms)) / 1000)} · `, linkOf(alert));
  return entry;
}

/** How it is now; of what is gone and not yet over, that too. */
function reasonOf({ reason, now, clearing }) {
  return clearing ? `Clearing: ${now}. When it fired: ${reason}` : now || reason;
}

function namesOf(alike) {
  const names = alike.slice(0, MAX_NAMED).map(subjectOf).join(", ");
  return alike.length > MAX_NAMED ? `${names} and ${alike.length - MAX_NAMED} more` : names;
}

const aboutOf = (alert) => Object.entries(alert.labels).map(([name, value]) => `${name} ${value}`).join(", ");

function wordsOf({ name }) {
  const words = name.replace(/^Fulcrum/, "").replace(/(?!^)([A-Z])/g, " $1").toLowerCase();
  return words.replace(/\bkv\b/, "KV").replace(/\bslo\b/, "SLO");
}

/** A phase or service level is of one model, beside which there may be others. */
const subjectOf = ({ labels: { worker, phase, slo, model } }) => worker ?? [phase ?? slo, model].filter(Boolean).join(" of ");

const nameOf = (alert) => [wordsOf(alert), subjectOf(alert)].filter(Boolean).join(" · ");

function linkOf(alert) {
  const link = document.createElement("a");
  link.href = `runbook/${encodeURIComponent(alert.name)}`;
  link.textContent = "runbook";
  return link;
}
