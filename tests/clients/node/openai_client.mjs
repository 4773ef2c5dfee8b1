// The `openai` package of npm: `node openai_client.mjs SCENARIO` prints what came of it, as JSON.
// The environment tells where: BASE_URL, MODEL and PROMPT.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { Fruit, weatherTool } from "./answers.mjs";

const { BASE_URL, MODEL, PROMPT } = process.env;
const client = new OpenAI({ baseURL: BASE_URL, apiKey: "any", maxRetries: 0 });
const greedy = {
  model: MODEL,
  messages: [{ role: "user", content: PROMPT }],
  temperature: 0,
};

const scenarios = {
  async chat() {
    return (await client.chat.completions.create(greedy)).choices[0].message.content;
  },

  async stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...greedy, stream: true })) {
      text += chunk.choices[0].delta.content ?? "";
    }
    return text;
  },

  async streamHelper() {
    const answer = await client.chat.completions
      .stream({ ...greedy, n: 2, stream_options: { include_usage: true } })
      .finalChatCompletion();
    return {
      texts: answer.choices.map((choice) => choice.message.content),
      completionTokens: answer.usage.completion_tokens,
    };
  },

  async parse() {
    const format = zodResponseFormat(Fruit, "fruit");
    const answer = await client.chat.completions.parse({ ...greedy, response_format: format });
    return answer.choices[0].message.parsed;
  },

  async tool() {
    const ask = { ...greedy, tools: [weatherTool], tool_choice: "required" };
    const whole = (await client.chat.completions.create(ask)).choices[0];
    const streamed = (await client.chat.completions.stream(ask).finalChatCompletion()).choices[0];
    return [whole, streamed].map((choice) => {
      const [call, ...more] = choice.message.tool_calls;
      const { name, arguments: text } = call.function;
      return { name, arguments: JSON.parse(text), more, finish: choice.finish_reason };
    });
  },

  async completion() {
    const ask = { model: MODEL, prompt: PROMPT, temperature: 0, max_tokens: 12 };
    return (await client.completions.create(ask)).choices[0].text;
  },

  async response() {
    const ask = { model: MODEL, input: PROMPT, temperature: 0 };
    const whole = await client.responses.create(ask);
    const streamed = await client.responses.stream(ask).finalResponse();
    return [whole.output_text, streamed.output_text];
  },

  async models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    return ids;
  },

  async brokenStream() {
    let text = "";
    try {
      for await (const chunk of await client.chat.completions.create({ ...greedy, stream: true })) {
        text += chunk.choices[0].delta.content ?? "";
      }
    } catch (error) {
      return { text, error: error.message, isApiError: error instanceof OpenAI.APIError };
    }
    return { text };
  },
};

console.log(JSON.stringify(await scenarios[process.argv[2]]()));
