// The live stream: server-sent events, connected again whenever it ends; why it cannot be had is told in words.

const RETRY_MS = 1000;

/** Hand each message to the function of its name, for as long as the page lives; `tell` is told (connected, problem). */
export function follow(url, { members, tick, tell }) {
  const source = new EventSource(url);
  source.addEventListener("members", (message) => members(JSON.parse(message.data)));
  source.addEventListener("tick", (message) => tick(JSON.parse(message.data)));
  source.addEventListener("open", () => tell(true, ""));
  source.addEventListener("error", async () => {
    if (source.readyState !== EventSource.CLOSED) return tell(false, "the metrics service does not answer");
    const { problem, waitMs } = await refusal(url);
    tell(false, problem);
    setTimeout(() => follow(url, { members, tick, tell }), waitMs);
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
    return { problem: `not live: ${message}; asking again each ${waitS} s`, waitMs: 1000 * waitS };
  } catch {
    return { problem: "the metrics service does not answer", waitMs: RETRY_MS };
  } finally {
    asking.abort();
  }
}
