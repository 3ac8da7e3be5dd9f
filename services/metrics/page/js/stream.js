// The live stream: server-sent events, connected again whenever it ends or falls silent; why it cannot be had is said in words.

import { ask } from "./ask.js";

const RETRY_MS = 1000; // twice as much after each time in vain
const MAX_RETRY_MS = 5000;
const SILENT_MS = 3000; // a tick comes at least each 100 ms: what is silent for so long is dead, though nobody said so
const LOOK_MS = 500;
const AWAY = "the metrics service does not answer";

/** Hand each message to the function of its name, for as long as the page lives; one that returns false has the stream
 * begun anew. `opened` is called with each connection, `tell` with (connected, problem). */
export async function follow(url, { members, tick, opened, tell }) {
  for (let inVain = 0; ; inVain++) {
    const { heard, refused } = await read(url, { members, tick, opened: () => (opened(), tell(true, "")) });
    if (heard) inVain = 0;
    const { problem, waitMs } = refused ? await refusal(url) : { problem: AWAY, waitMs: 0 };
    tell(false, problem);
    const backOffMs = Math.min(RETRY_MS * 2 ** inVain, MAX_RETRY_MS);
    await new Promise((resolve) => setTimeout(resolve, spread(Math.max(waitMs, backOffMs))));
  }
}

/** Pages that lost the same service do not all come back at once: up to half as long again. */
const spread = (ms) => ms * (1 + Math.random() / 2);

/** Until the stream ends or falls silent: whether any message came, and whether the service would not have it. */
function read(url, { members, tick, opened }) {
  return new Promise((resolve) => {
    const source = new EventSource(url);
    let heard = false, heardAt = performance.now();
    const hear = (take) => (message) => {
      [heard, heardAt] = [true, performance.now()];
      if (take(JSON.parse(message.data)) === false) end();
    };
    const end = () => {
      clearInterval(watch);
      const refused = source.readyState === EventSource.CLOSED;
      source.close(); // of its own accord it would connect again, all pages at the same time
      resolve({ heard, refused });
    };
    const watch = setInterval(() => performance.now() - heardAt >= SILENT_MS && end(), LOOK_MS);
    source.addEventListener("members", hear(members));
    source.addEventListener("tick", hear(tick));
    source.addEventListener("open", opened);
    source.addEventListener("error", end);
  });
}

/** Why the stream was refused, which an EventSource does not tell, and when to ask again. */
async function refusal(url) {
  const asking = new AbortController();
  try {
    const answer = await ask(url, { signal: asking.signal });
    if (answer.ok) return { problem: "connecting", waitMs: 0 };
    if (answer.status === 401) location.assign("login"); // the session has ended, or the key that it stood for
    const { message } = (await answer.json()).error;
    const waitS = Number(answer.headers.get("retry-after")) || RETRY_MS / 1000;
    return { problem: `${message}; asking again after ${waitS} s`, waitMs: 1000 * waitS };
  } catch {
    return { problem: AWAY, waitMs: 0 };
  } finally {
    asking.abort();
  }
}
