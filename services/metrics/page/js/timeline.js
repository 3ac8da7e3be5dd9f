// One worker's steps as boxes over time, high by how they count as prefill and decode; KV waits below them.

import { clockText, GUTTER_PX } from "./chart.js";
import { colors, hatch } from "./colors.js";
import { millis } from "./phases.js";

const STEP_PX = 56, WAIT_PX = 12, AXIS_PX = 16;
const HEIGHT_PX = STEP_PX + WAIT_PX + AXIS_PX;
const LEAST_GAP_PX = 3; // between edges, for which boxes that wide are drawn apart
const TICK_PX = 110;
const MS_NS = 1e6;

export class Timeline {
  #reported = null;
  #wanted = false;
  pointed = -1;

  /** `onPoint` gets the place of the step that is pointed at, -1 for none. */
  constructor(canvas, readout, onPoint) {
    [this.canvas, this.readout, this.onPoint] = [canvas, readout, onPoint];
    canvas.addEventListener("pointermove", (event) => this.aim(this.#stepAt(event.offsetX)));
    canvas.addEventListener("pointerleave", () => this.aim(-1));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Show an answer of /v1/steps, or nothing. */
  show(reported) {
    this.#reported = reported;
    this.aim(-1);
  }

  aim(index) {
    this.pointed = this.#reported?.steps[index] ? index : -1;
    this.onPoint(this.pointed);
    const step = this.#reported?.steps[this.pointed];
    this.readout.textContent = step ? tell(step) : "";
    this.draw();
  }

  draw() {
    if (!this.#wanted) requestAnimationFrame(() => this.#paint());
    this.#wanted = true;
  }

  get #bounds() {
    const endNs = this.#reported.as_of_unix_ns;
    return [endNs - this.#reported.window_ms * MS_NS, endNs];
  }

  #x(ns) {
    const [low, high] = this.#bounds;
    const clamped = Math.max(low, Math.min(high, ns));
    return GUTTER_PX + ((clamped - low) / (high - low)) * (this.canvas.clientWidth - GUTTER_PX);
  }

  #paint() {
    this.#wanted = false;
    const { canvas } = this, scale = devicePixelRatio, width = canvas.clientWidth;
    [canvas.width, canvas.height] = [Math.round(width * scale), HEIGHT_PX * scale];
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    if (!this.#reported || !width) return;
    const { idle, faint } = colors();
    pen.fillStyle = faint.css;
    pen.fillText("steps", 0, STEP_PX / 2);
    pen.fillText("KV wait", 0, STEP_PX + WAIT_PX / 2);
    pen.fillStyle = idle.css;
    pen.fillRect(GUTTER_PX, 0, width - GUTTER_PX, STEP_PX);
    this.#paintUnknown(pen);
    for (const step of this.#reported.steps) this.#paintStep(pen, step);
    pen.fillStyle = colors().kv_wait.css;
    for (const wait of this.#reported.kv_waits) {
      const x = this.#x(wait.start_unix_ns);
      pen.fillRect(x, STEP_PX + 2, Math.max(this.#x(wait.end_unix_ns) - x, 1), WAIT_PX - 2);
    }
    this.#paintPointed(pen);
    this.#paintTimes(pen);
  }

  #paintUnknown(pen) {
    const [low] = this.#bounds;
    const until = this.#x(this.#reported.kept_from_unix_ns);
    pen.clearRect(this.#x(low), 0, until - this.#x(low), STEP_PX);
    pen.fillStyle = hatch(pen);
    pen.fillRect(this.#x(low), 0, until - this.#x(low), STEP_PX);
  }

  #paintStep(pen, step) {
    const from = this.#x(step.start_unix_ns), to = this.#x(step.end_unix_ns);
    const wide = Math.max(to - from - (to - from > LEAST_GAP_PX ? 1 : 0), 0.5);
    const prefill = Math.round(STEP_PX * step.prefill_share);
    pen.globalAlpha = step.running ? 0.55 : 1;
    pen.fillStyle = colors().decode.css;
    pen.fillRect(from, 0, wide, STEP_PX - prefill);
    pen.fillStyle = colors().prefill.css;
    pen.fillRect(from, STEP_PX - prefill, wide, prefill);
    pen.globalAlpha = 1;
  }

  #paintPointed(pen) {
    const step = this.#reported.steps[this.pointed];
    if (!step) return;
    const x = this.#x(step.start_unix_ns);
    pen.strokeStyle = colors().text.css;
    pen.lineWidth = 2;
    pen.strokeRect(x, 1, Math.max(this.#x(step.end_unix_ns) - x, 2), STEP_PX - 2);
  }

  #paintTimes(pen) {
    const [low, high] = this.#bounds;
    pen.fillStyle = colors().faint.css;
    pen.textAlign = "center";
    const ticks = Math.max(2, Math.floor((this.canvas.clientWidth - GUTTER_PX) / TICK_PX));
    for (let tick = 1; tick < ticks; tick++) {
      const at = low + ((high - low) * tick) / ticks;
      pen.fillRect(this.#x(at), STEP_PX + WAIT_PX, 1, 3);
      pen.fillText(clockText(at / 1e9, 2), this.#x(at), HEIGHT_PX - AXIS_PX / 2 + 2);
    }
    pen.textAlign = "start";
  }

  #stepAt(x) {
    if (!this.#reported || x < GUTTER_PX) return -1;
    const [low, high] = this.#bounds;
    const at = low + ((x - GUTTER_PX) / (this.canvas.clientWidth - GUTTER_PX)) * (high - low);
    return this.#reported.steps.findIndex((step) => step.start_unix_ns <= at && at < step.end_unix_ns);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.#reported?.steps.length) return;
    const count = this.#reported.steps.length;
    this.aim(this.pointed < 0 ? (step > 0 ? 0 : count - 1) : Math.max(0, Math.min(count - 1, this.pointed + step)));
    event.preventDefault();
    event.stopPropagation();
  }
}

const count = (number, name) => `${number.toLocaleString("en")} ${name}${number === 1 ? "" : "s"}`;

function tell(step) {
  const parts = [];
  if (step.prefill_tokens) parts.push(`${count(step.prefill_tokens, "prompt token")} of ${count(step.prefill_sequences, "prompt")}`);
  if (step.decode_sequences) parts.push(`${count(step.decode_sequences, "sequence")} decoded over ${count(step.decode_kv_tokens, "KV token")}`);
  const took = millis(step.end_unix_ns - step.start_unix_ns);
  const share = step.kind === "mixed" ? `, ${(100 * step.prefill_share).toFixed(0)} % of it prefill` : "";
  return `${clockText(step.start_unix_ns / 1e9, 3)} ${step.kind}, ${took}${step.running ? " so far" : ""}${share}: ${parts.join(", ") || "what it computed is unknown"}`;
}
