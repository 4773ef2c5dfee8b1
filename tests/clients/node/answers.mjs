// What the model is asked for when its answer must be known; see answers.py.
import { z } from "zod";

export const Fruit = z.object({
  name: z.literal("plum"),
  count: z.literal(3),
  size: z.enum(["small", "large"]),
});

export const Place = z.object({ city: z.enum(["Paris"]) });

export const weatherTool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
