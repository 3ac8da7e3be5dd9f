// Vercel's AI SDK: a stream, a tool that its loop calls, a schema that is filled, embeddings.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { cosineSimilarity, embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { QUESTION, isCity, need, schema as city } from "./city.mjs";

const [, , baseURL, name] = process.argv;
const provider = createOpenAICompatible({ name: "fulcrum", baseURL, apiKey: "any", supportsStructuredOutputs: true });
const common = { model: provider(name), prompt: QUESTION, maxRetries: 0 };
const schema = jsonSchema(city);

const pieces = [];
for await (const piece of streamText({ ...common, maxOutputTokens: 12 }).textStream) pieces.push(piece);
need(pieces.length > 1, `a stream of ${pieces.length} pieces`);

const called = [];
const weather = tool({
  description: "Tell the weather.",
  inputSchema: schema,
  execute: async (city) => {
    called.push(city);
    return "rain";
  },
});
// The second step sends the first one's call and result back. A small model repeats its call for as long as it may.
const once = { providerOptions: { fulcrum: { parallel_tool_calls: false } } };
const loop = await generateText({ ...common, ...once, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens: 400 });
need(loop.steps.length === 2 && called.length >= 2 && called.every(isCity), "no call of the tool in each step");

const filled = await generateText({ ...common, output: Output.object({ schema }), maxOutputTokens: 400 });
need(isCity(filled.output), "the schema was not kept to");

const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(name), values: ["a fox", "a dog", "a fox"], maxRetries: 0 });
need(Math.abs(cosineSimilarity(embeddings[0], embeddings[2]) - 1) < 1e-4, "equal texts have other vectors");
console.log(JSON.stringify({ streamed: pieces.join(""), pieces: pieces.length, called: called[0], filled: filled.output }));
