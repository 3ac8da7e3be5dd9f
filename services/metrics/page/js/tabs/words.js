// Times and rates of what is to come, in words.

import { DASH, short } from "../status/words.js";

const WEEK_S = 6 * 86400;

/** "Tue 14:00"; with the date where the weekday is not of this week, and seconds where days last minutes. */
export function dayTime(unixS) {
  if (unixS == null) return DASH;
  const at = new Date(unixS * 1000);
  const day = { weekday: "short", ...(Math.abs(unixS - Date.now() / 1000) < WEEK_S ? {} : { day: "numeric", month: "short" }) };
  const second = at.getSeconds() ? { second: "2-digit" } : {};
  return at.toLocaleString([], { ...day, hour: "2-digit", minute: "2-digit", ...second, hourCycle: "h23" });
}

/** "decode-heavy since Tue 14:00: outputs of acme grew from 240 to 610 tokens; prefill : decode 0.8 → 0.3"; `unit` is
 * that of a phase's work. */
export function trendWords({ what, since_unix_s: since, before, after, causes }, unit) {
  const moved = `${short(before)} → ${short(after)}`;
  const [head, tail] =
    what === "balance"
      ? [after < before ? "decode-heavy" : "prefill-heavy", `prefill : decode ${moved}`]
      : [`${after > before ? "more" : "less"} ${what} work`, `${unit} ${moved}`];
  const why = causes.filter((cause) => short(cause.before) !== short(cause.after)).slice(0, 2).map(causeWords).join(", ");
  return `${head} since ${dayTime(since)}: ${why ? `${why}; ` : ""}${tail}`;
}

function causeWords({ tenant, what, before, after }) {
  const who = tenant === "default" ? "all tenants" : tenant;
  return `${what} of ${who} ${after > before ? "grew" : "fell"} from ${short(before)} to ${short(after)} ${what === "requests" ? "a second" : "tokens"}`;
}

/** What a plan comes to, for people in a hurry. */
export function planWords({ shortages, confidence, pools }) {
  if (shortages.length) {
    return shortages.map(({ phase, gpus, at_unix_s: at, sure }) => `${phase} is short by ${gpus} GPU${gpus === 1 ? "" : "s"} from ${dayTime(at)}, ${Math.round(100 * sure)} % sure`).join("; ");
  }
  if (Object.values(pools).every(({ there }) => there === null)) return "the number of available GPUs is unknown";
  return `enough GPUs are available; figures suffice for ${Math.round(100 * confidence)} % of possible demand`;
}
