"""OpenAI's agents SDK with a tool: its loop asks, runs what the model calls, and asks again until there is an answer.

pip install openai-agents
PYTHONPATH=examples/agents/openai_agents areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI

from areal_hpc.tasks.calculator import calculate, reward

APIS = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
RUN = RunConfig(tracing_disabled=True)


@function_tool
def calculator(expression: str) -> str:
    """Work out one operation on two whole numbers, such as 12*34."""
    return calculate(expression)


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end; who calls a tool that there is none of has none."""

    def __init__(self, api: str = "responses", *, stream: bool = False) -> None:
        self._model, self._run = APIS[api], self._streamed if stream else Runner.run

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        agent = Agent(name="clerk", model=self._model(model="policy", openai_client=client), tools=[calculator])
        try:
            result = await self._run(agent, data["messages"], max_turns=4, run_config=RUN)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return 0.0
        return reward(str(result.final_output), data["answer"])

    async def _streamed(self, *args: Any, **words: Any) -> Any:
        result = Runner.run_streamed(*args, **words)
        async for _ in result.stream_events():
            pass
        return result
