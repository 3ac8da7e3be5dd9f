// What waits for a phase, at workers and at gateways, as the service tells it by model and phase.

import { splitScope } from "./store.js";

/** {requests, tokens} of the whole cluster or a model, null while the service does not know; undefined for other scopes,
 * of which gateways cannot tell, unless it knows of none. */
export function queueOf(queues, scope, phase) {
  const [kind, name] = splitScope(scope);
  const known = queues.some((queue) => queue.requests !== null) || !queues.length;
  if (kind !== "cluster" && kind !== "model") return known ? undefined : null;
  const sums = { requests: 0, tokens: 0 };
  for (const queue of queues) {
    if (queue.phase !== phase || (kind === "model" && queue.model !== name)) continue;
    if (queue.requests === null) return null;
    sums.requests += queue.requests;
    sums.tokens += queue.prompt_tokens;
  }
  return sums;
}
