"""Tools and structured output: calls that are forced, strict, hidden; schemas of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from dialogues import FAMILIES, HEADER, HERMES, make_dialogue
from served import ADD, CALL, USER, run, served
from tiny_models import VOCAB_SIZE, make_tokenizer

from areal_hpc.dialogue.grammar import Grammars
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Drift
from areal_hpc.errors import RequestRefused
from areal_hpc.types import Completion, GenerationRequest


def test_arguments_and_schemas_of_odd_kinds_are_taken_as_they_are(hermes: ChatRenderer) -> None:
    odd = [
        {"type": "function", "function": {"name": "add", "parameters": kind}} for kind in (None, [], {"properties": 1})
    ]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
            status, answer = await service.post("/v1/chat/completions", {"messages": messages, "tools": odd})
            assert status == 200, answer
            assert '"arguments": {"a": 1}' in hermes.spelled(service.engine.requests[0].token_ids)

    run(scenario())


def test_a_forced_call_is_begun_for_the_model_and_what_it_adds_is_sampled(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        script = ['{"a": 7}}\n</tool_call>', '{"name": "add", "arguments": {}}\n</tool_call>']
        async with served(hermes, script) as service:
            choice = await service.chat(
                "hi", tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}}
            )
            (call,) = choice["message"]["tool_calls"]
            assert (call["function"], choice["finish_reason"]) == (
                {"name": "add", "arguments": '{"a": 7}'}, "tool_calls"
            )  # fmt: skip
            turn = service.session.transcript.turns[0]
            assert hermes.spelled(turn.place.context).endswith('<tool_call>\n{"name": "add", "arguments": ')
            assert turn.completion.token_ids.size == len('{"a": 7}}\n</tool_call>') + 1
            choice = await service.chat("hi", tools=[ADD], tool_choice="required")
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
            bad = {"messages": [USER], "tool_choice": "required"}
            assert (await service.post("/v1/chat/completions", bad))[0] == 400

    run(scenario())


def test_tool_choice_none_hides_the_tools_and_one_call_at_a_time_is_one(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: CALL % 1 + CALL % 2) as service:
            none = await service.chat("hi", tools=[ADD], tool_choice="none")
            assert "tool_calls" not in none["message"] and "<tool_call>" in none["message"]["content"]
            assert "add" not in hermes.spelled(service.engine.requests[0].token_ids)
            both = await service.chat("hi", tools=[ADD])
            assert [c["function"]["arguments"] for c in both["message"]["tool_calls"]] == ['{"a": 1}', '{"a": 2}']
            assert both["message"]["content"] is None
            one = await service.chat("hi", tools=[ADD], parallel_tool_calls=False)
            assert len(one["message"]["tool_calls"]) == 1

    run(scenario())


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def test_a_schema_is_told_to_the_model_and_forced_by_the_engine(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: '{"b": 1}') as service:
            assert (await service.chat("hi", response_format=FORMAT))["message"]["content"] == '{"b": 1}'
            text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
            await service.post("/v1/responses", {"input": "hi", "instructions": "Be brief.", "text": text})
            output = {"format": {"type": "json_schema", "schema": SCHEMA}}
            body = {"messages": [USER], "max_tokens": 9, "output_config": output}
            assert (await service.post("/v1/messages", body))[0] == 200
            for request in service.engine.requests:
                assert json.dumps(SCHEMA) in hermes.spelled(request.token_ids)
                assert request.sampling.json_schema == json.dumps(SCHEMA)
            await service.chat("hi", response_format={"type": "json_object"})
            assert service.engine.requests[-1].sampling.json_schema == '{"type": "object"}'
            await service.chat("hi", response_format={"type": "text"})
            assert service.engine.requests[-1].sampling.json_schema == ""
            await service.chat("hi", response_format=FORMAT, tools=[ADD], tool_choice="none")
            assert service.engine.requests[-1].sampling.json_schema == json.dumps(SCHEMA)

    run(scenario())


@pytest.mark.parametrize(("strict", "status"), [(True, 400), (False, 200)])
def test_a_schema_that_cannot_be_forced_is_refused_where_it_is_strict_and_else_asked_for(
    hermes: ChatRenderer, strict: bool, status: int
) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "{}") as service:
            format_ = {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}, "strict": strict}}
            body = {"messages": [USER], "response_format": format_}
            found, answer = await service.post("/v1/chat/completions", body)
            assert found == status
            if strict:
                assert answer["error"]["param"] == "response_format"
                assert "cannot be forced" in answer["error"]["message"] and service.engine.requests == []
            else:
                assert service.engine.requests[-1].sampling.json_schema == ""

    run(scenario())


def test_a_schema_begins_behind_the_reasoning_that_a_template_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of models that always think; the engine would be held to JSON inside of their thoughts."""
    opened = HERMES.removesuffix(HEADER) + HEADER.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setitem(FAMILIES, "opened", (opened, FAMILIES["hermes"][1]))
    dialogue = make_dialogue(tmp_path, "opened")

    async def scenario() -> None:
        async with served(dialogue, ['{"b": 1}', "Hm.\n</think>\n\nyes"]) as service:
            assert (await service.chat("hi", response_format=FORMAT))["message"]["content"] == '{"b": 1}'
            assert dialogue.spelled(service.engine.requests[0].token_ids).endswith("<think>\n</think>\n\n")
            free = (await service.chat("hi"))["message"]
            assert (free["reasoning_content"], free["content"]) == ("Hm.", "yes")

    run(scenario())


def test_G17_a_template_that_drops_calls_is_refused_for_tools_and_serves_the_rest(
    dialogues: dict[str, ChatRenderer],
) -> None:
    async def scenario() -> None:
        async with served(dialogues["forgetful"], lambda _: "yes") as service:
            status, answer = await service.post("/v1/chat/completions", {"messages": [USER], "tools": [ADD]})
            assert status == 400 and "leaves calls of tools out" in answer["error"]["message"]
            assert (await service.chat("hi"))["message"]["content"] == "yes"

    run(scenario())


STRICT: Mapping[str, Any] = {"type": "function", "function": {**ADD["function"], "strict": True}}
FREE = {"type": "function", "function": {"name": "note", "parameters": {"type": "object", "properties": {}}}}


def test_calls_of_strict_tools_are_forced_wherever_they_come(hermes: ChatRenderer) -> None:
    """A tool beside it that is not strict needs arguments that are an object, since its calls begin alike."""

    async def scenario() -> None:
        async with served(hermes, lambda _: CALL % 1) as service:

            async def tag(**more: Any) -> Any:
                await service.chat("hi", **more)
                told = service.engine.requests[-1].sampling.structural_tag
                return json.loads(told) if told else None

            def tags(at_least_one: bool, **schemas: Any) -> Any:
                calls = [
                    {
                        "type": "tag",
                        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
                        "content": {"type": "json_schema", "json_schema": schema},
                        "end": "}\n</tool_call>",
                    }
                    for name, schema in schemas.items()
                ]
                found = {"triggers": ["<tool_call>"], "tags": calls, "at_least_one": at_least_one}
                return {"type": "structural_tag", "format": {"type": "triggered_tags", **found}}

            add, note = ADD["function"]["parameters"], {"type": "object"}
            assert await tag(tools=[STRICT, FREE]) == tags(False, add=add, note=note)
            assert await tag(tools=[STRICT, FREE], tool_choice="required") == tags(True, add=add, note=note)
            named = {"type": "function", "function": {"name": "add"}}
            assert await tag(tools=[STRICT, FREE], tool_choice=named) == tags(True, add=add)
            assert hermes.spelled(service.engine.requests[-1].token_ids).endswith("assistant\n")  # nothing is begun
            assert await tag(tools=[ADD, FREE]) is None
            assert await tag(tools=[STRICT], tool_choice="none") is None
            body = {"input": "hi", "tools": [{"type": "function", **STRICT["function"]}]}
            await service.post("/v1/responses", body)
            tool = {"name": "add", "input_schema": ADD["function"]["parameters"], "strict": True}
            await service.post("/v1/messages", {"messages": [USER], "max_tokens": 99, "tools": [tool]})
            for request in service.engine.requests[-2:]:
                assert json.loads(request.sampling.structural_tag) == tags(False, add=add)

    run(scenario())


def test_a_strict_tool_that_cannot_be_forced_is_refused(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, []) as service:
            odd = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": {"type": "nonsense"}}}
            status, answer = await service.post("/v1/chat/completions", {"messages": [USER], "tools": [odd]})
            assert (status, answer["error"]["param"]) == (400, "tools")
            assert "tool odd is strict, and the schema cannot be forced" in answer["error"]["message"]

    run(scenario())


def test_calls_that_are_no_json_are_held_as_well(dialogues: dict[str, ChatRenderer]) -> None:
    async def scenario() -> None:
        call = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        async with served(dialogues["glm"], lambda _: call) as service:
            for choice in ("auto", "required"):
                made = (await service.chat("hi", tools=[STRICT], tool_choice=choice))["message"]["tool_calls"]
                assert made[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
                matcher = Grammars(make_tokenizer(), [0], VOCAB_SIZE).matcher(
                    structural_tag=service.engine.requests[-1].sampling.structural_tag
                )
                for token in make_tokenizer().encode(call):
                    assert matcher.allowed()[token]
                    matcher.take(token)
            text = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": {"oneOf": []}}}
            status, answer = await service.post("/v1/chat/completions", {"messages": [USER], "tools": [text]})
            assert (status, answer["error"]["param"]) == (400, "tools")

    run(scenario())


def test_what_is_only_asked_for_is_said_in_the_answer_and_once_in_the_log(
    dialogues: dict[str, ChatRenderer], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with served(dialogues["llama"], lambda _: "yes") as service:

            async def said(**more: Any) -> str:
                headers = {"Authorization": f"Bearer {service.session.key}"}
                url, body = f"{service.url}/v1/chat/completions", {"messages": [USER], **more}
                async with service.http.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200, await answer.text()
                    return answer.headers.get("X-Not-Enforced", "")

            for stream in (False, True, False):
                assert await said(tools=[STRICT], stream=stream) == "tools"  # any JSON begins as a call does
                assert service.engine.requests[-1].sampling.structural_tag == ""
            assert await said(tools=[STRICT], tool_choice="required") == ""
            tag = json.loads(service.engine.requests[-1].sampling.structural_tag)["format"]
            assert (tag["triggers"], tag["tags"][0]["end"]) == (['{"name": "'], "}")
            loose = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
            assert await said(tools=[ADD], response_format=loose) == "response_format"
            assert await said(response_format=loose) == ""
        warned = [record.getMessage() for record in caplog.records if "is not enforced" in record.getMessage()]
        assert len(warned) == 2 and "calls of this model begin as other answers do" in warned[0]

    run(scenario())


def test_a_strict_schema_beside_tools_leaves_json_of_it_or_calls_and_nothing_else(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, ['{"b": 1}', CALL % 1]) as service:
            assert (await service.chat("hi", response_format=FORMAT, tools=[ADD]))["message"]["content"] == '{"b": 1}'
            choice = await service.chat("hi", response_format=FORMAT, tools=[ADD])
            assert choice["finish_reason"] == "tool_calls"
            tag, tokenizer = service.engine.requests[-1].sampling.structural_tag, make_tokenizer()
            grammars = Grammars(tokenizer, [tokenizer.eos_token_id], VOCAB_SIZE)
            for text in ('{"b": 1}', (CALL % 1).strip(), (CALL % 1) + "\n" + (CALL % 2)):
                matcher = grammars.matcher(structural_tag=tag)
                for token in tokenizer.encode(text):
                    assert matcher.allowed()[token], text
                    matcher.take(token)
                assert matcher.allowed()[tokenizer.eos_token_id]
            begun = {
                tokenizer.decode([token])[:1] for token in grammars.matcher(structural_tag=tag).allowed().nonzero()[0]
            }
            assert begun == {"{", "<"}

    run(scenario())


def test_arguments_that_are_no_json_reach_the_client_and_what_it_says_of_them_the_model(hermes: ChatRenderer) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": one}}\n</tool_call>'

    async def scenario() -> None:
        async with served(hermes, [broken, "sorry"]) as service:
            message = (await service.chat("hi", tools=[ADD]))["message"]
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"a": one}'}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "that is no JSON"}
            body = {"messages": [USER, message, result], "tools": [ADD]}
            assert (await service.post("/v1/chat/completions", body))[0] == 200
            context = hermes.spelled(service.engine.requests[1].token_ids)
            assert broken in context and "that is no JSON" in context
            assert service.session.transcript.drifts == {Drift.START: 1, Drift.CLEAN: 1}

    run(scenario())


def test_an_engine_that_refuses_a_request_is_a_400_with_its_reason(hermes: ChatRenderer) -> None:
    def refuses(_: GenerationRequest) -> Completion:
        raise RequestRefused("generator-0 refuses the request: Failed to compile json grammar: no such type")

    async def scenario() -> None:
        async with served(hermes, refuses) as service:
            for stream in (False, True):
                body = {"messages": [USER], "response_format": FORMAT, "stream": stream}
                status, answer = await service.post("/v1/chat/completions", body)
                assert (status, answer["error"]["param"]) == (400, "response_format")
                assert answer["error"]["message"].endswith("Failed to compile json grammar: no such type")
                body = {"messages": [USER], "max_tokens": 9, "stream": stream}
                status, answer = await service.post("/v1/messages", body)
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert service.session.transcript.turns == [] and not service.session.broken

    run(scenario())
