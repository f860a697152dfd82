"""The openai package and a loop of one's own: ask, run what the model calls, ask again.

pip install openai
PYTHONPATH=examples/agents/openai areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from areal_hpc.tasks.calculator import called, reward

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "calculator", "strict": True, "parameters": PARAMETERS}}


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end."""

    def __init__(self, *, stream: bool = False) -> None:
        self._answer = streamed if stream else whole

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = list(data["messages"])
        for _ in range(4):
            answer = await self._answer(client, messages)
            messages.append(answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if not answer.tool_calls:
                return reward(answer.content or "", data["answer"])
            for call in answer.tool_calls:
                result = called(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


async def whole(client: AsyncOpenAI, messages: list[Any]) -> Any:
    completion = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    return completion.choices[0].message


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> Any:
    async with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
        return (await stream.get_final_completion()).choices[0].message
