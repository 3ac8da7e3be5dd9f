// The words of the page, as `?` explains them.

export const WORDS = {
  pressure: "work over capacity. Below 1 all work is done in time; above 1 a queue grows. Prefill: GPU time of the prompts that are due, over the GPU time until then. Decode: sequences over the largest batch that keeps TPOT, or KV over its room, whichever is more",
  "if roles were best": "the least pressure that any split of the workers would leave. If a pool is above 1 and this below 1, roles are out of balance. If this is above 1, the cluster is too small",
  busy: "share of GPU time in which steps run. It says nothing about headroom: a decode GPU with 6 of 192 sequences is busy nearly all the time",
  "P:D": "prefill GPU time over decode GPU time",
  "KV wait": "nothing runs, and a sequence waits for KV that is ready elsewhere: the network or the other worker is slow",
  starved: "a part of idle: nothing runs, because the prompts to decode are still being computed elsewhere",
  "TTFT, TPOT": "time to the first token, and time per output token after it",
  KV: "keys and values of the tokens so far, in GPU memory; their room bounds how many sequences run",
  coverage: "share of GPU time that telemetry covers; the rest is unknown, and hatched",
  provisional: "not final: a running step may still change it",
  "advisory, auto": "the planner only recommends changes, or makes them",
};
