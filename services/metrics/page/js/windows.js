// Windows of all workers from the service, in bytes: see services/metrics/http/routes.py.

import { ask } from "./ask.js";

const LOAD_MS = 30000; // for some megabytes, over a slow line
const MAX_CELLS = 200000; // windows x workers in one answer
const PIECE_CELLS = 50000; // what is decoded between two frames

/** Fetch windows that end at `endMs` (now when null) and enter them into the store, the newest first. */
export async function load(store, { window, endMs, memberOf, signal, count }) {
  let left = count, end = endMs;
  while (left > 0) {
    const cells = Math.max(store.members.length, 1);
    const most = store.members.length ? Math.floor(PIECE_CELLS / cells) : 10;
    const take = Math.max(1, Math.min(left, most, Math.floor(MAX_CELLS / cells)));
    const span = take * store.windowMs;
    const query = new URLSearchParams({ window, span: `${span}ms`.replace(/000ms$/, "s") });
    if (end !== null) query.set("end_unix_ms", end);
    const answer = await ask(`v1/occupancy/windows?${query}`, { signal, withinMs: LOAD_MS });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const header = enter(store, await answer.arrayBuffer(), memberOf);
    end = header.first_start_unix_ms;
    left -= take;
    await new Promise(requestAnimationFrame);
  }
}

/** Enter one answer; its header. */
function enter(store, bytes, memberOf) {
  const length = new DataView(bytes).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  const { windows, workers } = header;
  const kind = header.type === "uint32" ? Uint32Array : Float64Array;
  const times = new kind(bytes, 4 + length, windows * workers.length * 4);
  const roles = new Uint8Array(bytes, 4 + length + times.byteLength, windows * workers.length);
  const encodeAt = 8 * Math.ceil((roles.byteOffset + roles.byteLength) / 8);
  const encode = header.encodes ? new kind(bytes, encodeAt, roles.length) : null;
  const heard = new Uint8Array(workers.length); // others have gone long since, and take no place
  for (let at = 0; at < roles.length; at++) heard[at % workers.length] |= roles[at];
  const slots = workers.map((id, index) => {
    if (!heard[index]) return -1;
    const [node, model, gpus, group] = [header.nodes[index], header.models[index], header.gpus[index], header.groups?.[index] ?? ""];
    return store.slot(memberOf({ id, node, model, gpus, engine: "", group }));
  });
  const first = Math.round(header.first_start_unix_ms / store.windowMs);
  for (let index = 0; index < windows; index++) {
    const lengthMs = Math.min(store.windowMs, header.told_to_unix_ms - (first + index) * store.windowMs);
    const column = store.column(first + index, Math.max(lengthMs, 1));
    if (column < 0) continue;
    for (let worker = 0; worker < workers.length; worker++) {
      const from = index * workers.length + worker;
      if (slots[worker] < 0) continue;
      const at = 4 * from;
      store.put(column, slots[worker], times[at], times[at + 1], times[at + 2], times[at + 3], roles[from], encode?.[from]);
    }
  }
  store.settle();
  store.loads++;
  return header;
}
