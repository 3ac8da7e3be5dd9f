// How near each phase comes to the devices' peaks, GPUs' own counters, and nodes' clocks: polled, for the scope shown.

import { ask } from "./ask.js";

const POLL_MS = 2000;

/** Poll into the tiles for as long as the page lives; `look()` is the scope and where it ends. Offsets by node are kept
 * in `offsets`. */
export async function followEfficiency(tiles, offsets, look) {
  for (;;) {
    const { scope, endMs } = look();
    if (!document.hidden) {
      try {
        const query = new URLSearchParams({ scope, ...(endMs === null ? {} : { end_unix_ms: endMs }) });
        const answer = await ask(`v1/occupancy/efficiency?${query}`);
        if (!answer.ok) throw new Error(answer.statusText);
        show(tiles, offsets, await answer.json());
      } catch {
        tiles.hidden = true; // old figures would pass for those of now
        offsets.clear();
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function show(tiles, offsets, reported) {
  const { prefill, decode } = reported.utilisation;
  const shown = {
    "prefill MFU · MBU": [prefill.mfu, prefill.mbu],
    "decode MFU · MBU": [decode.mfu, decode.mbu],
    "tensor · DRAM active": [reported.tensor_active, reported.dram_active],
  };
  const known = Object.entries(shown).filter(([, values]) => values.some((value) => value !== null));
  tiles.hidden = known.length === 0;
  tiles.replaceChildren(...known.map(([name, values]) => tile(name, values.map(share).join(" · "))));
  offsets.clear();
  for (const [node, ms] of Object.entries(reported.clock_offset_ms)) offsets.set(node, ms);
}

function tile(name, text) {
  const element = document.createElement("div");
  element.appendChild(document.createElement("dt")).textContent = name;
  element.appendChild(document.createElement("dd")).textContent = text;
  return element;
}

const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
