"""Pydantic AI with a tool, over any of three APIs.

pip install "pydantic-ai-slim[openai,anthropic]"
PYTHONPATH=examples/agents/pydantic_ai areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from areal_hpc.tasks.calculator import calculate, reward

LIMITS = UsageLimits(request_limit=4)


def calculator(expression: str) -> str:
    """Work out one operation on two whole numbers, such as 12*34."""
    return calculate(expression)


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end; who calls a tool that there is none of has none."""

    def __init__(self, api: str = "chat", *, stream: bool = False) -> None:
        self._api, self._stream = api, stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        agent = Agent(self._model(base_url, api_key, http_client), tools=[calculator])
        question = data["messages"][-1]["content"]
        try:
            if self._stream:
                async with agent.run_stream(question, usage_limits=LIMITS) as streamed:
                    return reward(await streamed.get_output(), data["answer"])
            return reward((await agent.run(question, usage_limits=LIMITS)).output, data["answer"])
        except (UnexpectedModelBehavior, UsageLimitExceeded):
            return 0.0

    def _model(self, base_url: str, api_key: str, http_client: Any) -> Any:
        if self._api == "messages":
            provider = AnthropicProvider(base_url=base_url.removesuffix("/v1"), api_key=api_key)
            return AnthropicModel("policy", provider=provider)
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        model = OpenAIResponsesModel if self._api == "responses" else OpenAIChatModel
        return model("policy", provider=OpenAIProvider(openai_client=client))
