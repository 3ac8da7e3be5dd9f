// Another role for the worker that is looked at: buttons, a question before, and the suite's token with it.

import { askWith, change } from "../admin.js";

const ROLES = ["prefill", "decode", "mixed", "standby"];
const WHAT = {
  prefill: "computes prompts; its running sequences move with their KV",
  decode: "computes tokens after the first",
  mixed: "computes tokens, and prompts beside them",
  standby: "takes no work; its running sequences end or move",
};
const $ = (id) => document.getElementById(id);

export class RoleControl {
  #worker = "";
  #said = { worker: "", text: "" }; // what came of the last one

  constructor() {
    for (const role of ROLES) {
      const button = $("role-buttons").appendChild(document.createElement("button"));
      button.textContent = button.dataset.role = role;
      button.addEventListener("click", () => this.#open(role));
    }
  }

  /** `worker`: which is looked at now, with the role that it has; null: none, or it is a moment of the past. */
  draw(worker, role) {
    $("role").hidden = worker === null;
    if (worker === null) return;
    this.#worker = worker;
    const text = this.#said.worker === worker ? this.#said.text : role ? `${worker} is ${role}; ask for another` : "";
    if ($("role-now").textContent !== text) $("role-now").textContent = text;
    for (const button of $("role-buttons").children) button.setAttribute("aria-pressed", button.dataset.role === role);
  }

  #open(role) {
    const [worker, dialog, field] = [this.#worker, $("ask-role"), $("ask-role-token")];
    dialog.querySelector("h2").textContent = `${worker} → ${role}?`;
    $("ask-role-what").textContent = `A worker that is ${role} ${WHAT[role]}. The planner does not change it for a minute.`;
    askWith(dialog, field, $("ask-role-refused"), async () => {
      const body = { role, actor: "the page", reason: $("ask-role-reason").value };
      const found = await change("PUT", `v1/workers/${encodeURIComponent(worker)}/role`, body, field);
      const effect = found.effect_ms === null ? `; ${found.gateways_behind} gateways have not confirmed it` : `, in effect after ${found.effect_ms} ms`;
      this.#said = { worker, text: found.changed ? `${worker} is ${found.role} since epoch ${found.epoch}${effect}` : `${worker} is ${found.role} already: unchanged` };
    });
  }
}
