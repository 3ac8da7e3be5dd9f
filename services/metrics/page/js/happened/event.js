// Events as signs and words: what a mark on the time axis and a line of the list have in common.

import { markOf, titleOf } from "../alerts.js";
import { PHASE_NAMES } from "../phases.js";

const ACTIONS = { role_moved: "moved to", set_role: "is to be", set_budget: "takes prompts as", recommend: "would become", effect: "as" };
const WORDS = {
  set_mode: "the planner's mode was changed",
  set_limits: "the planner's limits were changed",
};
const OF_WORKERS = { worker_started: "started", worker_restarted: "restarted", worker_left: "left in good order", worker_lost: "fell silent", worker_back: "is heard again" };
const SIGNS = { set_mode: "M", set_limits: "L", set_role: "▽", set_budget: "▽", recommend: "▽", effect: "≈", worker_started: "+", worker_restarted: "↻", worker_left: "–", worker_lost: "✕", worker_back: "✓" };

/** What the signs on the time axis mean, for the legend. */
export const LEGEND = [
  ["▼", "a worker changed role, in the colour of the new one"],
  ["▽", "the planner decided"],
  ["≈", "what was seen after it"],
  ["▲", "an alert fires"],
  ["△", "it is over"],
  ["↻", "a worker restarted"],
  ["✕", "a worker fell silent"],
  ["M L", "the planner's mode or limits were set"],
  ["◆", "several of these"],
];

/** Class and sign of a mark. */
export function signOf(event) {
  if (event.alert) return markOf(event);
  const bad = event.action === "worker_lost" || event.action === "worker_restarted";
  return [bad ? "critical" : event.role, SIGNS[event.action] ?? "▼"];
}

/** A few words. */
export function describe(event) {
  if (event.alert) return titleOf(event);
  if (WORDS[event.action]) return WORDS[event.action];
  if (OF_WORKERS[event.action]) return `${event.worker} ${OF_WORKERS[event.action]}`;
  return `${event.worker} ${ACTIONS[event.action] ?? event.action} ${PHASE_NAMES[event.role] ?? event.role}`;
}

/** Which choice of the list it belongs to. */
export function groupOf(event) {
  if (event.alert) return "alerts";
  if (OF_WORKERS[event.action]) return "workers";
  return event.action === "role_moved" ? "moves" : "decisions";
}
