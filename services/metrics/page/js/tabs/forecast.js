// The view of demand to come: a fan for each series, and GPUs needed and available.

import { ask } from "../ask.js";
import { Fan } from "./fan.js";
import { Needs } from "./needs.js";
import { jsonOf, Poll } from "./tabs.js";
import { dayTime, planWords, trendWords } from "./words.js";

const EVERY_MS = 30_000; // the service makes a forecast anew after five minutes
const FORECAST_MS = 30_000;
const PLAN_MS = 900_000; // new traffic is measured in the lab first
const HORIZONS_S = { "6h": 21_600, "24h": 86_400, "3d": 259_200, "7d": 604_800 };
const FANS = [["requests", "requests/s", "faint"], ["prefill", "prompt tokens/s", "prefill"], ["decode", "output tokens/s", "decode"]];

const $ = (id) => document.getElementById(id);

export class ForecastTab {
  #fans = new Map();
  #poll = new Poll(() => this.#look(), EVERY_MS);
  #needs = new Needs($("needs"), $("capacity-table"));
  #asked = null; // a plan that was asked for here, with its model

  /** `models()`: names of models that serve. */
  constructor(models) {
    this.models = models;
    for (const name of Object.keys(HORIZONS_S)) $("forecast-horizon").add(new Option(name, name, name === "24h", name === "24h"));
    $("forecast-model").add(new Option("the busiest", ""));
    for (const id of ["forecast-model", "forecast-horizon"]) $(id).addEventListener("change", () => this.#poll.start());
    $("capacity-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#plan();
    });
  }

  show() {
    this.#poll.start();
  }

  hide() {
    this.#poll.stop();
  }

  async #look() {
    this.#listModels();
    const model = $("forecast-model").value, horizon = $("forecast-horizon").value;
    const still = () => model === $("forecast-model").value && horizon === $("forecast-horizon").value;
    try {
      const found = await jsonOf(ask(`v1/forecast?${new URLSearchParams({ model, horizon })}`, { withinMs: FORECAST_MS }));
      if (still()) this.#draw(found, HORIZONS_S[horizon]);
    } catch (error) {
      if (still()) this.#say(error.message, true);
    }
    try {
      const plans = await jsonOf(ask("v1/capacity/plans"));
      if (still()) this.#drawPlan(plans.find((each) => each.model === model) ?? (model ? undefined : plans[0]));
    } catch (error) {
      $("capacity-note").textContent = error.message;
    }
  }

  #listModels() {
    const known = new Set([...$("forecast-model").options].map(({ value }) => value));
    for (const name of this.models()) if (!known.has(name)) $("forecast-model").add(new Option(name));
  }

  #say(text, poor = false) {
    $("forecast-said").textContent = text;
    $("forecast-said").classList.toggle("poor", poor);
    if (poor) $("forecast-charts").hidden = $("forecast-trends").hidden = true;
  }

  #draw({ model, starts_unix_s: starts, series, history, trend, notes }, horizonS) {
    const span = starts.at(-1) - starts[0];
    this.#say([`${model}, from ${dayTime(starts[0])}`, ...notes].join("; "));
    const unit = series.prefill.gpus ? "GPUs busy" : "tokens/s";
    $("forecast-trends").replaceChildren(...trend.map((each) => Object.assign(document.createElement("li"), { textContent: trendWords(each, unit) })));
    $("forecast-trends").hidden = trend.length === 0;
    $("forecast-charts").hidden = false;
    for (const [name, title, color] of FANS) {
      let fan = this.#fans.get(name);
      if (!fan) this.#fans.set(name, (fan = new Fan($("fans"), title, color)));
      fan.draw({ starts: history.starts_unix_s, values: history[name] }, { starts, bands: series[name] }, Math.min(span, horizonS));
    }
  }

  #drawPlan(kept) {
    const plan = this.#asked?.for === $("forecast-model").value ? this.#asked.plan : kept;
    this.#needs.draw(plan ?? null);
    $("capacity-note").textContent = plan
      ? `${plan.model}, ${plan.slo}: ${planWords(plan)}`
      : "no plan yet; the metrics service makes one every five minutes if FULCRUM_METRICS_CAPACITY_SLO is set";
  }

  async #plan() {
    const [button, note] = [$("capacity-form").querySelector("button"), $("capacity-form-note")];
    const model = $("forecast-model").value;
    button.disabled = true;
    note.textContent = "planning; new traffic is measured in the lab first, which takes ten seconds or so";
    try {
      const query = new URLSearchParams({ model, horizon: $("forecast-horizon").value, slo: $("capacity-slo").value, check: "false" });
      this.#asked = { for: model, plan: await jsonOf(ask(`v1/capacity?${query}`, { withinMs: PLAN_MS })) };
      note.textContent = "planned just now";
      this.#drawPlan();
    } catch (error) {
      note.textContent = error.message;
    } finally {
      button.disabled = false;
    }
  }
}
