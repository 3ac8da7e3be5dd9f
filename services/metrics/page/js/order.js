// In which order the heat map shows workers, and where groups of them begin.

import { COVERED, DECODE, PREFILL } from "./phases.js";

const BUSY_WINDOWS = 50; // of 100 ms

/** [{slot, group}] of the workers in scope that were there in windows `first` to `last`. */
export function order(store, live, scope, sort, first, last) {
  const rows = [];
  for (let slot = 0; slot < store.members.length; slot++) {
    const role = store.roleIn(slot, first, last);
    if (!role || !store.inScope(slot, scope, first, last)) continue;
    const { id, node, model, group: ranksOf } = store.members[slot];
    const busy = sort === "busy" ? busyShare(live, live.slots.get(id)) : 0;
    rows.push({ slot, id, busy, place: ranksOf || id, group: { node, pool: role, model, busy: "" }[sort] });
  }
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  rows.sort((a, b) => b.busy - a.busy || compare(a.group, b.group) || compare(a.place, b.place) || compare(a.id, b.id));
  return rows;
}

function busyShare(live, slot) {
  if (slot === undefined) return 0;
  const series = live.series(`worker:${live.members[slot].id}`);
  const sums = [0, 0];
  for (let number = live.newest - BUSY_WINDOWS; number <= live.newest; number++) {
    if (!live.has(number)) continue;
    const column = number % live.columns;
    sums[0] += series.value(column, PREFILL) + series.value(column, DECODE);
    sums[1] += series.value(column, COVERED);
  }
  return sums[1] ? sums[0] / sums[1] : 0;
}
