// OpenClaw with its shell: a command, which reads the prompt and tells its reward by HTTP. Its prompts are long: give it
// a real model, and a container, since it runs commands. It needs Node.js 24.16 or newer, which the second package has.
//
//     npm install openclaw@latest node@24
//     PATH=$PWD/node_modules/.bin:$PATH areal-hpc run YOUR_CONFIG.yaml agent.python= \
//         'agent.command=[node, examples/agents/openclaw/calculator_agent.mjs]'

import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { api = "openai-completions" } = JSON.parse(process.argv[2] ?? "{}");
const { messages, answer } = JSON.parse(readFileSync(0, "utf8"));
const { OPENAI_BASE_URL, ANTHROPIC_BASE_URL, OPENAI_API_KEY, AREAL_SERVICE_URL } = process.env;

const policy = { id: "policy", name: "policy", reasoning: false, input: ["text"], contextWindow: 131072, maxTokens: 4096 };
const baseUrl = api === "anthropic-messages" ? ANTHROPIC_BASE_URL : OPENAI_BASE_URL;
const config = {
  models: { mode: "replace", providers: { areal: { baseUrl, apiKey: OPENAI_API_KEY, api, models: [policy] } } },
  agents: { defaults: { model: { primary: "areal/policy" } } },
};

const home = mkdtempSync(join(tmpdir(), "openclaw-"));
try {
  writeFileSync(join(home, "openclaw.json"), JSON.stringify(config), { mode: 0o600 });
  const words = ["agent", "exec", messages.at(-1).content, "--config", join(home, "openclaw.json"), "--cwd", home, "--json"];
  const done = spawnSync("openclaw", words, { encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] });
  if (done.status !== 0) throw new Error(`openclaw ended with ${done.status ?? done.error}: ${done.stdout}`);

  const numbers = JSON.parse(done.stdout).final.match(/-?\d+/g) ?? [];
  const told = await fetch(`${AREAL_SERVICE_URL}/rl/set_reward`, {
    method: "POST",
    headers: { authorization: `Bearer ${OPENAI_API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ reward: numbers.at(-1) === answer ? 1 : 0 }),
  });
  if (!told.ok) throw new Error(await told.text());
} finally {
  rmSync(home, { recursive: true, force: true });
}
