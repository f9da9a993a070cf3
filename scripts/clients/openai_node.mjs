import assert from "node:assert";
import OpenAI from "openai";

const sentence = process.env.SENTENCE;
const client = new OpenAI({ baseURL: process.env.URL + "/v1", maxRetries: 0 });
const asked = { model: "scripted", messages: [{ role: "user", content: "hi" }], temperature: 0 };

const whole = await client.chat.completions.create(asked);
assert.equal(whole.choices[0].message.content, sentence);

let text = "";
for await (const part of await client.chat.completions.create({ ...asked, stream: true })) text += part.choices[0]?.delta?.content ?? "";
assert.equal(text, sentence);

const schema = { type: "object", properties: { sky: { enum: ["sun", "rain"] } }, required: ["sky"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "report", parameters: schema, strict: true } }];
const run = client.chat.completions.stream({ ...asked, tools, tool_choice: "required", parallel_tool_calls: false });
const called = (await run.finalChatCompletion()).choices[0].message.tool_calls[0].function;
assert.equal(called.name, "report");
assert.ok(["sun", "rain"].includes(JSON.parse(called.arguments).sky));

const kinds = [];
const stream = client.responses.stream({ model: "scripted", input: "hi", temperature: 0 });
for await (const event of stream) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert.equal(kinds.at(-1), "response.completed");
assert.equal((await stream.finalResponse()).output_text, sentence);
