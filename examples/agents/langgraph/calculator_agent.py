"""LangChain's agent, which is a LangGraph graph, with a tool.

pip install langgraph langchain langchain-openai
PYTHONPATH=examples/agents/langgraph areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from areal_hpc.tasks.calculator import calculate, reward

LIMIT = {"recursion_limit": 8}


@tool
def calculator(expression: str) -> str:
    """Work out one operation on two whole numbers, such as 12*34."""
    return calculate(expression)


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end."""

    def __init__(self, api: str = "chat", *, stream: bool = False) -> None:
        self._how: dict[str, Any] = {"use_responses_api": api == "responses", "streaming": stream}

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        model = ChatOpenAI(
            model="policy", base_url=base_url, api_key=api_key, http_async_client=http_client, **self._how
        )
        agent = create_agent(model, [calculator])
        try:
            result = await agent.ainvoke({"messages": data["messages"]}, LIMIT)
        except GraphRecursionError:
            return 0.0
        return reward(result["messages"][-1].text, data["answer"])
