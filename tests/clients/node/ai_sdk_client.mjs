// The AI SDK: `node ai_sdk_client.mjs SCENARIO` prints what came of it, as JSON.
// The environment tells where: BASE_URL, MODEL and PROMPT.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { Fruit, Place } from "./answers.mjs";

const { BASE_URL, MODEL, PROMPT } = process.env;
const mesh = createOpenAICompatible({
  name: "mesh",
  baseURL: BASE_URL,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const greedy = { model: mesh(MODEL), prompt: PROMPT, temperature: 0, maxRetries: 0 };

const scenarios = {
  async chat() {
    const { text, finishReason, usage } = await generateText(greedy);
    return { text, finishReason, outputTokens: usage.outputTokens };
  },

  async stream() {
    const result = streamText(greedy);
    let text = "";
    for await (const delta of result.textStream) text += delta;
    const usage = await result.usage;
    return { text, finishReason: await result.finishReason, outputTokens: usage.outputTokens };
  },

  async object() {
    return (await generateText({ ...greedy, output: Output.object({ schema: Fruit }) })).output;
  },

  async streamedObject() {
    return await streamText({ ...greedy, output: Output.object({ schema: Fruit }) }).output;
  },

  async tool() {
    const ask = {
      ...greedy,
      toolChoice: "required",
      tools: { get_weather: tool({ description: "The weather in a city.", inputSchema: Place }) },
    };
    const calls = [...(await generateText(ask)).toolCalls, ...(await streamText(ask).toolCalls)];
    return calls.map(({ toolName, input }) => ({ toolName, input }));
  },

  async responses() {
    const openai = createOpenAI({ baseURL: BASE_URL, apiKey: "any" });
    const ask = { ...greedy, model: openai.responses(MODEL) };
    return [(await generateText(ask)).text, await streamText(ask).text];
  },

  async brokenStream() {
    const errors = [];
    const result = streamText({ ...greedy, onError: ({ error }) => errors.push(error) });
    let text = "";
    for await (const part of result.fullStream) text += part.type === "text-delta" ? part.text : "";
    return { text, errors: errors.map((error) => error.message ?? error) };
  },
};

console.log(JSON.stringify(await scenarios[process.argv[2]]()));
