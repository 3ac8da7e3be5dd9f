// Queues by pool, model, node and worker, and by phase: what workers said last.

import { ROLES } from "./phases.js";

/** Map from scope to [running, waiting, waiting prompt tokens], with "phase:prefill" and "phase:decode" among them. */
export function depthsByScope(store, depths, ids) {
  const found = new Map();
  const add = (scope, values) => {
    const sums = found.get(scope) ?? [0, 0, 0, 0];
    found.set(scope, sums.map((sum, index) => sum + values[index]));
  };
  for (const [index, id] of ids.entries()) {
    const slot = store.slots.get(id);
    if (slot === undefined || !depths) continue;
    const { node, model } = store.members[slot];
    const role = ROLES[store.roleOf(slot)];
    const values = [depths.running[index], depths.waiting[index], depths.waiting_prefill_tokens[index], depths.awaiting_kv[index]];
    for (const scope of ["cluster", `pool:${role}`, `model:${model}`, `node:${node}`, `worker:${id}`]) add(scope, values);
    add(role === "prefill" ? "phase:prefill" : "phase:decode", values);
  }
  return found;
}
