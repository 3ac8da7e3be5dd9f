// Latency percentiles of finished requests and of those that wait for a first token, and how many there were.

import { ask } from "./ask.js";
import { percent } from "./phases.js";

const POLL_MS = 2000;
const OBJECTIVE = 0.99; // below it the share that met its target is marked
const WINDOW = "1m";

/** Poll the summary into a table, for as long as the page lives: of the minute before `endMs()`, or before now. */
export async function followLatency(body, note, endMs) {
  for (let reported; ; ) {
    if ((endMs() === null || endMs() !== reported) && !document.hidden) {
      try {
        const end = endMs();
        const answer = await ask(`v1/requests/summary?window=${WINDOW}${end === null ? "" : `&end_unix_ms=${end}`}`);
        if (!answer.ok) throw new Error(answer.statusText);
        show(body, note, await answer.json());
        reported = end;
      } catch {
        body.replaceChildren(); // old figures would pass for those of now
        note.textContent = "not known now";
        reported = undefined;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, endMs() === reported ? POLL_MS : POLL_MS / 4));
  }
}

function show(body, note, { total, complete }) {
  const rows = { ttft_s: "TTFT", tpot_s: "TPOT", queue_s: "queue" };
  const levels = { ttft_s: total.ttft_slo, tpot_s: total.tpot_slo };
  body.replaceChildren();
  for (const [field, name] of Object.entries(rows)) {
    const row = body.insertRow();
    row.appendChild(document.createElement("th")).textContent = name;
    for (const rank of ["p50", "p90", "p99"]) row.insertCell().textContent = duration(total[field][rank]);
    const { target_s: target = null, met = null } = levels[field] ?? {};
    row.insertCell().textContent = target === null ? "" : `≤ ${duration(target)}`;
    const share = row.insertCell();
    share.textContent = met === null ? "" : percent(met, 1);
    share.classList.toggle("poor", met !== null && met < OBJECTIVE);
  }
  const failed = total.outcomes.failed ?? 0;
  const kept = complete ? "" : total.requests ? " (not all kept)" : " that are still kept";
  const waiting = total.awaited ? `, ${total.awaited} without a first token` : "";
  note.textContent = `${total.requests} requests in ${WINDOW}${kept}${failed ? `, ${failed} failed` : ""}${waiting}`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}
