// Servers that are not ours: how each is, and that all GPU time is an estimate.

import { span } from "./words.js";

const $ = (id) => document.getElementById(id);
const STATES = { unknown: "not asked yet", learning: "learning what its steps cost", observed: "observed", exact: "exact: it reports its steps", away: "away", foreign: "not vLLM" };

/** Mark the page as one of estimates, and fill the table of servers; nothing of it where a suite is shown. */
export function drawObserved(status) {
  const observed = status?.observed ?? null;
  if (status) document.body.toggleAttribute("data-observed", observed !== null);
  document.body.toggleAttribute("data-exact", observed !== null && observed.servers.length > 0 && observed.servers.every((each) => each.state === "exact"));
  $("servers").hidden = observed === null;
  if (observed === null) return;
  $("estimate-bounds").textContent = bounded(status.estimate, "prefill ", " of busy time");
  $("servers-note").textContent = observed.trouble ? observed.trouble : countOf(observed.servers);
  $("servers-note").classList.toggle("refused", observed.trouble !== "");
  const estimates = new Map(status.workers.map((each) => [each.id, each.estimate]));
  const rows = observed.servers.map((each) => cellsOf(each, estimates.get(each.name), status.as_of_unix_ms));
  const shown = JSON.stringify(rows);
  if ($("servers-table").dataset.shown === shown) return;
  $("servers-table").dataset.shown = shown;
  $("servers-table").tBodies[0].replaceChildren(...rows.map(rowOf));
}

function countOf(servers) {
  const counts = new Map();
  for (const { state } of servers) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${count} ${STATES[state] ?? state}`).join(", ");
}

function cellsOf(server, estimate, nowMs) {
  const state = `${STATES[server.state] ?? server.state}${server.state === "observed" || server.state === "exact" || !server.since_unix_ms ? "" : ` for ${span(nowMs - server.since_unix_ms)}`}`;
  const restarts = server.restarts ? `, started again ${server.restarts === 1 ? "once" : `${server.restarts} times`}` : "";
  return { name: server.name, role: server.role, model: server.model, prefill: server.state === "exact" ? "measured" : server.state === "away" ? "–" : bounded(estimate) || "–", state: state + restarts, trouble: server.trouble, url: server.url, bad: server.state === "away" || server.state === "foreign" };
}

function rowOf(cells) {
  const row = document.createElement("tr");
  row.classList.toggle("poor", cells.bad);
  row.appendChild(document.createElement("th")).textContent = cells.name;
  for (const text of [cells.role, cells.model, cells.prefill, cells.trouble && !cells.trouble.startsWith("away") ? `${cells.state}: ${cells.trouble}` : cells.trouble ? `${cells.state} ${cells.trouble.slice("away ".length)}` : cells.state, cells.url]) row.insertCell().textContent = text;
  return row;
}

/** "62 % (58 to 66)"; empty where nothing ran. */
function bounded(estimate, before = "", after = "") {
  if (estimate?.prefill == null) return "";
  const [share, low, high] = [estimate.prefill, estimate.low, estimate.high].map((each) => Math.round(100 * each));
  return `${before}${share} %${after} (${low} to ${high})`;
}
