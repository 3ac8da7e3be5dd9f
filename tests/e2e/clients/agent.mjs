// OpenAI's client for Node: a stream, a tool that is called, a schema that is filled.
import OpenAI from "openai";
import { QUESTION, isCity, need, schema } from "./city.mjs";

const [, , baseURL, model] = process.argv;
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];

const pieces = [];
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 12, stream: true }))
  if (chunk.choices[0]?.delta?.content) pieces.push(chunk.choices[0].delta.content);
need(pieces.length > 1, `a stream of ${pieces.length} pieces`);

const tools = [{ type: "function", function: { name: "weather", description: "Tell the weather.", parameters: schema } }];
const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 400 });
const called = await runner.finalMessage();
const call = called.tool_calls[0];
need(call.function.name === "weather" && isCity(JSON.parse(call.function.arguments)), "no call of the tool");

const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema } };
const filled = await client.chat.completions.parse({ model, messages, response_format: format, max_tokens: 400 });
const city = JSON.parse(filled.choices[0].message.content);
need(isCity(city), "the schema was not kept to");
console.log(JSON.stringify({ streamed: pieces.join(""), pieces: pieces.length, called: JSON.parse(call.function.arguments), filled: city }));
