"""LiteLLM as a library: one function for many APIs, here OpenAI's and Anthropic's.

pip install litellm
PYTHONPATH=examples/agents/litellm areal-hpc run configs/quickstart.yaml examples/agents/calculator.yaml
"""

from __future__ import annotations

from typing import Any

import litellm

from areal_hpc.tasks.calculator import called, reward

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL: Any = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end. Providers: openai, hosted_vllm, anthropic."""

    def __init__(self, provider: str = "openai", *, stream: bool = False) -> None:
        self._provider, self._stream = provider, stream

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        url = base_url.removesuffix("/v1") if self._provider == "anthropic" else base_url
        messages: list[Any] = list(data["messages"])
        for _ in range(4):
            answer = await self._answer(messages, api_base=url, api_key=api_key)
            messages.append(answer.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if not answer.tool_calls:
                return reward(answer.content or "", data["answer"])
            for call in answer.tool_calls:
                result = called(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0

    async def _answer(self, messages: list[Any], **where: Any) -> Any:
        asked = {"model": f"{self._provider}/policy", "messages": messages, "tools": [TOOL], **where}
        completion: Any = await litellm.acompletion(**asked, stream=self._stream)
        if self._stream:
            chunks = [chunk async for chunk in completion]
            completion = litellm.stream_chunk_builder(chunks, messages=messages)
        return completion.choices[0].message
