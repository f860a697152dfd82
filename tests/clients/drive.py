"""Runs an example's agent on the prompt on standard input, in an environment that holds its client and little else.

python tests/clients/drive.py examples/agents/openai '{"stream": true}'

Where to ask is in the environment; the reward goes back by HTTP. Both are what ``agent.command`` offers to any program.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import urllib.request


def main() -> None:
    sys.path[0] = sys.argv[1]
    agent = importlib.import_module("calculator_agent").CalculatorAgent(**json.loads(sys.argv[2]))
    key = os.environ["OPENAI_API_KEY"]
    outcome = agent.run(json.load(sys.stdin), base_url=os.environ["OPENAI_BASE_URL"], api_key=key)
    reward = asyncio.run(outcome) if inspect.iscoroutine(outcome) else outcome
    told = urllib.request.Request(
        f"{os.environ['AREAL_SERVICE_URL']}/rl/set_reward",
        json.dumps({"reward": reward}).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    urllib.request.urlopen(told, timeout=30.0).close()


if __name__ == "__main__":
    main()
