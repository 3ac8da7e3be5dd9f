// Latency percentiles of finished requests, and how many there were.

const POLL_MS = 2000;
const WINDOW = "1m";

/** Poll the summary into a table, for as long as the page lives. */
export async function followLatency(body, note, isPaused) {
  for (;;) {
    if (!isPaused() && !document.hidden) {
      try {
        const answer = await fetch(`/v1/requests/summary?window=${WINDOW}`);
        if (answer.ok) show(body, note, await answer.json());
      } catch {
        note.textContent = "not known now";
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function show(body, note, { total, complete }) {
  const rows = { ttft_s: "TTFT", tpot_s: "TPOT", queue_s: "queue" };
  body.replaceChildren();
  for (const [field, name] of Object.entries(rows)) {
    const row = body.insertRow();
    row.appendChild(document.createElement("th")).textContent = name;
    for (const rank of ["p50", "p90", "p99"]) row.insertCell().textContent = duration(total[field][rank]);
  }
  const failed = total.outcomes.failed ?? 0;
  note.textContent = `${total.requests} requests in ${WINDOW}${complete ? "" : " (not all kept)"}${failed ? `, ${failed} failed` : ""}`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  return seconds < 1 ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}
