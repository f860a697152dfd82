"""What real clients send, recorded, and what they cannot do without in an answer; two of the clients themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from dialogues import make_dialogue
from served import Served, run, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Drift

RECORDED: Mapping[str, Any] = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "clients.json").read_text(encoding="utf-8")
)
REQUESTS = [(client, number) for client, requests in RECORDED.items() for number in range(len(requests))]
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return make_dialogue(tmp_path_factory.mktemp("hermes"), "hermes")


def check_chat(answer: Any) -> None:
    assert answer["id"] and answer["object"] == "chat.completion" and answer["created"] > 0 and "model" in answer
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"]))) != []
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in ("stop", "length", "tool_calls")
        for call in choice["message"].get("tool_calls", ()):
            assert call["id"] and call["type"] == "function" and isinstance(call["function"]["arguments"], str)
        assert choice["message"]["content"] is not None or choice["message"]["tool_calls"]


def check_chunks(events: Any, body: Any) -> None:
    assert events[-1] == ("", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    last = chunks.pop() if (body.get("stream_options") or {}).get("include_usage") else None
    assert last is None or (last["choices"] == [] and last["usage"]["completion_tokens"] > 0)
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks].count(None) == len(chunks) - 1
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            assert {"index", "id", "type", "function"} == set(call) and isinstance(call["function"]["arguments"], str)


def check_response(answer: Any) -> None:
    assert answer["object"] == "response" and answer["status"] == "completed" and answer["output"]
    for item in answer["output"]:
        assert item["id"] and item["type"] in ("message", "function_call", "reasoning")
    assert {"input_tokens", "output_tokens", "total_tokens"} <= set(answer["usage"])


def check_response_events(events: Any) -> None:
    kinds = [name for name, _ in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    check_response(response := events[-1][1]["response"])
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert done == response["output"]
    added = [data["item"]["id"] for name, data in events if name == "response.output_item.added"]
    assert added == [item["id"] for item in done]


def check_message(answer: Any) -> None:
    assert answer["id"] and answer["type"] == "message" and answer["role"] == "assistant" and answer["content"]
    assert answer["stop_reason"] in ("end_turn", "tool_use", "max_tokens", "stop_sequence")
    assert answer["usage"]["input_tokens"] > 0 and answer["usage"]["output_tokens"] > 0


def check_message_events(events: Any) -> None:
    kinds = [name for name, _ in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_block, indices = None, []
    for name, data in events:
        if name == "content_block_start":
            assert open_block is None
            open_block = data["index"]
            indices.append(open_block)
        elif name == "content_block_delta":
            assert data["index"] == open_block
        elif name == "content_block_stop":
            assert data["index"] == open_block
            open_block = None
    assert open_block is None and indices == list(range(len(indices))) != []


CHECKS: Mapping[tuple[str, bool], Callable[[Any, Any], None]] = {
    ("/v1/chat/completions", False): lambda answer, _: check_chat(answer),
    ("/v1/chat/completions", True): check_chunks,
    ("/v1/responses", False): lambda answer, _: check_response(answer),
    ("/v1/responses", True): lambda answer, _: check_response_events(answer),
    ("/v1/messages", False): lambda answer, _: check_message(answer),
    ("/v1/messages", True): lambda answer, _: check_message_events(answer),
}


@pytest.mark.parametrize("text", ["The answer is 5.", CALL])
@pytest.mark.parametrize(("client", "number"), REQUESTS)
def test_a_recorded_request_gets_all_that_its_client_needs(
    dialogue: ChatRenderer, client: str, number: int, text: str
) -> None:
    recorded = RECORDED[client][number]
    body = {**recorded["body"], "max_tokens": None, "max_completion_tokens": None, "max_output_tokens": None}

    async def scenario() -> None:
        async with served(dialogue, lambda _: text, max_tokens=65536) as service:
            key = service.session.key
            headers = {"x-api-key": key} if recorded["key"] == "x-api-key" else {}
            status, answer = await service.post(recorded["path"], body, "-" if headers else key, **headers)
            assert status == 200, answer
            if recorded["path"].endswith("count_tokens"):
                assert answer["input_tokens"] > 0
            elif recorded["path"] == "/v1/completions":
                assert answer["choices"][0]["text"] == text
            else:
                CHECKS[recorded["path"], bool(body.get("stream"))](answer, body)
            assert len(service.session.transcript.turns) == len(service.engine.requests)

    run(scenario())


def test_the_openai_client_works_and_its_turns_are_one_trajectory(dialogue: ChatRenderer) -> None:
    from openai import AsyncOpenAI

    async def scenario() -> None:
        async with served(dialogue, [CALL, "It is 4.", "今日 🙂"]) as service:
            client = AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.session.key)
            messages: list[Any] = [{"role": "user", "content": "2 + 2?"}]
            first = await client.chat.completions.create(
                model="any",
                messages=messages,
                tools=[ADD],
                logprobs=True,  # type: ignore[list-item]
            )
            message = first.choices[0].message
            assert message.tool_calls and json.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 2}
            assert first.choices[0].logprobs and len(first.choices[0].logprobs.content or ()) == len(CALL) + 1
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
            messages += [message.model_dump(), result]
            second = await client.chat.completions.create(model="any", messages=messages, tools=[ADD])
            assert second.choices[0].message.content == "It is 4."
            messages += [{"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "日?"}]
            stream = await client.chat.completions.create(model="any", messages=messages, tools=[ADD], stream=True)
            deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(deltas) == "今日 🙂" and len([d for d in deltas if d]) >= 3
            service.session.reward(1.0)
            (trajectory,) = service.session.trajectories(1.0)
            assert trajectory.num_generated == sum(len(text.encode()) + 1 for text in (CALL, "It is 4.", "今日 🙂"))
            assert set(service.session.transcript.drifts) == {Drift.START, Drift.CLEAN}
            assert (await client.models.list()).data[0].id == "tiny"
            await client.close()

    run(scenario())


def test_the_openai_client_streams_responses_and_continues_them(dialogue: ChatRenderer) -> None:
    from openai import AsyncOpenAI

    tool: Any = {"type": "function", "strict": True, **ADD["function"]}  # type: ignore[dict-item]

    async def scenario() -> None:
        async with served(dialogue, [f"<think>hm</think>{CALL}", "It is 4."]) as service:
            client = AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.session.key)
            items: list[Any] = [{"role": "user", "content": "2 + 2?"}]
            async with client.responses.stream(model="any", input=items, tools=[tool]) as stream:
                kinds = [event.type async for event in stream]
                response = await stream.get_final_response()
            assert "response.reasoning_text.delta" in kinds
            reasoning, said, call = response.output
            assert (reasoning.type, said.type, call.type) == ("reasoning", "message", "function_call")
            items += [item.model_dump(exclude_none=True) for item in (reasoning, said)]
            items += [
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
                {"type": "function_call_output", "call_id": call.call_id, "output": "4"},
            ]
            answer = await client.responses.create(model="any", input=items, tools=[tool])
            assert answer.output_text == "It is 4."
            assert service.session.transcript.drifts[Drift.CLEAN] == 1
            await client.close()

    run(scenario())


def test_the_anthropic_client_uses_tools_and_streams(dialogue: ChatRenderer) -> None:
    from anthropic import AsyncAnthropic

    tool: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]

    async def scenario() -> None:
        async with served(dialogue, [f"<think>hm</think>{CALL}", "It is 4."]) as service:
            client = AsyncAnthropic(base_url=service.url, api_key=service.session.key)
            messages: list[Any] = [{"role": "user", "content": "2 + 2?"}]
            async with client.messages.stream(model="m", max_tokens=400, messages=messages, tools=[tool]) as stream:
                first = await stream.get_final_message()
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
            assert (first.content[-1].input, first.stop_reason) == ({"a": 2, "b": 2}, "tool_use")
            blocks = [block.model_dump(exclude_none=True) for block in first.content]
            told = [{"type": "text", "text": "4"}]
            result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": told}
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
            second = await client.messages.create(model="m", max_tokens=400, messages=messages, tools=[tool])
            assert (second.content[0].text, second.stop_reason) == ("It is 4.", "end_turn")
            assert service.session.transcript.drifts[Drift.CLEAN] == 1
            count = await client.messages.count_tokens(model="m", messages=messages, tools=[tool])
            assert count.input_tokens == len(service.session.transcript.turns[1].place.context)
            await client.close()

    run(scenario())


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_clients_understand_refusals(dialogue: ChatRenderer, client: str) -> None:
    import anthropic
    import openai

    kind: Any = {"openai": openai, "anthropic": anthropic}[client]

    async def ask(service: Served, key: str, length: int) -> None:
        messages: Any = [{"role": "user", "content": "x" * length}]
        if client == "openai":
            await openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=key).chat.completions.create(
                model="m", messages=messages
            )
        else:
            await anthropic.AsyncAnthropic(base_url=service.url, api_key=key).messages.create(
                model="m", messages=messages, max_tokens=5
            )

    async def scenario() -> None:
        async with served(dialogue, ["never"]) as service:
            with pytest.raises(kind.AuthenticationError):
                await ask(service, "sk-wrong", 1)
            with pytest.raises(kind.BadRequestError, match="context holds 4096"):
                await ask(service, service.session.key, 5000)
            assert service.engine.requests == []

    run(scenario())
