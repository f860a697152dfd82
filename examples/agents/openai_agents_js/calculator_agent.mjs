// OpenAI's agents SDK for JavaScript: a command, which reads the prompt and tells its reward by HTTP.
//
//     npm install @openai/agents zod
//     areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml agent.python= \
//         'agent.command=[node, examples/agents/openai_agents_js/calculator_agent.mjs]'

import { readFileSync } from "node:fs";
import { Agent, OpenAIProvider, Runner, tool } from "@openai/agents";
import { z } from "zod";

const { api = "responses", stream = false } = JSON.parse(process.argv[2] ?? "{}");
const { messages, answer } = JSON.parse(readFileSync(0, "utf8"));

const calculator = tool({
  name: "calculator",
  description: "Work out one operation on two whole numbers, such as 12*34.",
  parameters: z.object({ expression: z.string() }),
  execute: async ({ expression }) => {
    const [, left, sign, right] = expression.match(/^\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*$/) ?? [];
    const results = { "+": Number(left) + Number(right), "-": left - right, "*": left * right };
    return sign ? String(results[sign]) : "error: write two whole numbers with +, - or * between them";
  },
});

// OPENAI_BASE_URL and OPENAI_API_KEY are in the environment.
const runner = new Runner({
  modelProvider: new OpenAIProvider({ useResponses: api === "responses" }),
  tracingDisabled: true,
});
const agent = new Agent({ name: "clerk", model: "policy", tools: [calculator] });
const result = await runner.run(agent, messages.at(-1).content, { maxTurns: 4, stream });
if (stream) await result.completed;

const numbers = String(result.finalOutput).match(/-?\d+/g) ?? [];
const told = await fetch(`${process.env.AREAL_SERVICE_URL}/rl/set_reward`, {
  method: "POST",
  headers: { authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "content-type": "application/json" },
  body: JSON.stringify({ reward: numbers.at(-1) === answer ? 1 : 0 }),
});
if (!told.ok) throw new Error(await told.text());
