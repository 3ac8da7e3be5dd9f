// The live stream: server-sent events, connected again whenever it ends or falls silent; why it cannot be had is told in words.

const RETRY_MS = 1000;
const SILENT_MS = 3000; // a tick comes each 100 ms: what is silent for so long is dead, though nobody said so
const LOOK_MS = 500;
const AWAY = "the metrics service does not answer";

/** Hand each message to the function of its name, for as long as the page lives; `tell` is told (connected, problem). */
export function follow(url, { members, tick, tell }) {
  const source = new EventSource(url);
  let heardAt = performance.now();
  const hear = (take) => (message) => {
    heardAt = performance.now();
    take(JSON.parse(message.data));
  };
  const again = (problem, waitMs) => {
    tell(false, problem);
    setTimeout(() => follow(url, { members, tick, tell }), waitMs);
  };
  const watch = setInterval(() => {
    if (performance.now() - heardAt < SILENT_MS) return;
    clearInterval(watch);
    source.close();
    again(AWAY, RETRY_MS);
  }, LOOK_MS);
  source.addEventListener("members", hear(members));
  source.addEventListener("tick", hear(tick));
  source.addEventListener("open", () => tell(true, ""));
  source.addEventListener("error", async () => {
    if (source.readyState !== EventSource.CLOSED) return tell(false, AWAY);
    clearInterval(watch);
    const { problem, waitMs } = await refusal(url);
    again(problem, waitMs);
  });
}

/** Why the stream was refused, which an EventSource does not tell, and when to ask again. */
async function refusal(url) {
  const asking = new AbortController();
  try {
    const answer = await fetch(url, { signal: asking.signal });
    if (answer.ok) return { problem: "connecting", waitMs: RETRY_MS };
    const { message } = (await answer.json()).error;
    const waitS = Number(answer.headers.get("retry-after")) || RETRY_MS / 1000;
    return { problem: `${message}; asking again each ${waitS} s`, waitMs: 1000 * waitS };
  } catch {
    return { problem: AWAY, waitMs: RETRY_MS };
  } finally {
    asking.abort();
  }
}
