"""An agent for whole runs in tests: two turns with the OpenAI client, one of them streamed."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


class TwoTurns:
    """The reward is 1 and a little more for more different letters."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = list(data["messages"])
        first = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
        text = first.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        stream = await client.chat.completions.create(model="m", messages=messages, max_tokens=12, stream=True)
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return 1.0 + len(set(text)) / 256
