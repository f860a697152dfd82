"""smolagents: an agent that calls tools, or one that writes Python. Its prompts are long: give it a real model.

pip install "smolagents[openai]"
PYTHONPATH=examples/agents/smolagents areal-hpc run YOUR_CONFIG.yaml agent.python=calculator_agent:CalculatorAgent
"""

from __future__ import annotations

from typing import Any

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

from areal_hpc.tasks.calculator import calculate, reward

KINDS = {"tools": ToolCallingAgent, "code": CodeAgent}


@tool
def calculator(expression: str) -> str:
    """Work out one operation on two whole numbers.

    Args:
        expression: such as 12*34
    """
    return calculate(expression)


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end. It is no coroutine: it runs in a thread of its own."""

    def __init__(self, kind: str = "tools", *, stream: bool = False) -> None:
        self._kind, self._stream = KINDS[kind], stream

    def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
        agent = self._kind(
            tools=[calculator], model=model, max_steps=4, stream_outputs=self._stream, verbosity_level=LogLevel.OFF
        )
        return reward(str(agent.run(data["messages"][-1]["content"])), data["answer"])
