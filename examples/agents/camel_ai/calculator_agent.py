"""CAMEL's chat agent with a tool.

pip install camel-ai "mcp<2"
PYTHONPATH=examples/agents/camel_ai areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter

from areal_hpc.tasks.calculator import calculate, reward


def calculator(expression: str) -> str:
    """Work out one operation on two whole numbers.

    Args:
        expression (str): such as 12*34
    """
    return calculate(expression)


class Letters(BaseTokenCounter):
    """Counts letters, where the usual counter would fetch a vocabulary from the internet, which nodes may not reach."""

    def count_tokens_from_messages(self, messages: Sequence[Any]) -> int:
        return len(str(messages))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end."""

    def __init__(self, *, stream: bool = False) -> None:
        self._stream = stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        model = ModelFactory.create(
            model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
            model_type="policy",
            url=base_url,
            api_key=api_key,
            model_config_dict={"stream": self._stream},
            token_counter=Letters(),
        )
        agent = ChatAgent(model=model, tools=[FunctionTool(calculator)], max_iteration=4)
        response = await agent.astep(data["messages"][-1]["content"])
        parts = [part async for part in response] if self._stream else [response]
        return reward("".join(part.msgs[0].content for part in parts), data["answer"])
