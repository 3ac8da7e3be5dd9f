// Pressure of each model's pools as bars up to 2, with a line at 1, and the figures behind it.

import { count, millis, plural, pressureClass, pressureText, share, short } from "./words.js";

const FULL_SCALE = 2;
const WORTH_SAYING = 0.1; // of pressure that another split would take away

export class Gauges {
  #cards = new Map();

  constructor(host, onScope) {
    this.host = host;
    host.addEventListener("click", (event) => event.target.dataset.scope && onScope(event.target.dataset.scope));
  }

  /** Of `models` as /v1/status tells them; `past`: only their pressures are known. */
  draw(models, { past = false } = {}) {
    const names = new Set(models.map(({ model }) => model));
    for (const [name, card] of this.#cards) {
      if (names.has(name)) continue;
      card.element.remove();
      this.#cards.delete(name);
    }
    for (const model of models) {
      let card = this.#cards.get(model.model);
      if (!card) this.#cards.set(model.model, (card = this.#make(model.model)));
      card.note.textContent = past ? "" : noteOf(model);
      drawGauge(card.prefill, model.prefill, model.known === false ? [model.unknown_because] : past ? [] : prefillFacts(model));
      drawGauge(card.decode, model.decode, model.known === false || past ? [] : decodeFacts(model));
    }
    this.host.classList.toggle("many", models.length > 1);
  }

  #make(name) {
    const element = this.host.appendChild(document.createElement("div"));
    element.className = "gauges";
    const title = element.appendChild(document.createElement("h3"));
    const button = title.appendChild(document.createElement("button"));
    [button.textContent, button.dataset.scope] = [name, `model:${name}`];
    const note = title.appendChild(document.createElement("small"));
    return { element, note, prefill: makeGauge(element, "prefill"), decode: makeGauge(element, "decode") };
  }
}

function makeGauge(host, phase) {
  const element = host.appendChild(document.createElement("div"));
  element.className = `gauge ${phase}`;
  const head = element.appendChild(document.createElement("p"));
  const name = head.appendChild(document.createElement("span"));
  name.textContent = phase;
  const value = head.appendChild(document.createElement("b"));
  const workers = head.appendChild(document.createElement("small"));
  const bar = element.appendChild(document.createElement("div"));
  bar.className = "pressure";
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-label", `pressure of ${phase}`);
  bar.ariaValueMin = "0";
  const fill = bar.appendChild(document.createElement("i"));
  const facts = element.appendChild(document.createElement("p"));
  facts.className = "facts";
  return { element, value, workers, bar, fill, facts };
}

function drawGauge({ element, value, workers, bar, fill, facts }, pool, reported) {
  const { pressure } = pool;
  setText(value, pressureText(pressure));
  setText(workers, pool.workers == null ? "" : plural(pool.workers, "worker"));
  fill.style.width = `${(100 * Math.min(pressure ?? 0, FULL_SCALE)) / FULL_SCALE}%`;
  const kind = pressureClass(pressure);
  for (const each of ["calm", "near", "over", "unknown"]) element.classList.toggle(each, each === kind);
  if (pressure != null) bar.ariaValueNow = pressure.toFixed(2);
  setText(facts, reported.filter(Boolean).join(" · "));
}

function prefillFacts({ prefill, mixed }) {
  const { waiting_requests: requests, waiting_prompt_tokens: tokens, waiting_s: seconds } = prefill;
  const work = seconds ? `: ${millis(1000 * seconds)} of work` : "";
  const waits = tokens == null ? "" : requests || tokens ? `${requests ? `${plural(requests, "request")} wait, ` : ""}${short(tokens)} tokens${work}` : "nothing waits";
  return [waits, `busy ${share(prefill.busy)} of the time`, encodes(prefill), prefill.starved > 0.005 && `starved ${share(prefill.starved)}`, mixed?.workers && `${plural(mixed.workers, "decode worker")} may compute prompts too`];
}

function decodeFacts({ decode }) {
  const held = decode.running == null ? null : decode.running + (decode.held ?? 0);
  const batch = held == null || decode.largest_batch == null ? "" : `${plural(held, "sequence")}, room for ${count(decode.largest_batch)} within TPOT${decode.slots == null ? "" : ` (${count(decode.slots)} slots)`}`;
  const tpot = decode.tpot_ms == null ? "" : `TPOT ${millis(decode.tpot_ms)}${decode.tpot_target_ms == null ? "" : ` of ${millis(decode.tpot_target_ms)}`}`;
  return [batch, decode.kv_used != null && `KV ${share(decode.kv_used)}`, tpot, `busy ${share(decode.busy)} of the time`, encodes(decode), decode.starved > 0.005 && `starved ${share(decode.starved)}`, decode.kv_wait > 0.005 && `KV wait ${share(decode.kv_wait)}`];
}

/** The part of the busy time in which images were encoded, where there are any. */
const encodes = ({ busy, encode }) => encode > 0.0005 && `encode ${share(encode)}, the rest ${share(busy - encode)}`;

/** What the best split would bring, where it is not the present one. */
function noteOf({ cluster_pressure: least, best_split: split, prefill, decode }) {
  if (least == null || !split || Math.max(prefill.pressure ?? 0, decode.pressure ?? 0) - least < WORTH_SAYING) return "";
  const roles = split.prefill ? `${split.prefill} prefill + ${split.decode} decode` : split.decode > 1 ? `${split.decode} workers that do both` : "a worker that does both";
  return `${roles} would leave ${pressureText(least)}${least > 1 ? ": too small in any split" : ""}`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
