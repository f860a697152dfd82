"""The anthropic package and a loop of one's own; its base URL is without ``/v1``.

pip install anthropic
PYTHONPATH=examples/agents/anthropic areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic

from areal_hpc.tasks.calculator import called, reward

TOOL: Any = {
    "name": "calculator",
    "input_schema": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end."""

    def __init__(self, *, stream: bool = False) -> None:
        self._answer = streamed if stream else whole

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        messages: list[Any] = list(data["messages"])
        async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            for _ in range(4):
                answer = await self._answer(client, model="policy", max_tokens=256, messages=messages, tools=[TOOL])
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    return reward(
                        "".join(block.text for block in answer.content if block.type == "text"), data["answer"]
                    )
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": called(call.name, call.input)}
                    for call in calls
                ]
                messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
        return 0.0


async def whole(client: AsyncAnthropic, **request: Any) -> Any:
    return await client.messages.create(**request)


async def streamed(client: AsyncAnthropic, **request: Any) -> Any:
    async with client.messages.stream(**request) as stream:
        return await stream.get_final_message()
