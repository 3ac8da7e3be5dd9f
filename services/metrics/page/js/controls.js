// Buttons, fields and the trail from the cluster down to what is looked at.

import { isDark } from "./colors.js";
import { LEGEND } from "./happened/event.js";
import { KEYS } from "./keys.js";
import { KEPT_MS, RANGES } from "./phases.js";
import { WORDS } from "./status/glossary.js";
import { splitScope } from "./store.js";

const $ = (id) => document.getElementById(id);
const SORTS = ["node", "pool", "model", "busy"];

/** Wire the page's controls; what they do as functions by key. */
export function makeControls(view, { pause, replay, goTo, save, above }) {
  for (const name of Object.keys(RANGES)) {
    const button = $("ranges").appendChild(document.createElement("button"));
    button.textContent = name;
    button.addEventListener("click", () => view.set({ range: name }));
    $("range-choice").add(new Option(name)); // where there is no room for buttons
  }
  $("range-choice").addEventListener("change", (event) => view.set({ range: event.target.value }));
  const toggleTheme = () => view.set({ theme: isDark(view) ? "light" : "dark" });
  const help = () => $("help").showModal();
  $("pause").addEventListener("click", pause);
  $("earlier").addEventListener("click", () => replay.step(-1));
  $("later").addEventListener("click", () => replay.step(1));
  $("replay").addEventListener("click", () => replay.toggle());
  makeTimeField($("when"), goTo);
  $("theme").addEventListener("click", toggleTheme);
  $("help-open").addEventListener("click", help);
  $("csv").addEventListener("click", () => save("csv"));
  $("json").addEventListener("click", () => save("json"));
  $("sort").addEventListener("change", (event) => view.set({ sort: event.target.value }));
  $("filter").addEventListener("input", (event) => view.set({ filter: event.target.value.trim() }));
  $("trail").addEventListener("click", (event) => event.target.dataset.scope && view.set({ scope: event.target.dataset.scope }));
  for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  for (const [list, entries] of [["words", Object.entries(WORDS)], ["signs", LEGEND], ["keys", Object.entries(KEYS)]]) {
    for (const [name, what] of entries) {
      $(list).appendChild(document.createElement("dt")).textContent = name === " " ? "space" : name;
      $(list).appendChild(document.createElement("dd")).textContent = what;
    }
  }
  const up = () => view.set({ scope: parent(view.scope, above) });
  const act = { " ": pause, ArrowLeft: () => replay.step(-1), ArrowRight: () => replay.step(1), p: () => replay.toggle(), g: () => $("when").focus(), t: toggleTheme, u: up, "?": help, "/": () => $("filter").focus() };
  act.s = () => view.set({ sort: SORTS[(SORTS.indexOf(view.sort) + 1) % SORTS.length] });
  for (const [index, range] of Object.keys(RANGES).entries()) act[index + 1] = () => view.set({ range });
  return act;
}

/** Goes on Enter, or when it is left: while somebody types each part of the time makes another one. */
function makeTimeField(field, goTo) {
  let edited = false;
  const go = () => {
    edited = false;
    goTo(Date.parse(field.value));
  };
  field.addEventListener("input", () => (edited = true));
  field.addEventListener("keydown", (event) => event.key === "Enter" && field.reportValidity() && go());
  field.addEventListener("blur", () => {
    if (edited && field.checkValidity()) go();
    edited = false;
  });
}

/** Show the view in the controls. */
export function drawControls(view, { paused, playing, nowMs, above }) {
  for (const button of $("ranges").children) button.setAttribute("aria-pressed", button.textContent === view.range);
  $("range-choice").value = view.range;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "go on" : "pause";
  $("replay").setAttribute("aria-pressed", playing);
  $("replay").textContent = playing ? "stop" : "replay";
  $("theme").textContent = isDark(view) ? "light" : "dark";
  $("later").disabled = !paused;
  if (document.activeElement !== $("when")) {
    $("when").value = localTime(view.endMs ?? nowMs);
    $("when").min = localTime(nowMs - KEPT_MS);
  }
  $("sort").value = view.sort;
  if (document.activeElement !== $("filter")) $("filter").value = view.filter;
  const trail = [];
  for (let scope = view.scope; ; scope = parent(scope, above)) {
    trail.unshift(scope);
    if (scope === "cluster") break;
  }
  $("trail").replaceChildren(
    ...trail.map((scope) => {
      const button = document.createElement("button");
      button.textContent = splitScope(scope).filter(Boolean).join(" ");
      button.dataset.scope = scope;
      if (scope === view.scope) button.setAttribute("aria-current", "page");
      return button;
    }),
  );
}

function parent(scope, above) {
  const [kind, name] = splitScope(scope);
  return (kind === "worker" && above(name)) || "cluster";
}

/** As a date-time field has it: the reader's own clock, to the second. */
function localTime(unixMs) {
  const at = new Date(Math.floor(unixMs / 1000) * 1000);
  return new Date(at.getTime() - 60000 * at.getTimezoneOffset()).toISOString().slice(0, 19);
}
