// Keys, where no field has the focus.

export const KEYS = {
  " ": "pause or go on",
  "← →": "half a range earlier or later",
  g: "go to a time",
  p: "replay from there, or stop",
  "1–6": "time range",
  t: "light or dark",
  s: "order of the heat map",
  "/": "filter",
  u: "up, out of a scope",
  "?": "words and keys",
};

/** `act` has a function for each single key. */
export function listen(act) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === " " && event.target.tagName === "BUTTON") return;
    const action = act[event.key];
    if (!action) return;
    action();
    event.preventDefault();
  });
}
