// What is shown, as a file: the windows of the scope with the integers that the service sent.

import { COVERED, ENCODE, GPU_NS, phaseTimes, PROVISIONAL_NS } from "./phases.js";

/** Rows of windows `first` to `last`, whole GPU-nanoseconds. */
export function rowsOf(store, scope, first, last) {
  const series = store.series(scope);
  const rows = [];
  for (let number = first; series && number <= last; number++) {
    if (!store.has(number)) continue;
    const sums = Array.from({ length: 6 }, (_, field) => series.value(number % store.columns, field));
    const [prefill, decode, kvWait, idle] = phaseTimes(sums);
    rows.push({
      start_unix_ms: number * store.windowMs,
      covered_gpu_ns: sums[COVERED],
      prefill_gpu_ns: prefill,
      decode_gpu_ns: decode,
      kv_wait_gpu_ns: kvWait,
      idle_gpu_ns: idle,
      encode_gpu_ns: series.value(number % store.columns, ENCODE), // a part of prefill
      gpus: Math.round(sums[GPU_NS] / (store.lengthsMs[number % store.columns] * 1e6)),
      coverage: sums[GPU_NS] ? sums[COVERED] / sums[GPU_NS] : 0,
      provisional: sums[PROVISIONAL_NS] > 0,
    });
  }
  return rows;
}

/** Have the browser keep a file: "csv" or "json". */
export function save(kind, name, rows) {
  const heads = Object.keys(rows[0] ?? {});
  const csv = () => [heads, ...rows.map((row) => heads.map((head) => row[head]))].map((row) => row.join(",")).join("\n");
  const text = kind === "csv" ? `${csv()}\n` : JSON.stringify(rows);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind === "csv" ? "text/csv" : "application/json" }));
  link.download = `${name}.${kind}`;
  link.click();
  URL.revokeObjectURL(link.href);
}
