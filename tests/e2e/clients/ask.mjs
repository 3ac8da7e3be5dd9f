// OpenAI's client for Node: one whole answer, one stream.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const asked = JSON.parse(process.argv[3]);
const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
let tokens = 0;
for await (const chunk of stream) tokens = chunk.usage?.completion_tokens ?? tokens;
if (whole.usage.completion_tokens !== asked.max_tokens || tokens !== asked.max_tokens) process.exit(1);
console.log(JSON.stringify(whole.choices[0].message));
