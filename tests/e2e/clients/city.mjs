// The answer that agents are asked for: a city by a schema, and what checks it.
export const QUESTION = "Which city has the Eiffel Tower, and how many people live there?";
export const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, people: { type: "integer", minimum: 0, maximum: 99999999 } },
  required: ["name", "people"],
  additionalProperties: false,
};
export const isCity = (value) => typeof value.name === "string" && Number.isInteger(value.people);
export const need = (holds, what) => {
  if (!holds) throw new Error(what);
};
