// Questions to the metrics service: one that is not answered in time fails, so that nothing waits for it for ever.

const ANSWER_MS = 5000;

/** Like `fetch`, over too when `signal` says so, or the whole answer has not come within `withinMs`. */
export function ask(url, { signal, withinMs = ANSWER_MS } = {}) {
  const late = AbortSignal.timeout(withinMs);
  return fetch(url, { signal: signal ? AbortSignal.any([signal, late]) : late });
}
