// Queues by pool, model, node and worker, and by phase: what workers said last.

import { groupScope } from "./store.js";

/** Map from scope to [running, waiting, waiting prompt tokens, awaiting KV]; "phase:prefill" and "phase:decode" among them
 * are of the scope that is looked at. */
export function depthsByScope(store, depths, ids, within) {
  const found = new Map();
  const add = (scope, values) => {
    const sums = found.get(scope) ?? [0, 0, 0, 0];
    found.set(scope, sums.map((sum, index) => sum + values[index]));
  };
  for (const [index, id] of ids.entries()) {
    const slot = store.slots.get(id);
    if (slot === undefined || !depths) continue;
    const { node, model } = store.members[slot], group = groupScope(store.members[slot]);
    const role = store.roleIn(slot, store.newest, store.newest);
    const values = [depths.running[index], depths.waiting[index], depths.waiting_prefill_tokens[index], depths.awaiting_kv[index]];
    for (const scope of ["cluster", `pool:${role}`, `model:${model}`, `node:${node}`, `worker:${id}`, ...(group ? [group] : [])]) add(scope, values);
    if (store.inScope(slot, within, store.newest, store.newest)) add(role === "prefill" ? "phase:prefill" : "phase:decode", values);
  }
  return found;
}
