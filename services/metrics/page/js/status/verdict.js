// The answer first: what is wrong, what to do about it, and what the planner makes of it.

import { clockText } from "../chart.js";
import { pressureText, span } from "./words.js";

const CALM = new Set(["balanced", "idle"]);
/** Pressure above 1 is not shown as calm, although a cause is named only once it lasts. */
const isPressed = ({ prefill, decode }) => prefill.pressure > 1 || decode.pressure > 1;
const COPIED_MS = 1500;

const $ = (id) => document.getElementById(id);

export class VerdictPanel {
  #shown = "";

  constructor() {
    $("verdict-copy").addEventListener("click", async () => {
      await navigator.clipboard?.writeText($("verdict-command").textContent).catch(() => {});
      $("verdict-copy").textContent = "copied";
      setTimeout(() => ($("verdict-copy").textContent = "copy"), COPIED_MS);
    });
  }

  /** What stands now. */
  draw(status, problem) {
    if (!status) return this.#put({ kind: "unknown", sentence: problem ? `Not known: ${problem}.` : "Looking.", facts: "" });
    const { verdict, as_of_unix_ms: nowMs } = status;
    const calm = CALM.has(verdict.code);
    const unsure = !status.live || problem || verdict.code === "unknown" || (calm && status.models.some(isPressed));
    const kind = unsure ? "unknown" : calm ? "calm" : "wrong";
    const late = problem || (!status.live && status.not_live_because);
    this.#put({
      kind,
      sentence: verdict.sentence,
      facts: late ? `Not live: ${late}. This is the last known state.` : `${verdict.code.replaceAll("_", " ")} for ${span(nowMs - verdict.since_unix_ms)}`,
      action: verdict.action,
      causes: verdict.causes.slice(1),
    });
    if (status.observed && !status.planner.heard) $("planner-line").hidden = true;
    else drawPlanner(status.planner, nowMs);
    drawKept(status.advice_kept);
  }

  /** What stood at a moment of the past; `verdict` null: nothing is kept of it. */
  drawPast(verdict, endMs) {
    const kind = !verdict ? "unknown" : CALM.has(verdict.code) ? "calm" : verdict.code === "unknown" ? "unknown" : "wrong";
    this.#put({
      kind,
      sentence: verdict?.sentence ?? "No verdict is stored for that time.",
      facts: verdict ? `${verdict.code.replaceAll("_", " ")}, said at ${clockText(verdict.unix_ms / 1000)}; the view ends at ${clockText(endMs / 1000)}` : "",
      action: verdict?.command ? { command: verdict.command } : null,
      past: true,
    });
    $("planner-line").hidden = true;
    $("advice-kept").hidden = true;
  }

  #put({ kind, sentence, facts, action = null, causes = [], past = false }) {
    const panel = $("verdict");
    panel.className = `panel ${kind}`;
    setText($("verdict-sentence"), sentence);
    setText($("verdict-facts"), facts);
    $("verdict-action").hidden = !action;
    setText($("verdict-command"), action?.command || action?.instruction || "");
    $("verdict-copy").hidden = !action?.command;
    setText($("verdict-then"), past ? "advised then" : promised(action));
    const shown = JSON.stringify(causes.map((cause) => [cause.sentence, cause.action?.command, cause.action?.instruction]));
    if (shown === this.#shown) return;
    this.#shown = shown;
    $("verdict-causes").replaceChildren(...causes.map(entryOf));
    $("verdict-causes").hidden = causes.length === 0;
  }
}

function promised(action) {
  if (action?.pressure_then == null) return "";
  const ends = [action.pressure_least, action.pressure_most].map((each) => pressureText(each ?? action.pressure_then));
  return `predicted to leave a pressure of ${ends[0] === ends[1] ? ends[0] : ends.join(" to ")}`;
}

const FIGURES = { pressure: "pressure", backlog: "backlog", ttft: "TTFT", tpot: "TPOT" };

/** How many promises of followed commands were kept; nothing before the first was followed. */
function drawKept(kept) {
  const shown = (kept ?? []).map((each) => `${FIGURES[each.figure] ?? each.figure} ${each.kept} of ${each.of}`);
  $("advice-kept").hidden = shown.length === 0;
  setText($("advice-kept"), `advice kept: ${shown.join(", ")}`);
}

function entryOf(cause) {
  const entry = document.createElement("li");
  entry.textContent = `Also: ${cause.sentence} `;
  if (cause.action) entry.appendChild(document.createElement("code")).textContent = cause.action.command || cause.action.instruction;
  return entry;
}

function drawPlanner(planner, nowMs) {
  $("planner-line").hidden = false;
  $("planner-line").classList.toggle("poor", !planner.heard);
  const parts = [];
  if (!planner.heard) parts.push("The planner does not report, so roles stay as they are");
  else parts.push(`Planner ${planner.mode ?? "in an unknown mode"}${planner.acts ? ", moves workers by itself" : ", moves nothing by itself"}${planner.idle_because ? `, as ${planner.idle_because}` : ""}`);
  // What it would do is weighed over another time than the verdict: two commands with two figures answer nothing.
  if (planner.reason && planner.acts) parts.push(`decided${planner.decided_unix_ms == null ? "" : ` ${span(nowMs - planner.decided_unix_ms)} ago`}: ${planner.reason}`);
  const move = planner.last_move;
  if (move) parts.push(`last move: ${move.worker} ${move.from_role} → ${move.to_role} ${span(nowMs - move.at_unix_ms)} ago, by ${move.actor || "somebody"}`);
  setText($("planner-line"), parts.join(" · "));
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
