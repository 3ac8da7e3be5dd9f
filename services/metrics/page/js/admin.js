// What changes something: with the suite's token, which somebody types once and which is gone with the page.

import { jsonOf } from "./tabs/tabs.js";

const ANSWER_MS = 10_000;
let token = "";

/** The answer; an Error in the service's words where it refuses. `field`: where the token was typed. */
export async function change(method, url, body, field) {
  const found = await jsonOf(
    fetch(url, {
      method,
      headers: { "content-type": "application/json", authorization: `Bearer ${field.value}` },
      body: body === null ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(ANSWER_MS),
    }),
  );
  token = field.value; // it was right
  return found;
}

/** Open a dialog that asks for the token; `send` gets the button that was pressed, and the dialog closes when it is done. */
export function askWith(dialog, field, refused, send) {
  const form = dialog.querySelector("form");
  field.value = token;
  refused.hidden = true;
  form.onsubmit = async (event) => {
    const wanted = event.submitter?.value ?? "no";
    if (wanted === "no") return;
    event.preventDefault(); // it closes once it is done
    for (const button of form.querySelectorAll("button")) button.disabled = true;
    try {
      await send(wanted);
      dialog.close();
    } catch (error) {
      refused.textContent = `Not done: ${error.message}.`;
      refused.hidden = false;
    } finally {
      for (const button of form.querySelectorAll("button")) button.disabled = false;
    }
  };
  dialog.showModal();
}
