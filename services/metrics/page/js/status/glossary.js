// The words of the page, as `?` explains them.

export const WORDS = {
  pressure: "work over what there is for it. Below 1 all of it is done in time; above 1 it grows into a queue. Of prefill: GPU time of the prompts that are due, over the GPU time until then. Of decode: sequences over the largest batch that holds TPOT, or KV over its room, whichever is more",
  "if roles were best": "the least pressure that any split of the workers would leave. A pool above 1 and this below 1: roles are out of balance. This above 1: the cluster is too small",
  busy: "share of GPU time in which steps run. It says nothing of room: a decode GPU with 6 of 192 sequences is busy nearly all the time",
  "P:D": "prefill GPU time over decode GPU time",
  "KV wait": "nothing runs, and a sequence awaits KV that is ready elsewhere: the network or the other worker is slow",
  starved: "a part of idle: nothing runs, since the prompts that would come here are still being computed elsewhere",
  "TTFT, TPOT": "time to the first token, and time per output token after it",
  KV: "keys and values of the tokens so far, in GPU memory; full, it bounds how many sequences run",
  coverage: "share of GPU time that telemetry covers; the rest is hatched, and counts as nothing",
  provisional: "a step that runs now may still change it",
  "advisory, auto": "the planner says what it would do, or does it",
};
