"""The service over HTTP: streams, refusals, sessions, rewards; and the reports of what such services did wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialogues import FAMILIES, HEADER, HERMES, make_dialogue, said
from served import ADMIN, Served, run, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Drift
from areal_hpc.errors import GenerationError
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.types import Completion, GenerationRequest

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
STREAMS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 99},
}


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatRenderer]:
    return {family: make_dialogue(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def hermes(dialogues: dict[str, ChatRenderer]) -> ChatRenderer:
    return dialogues["hermes"]


class Gated:
    """An engine that gives one token for each ``next``; ``fail`` instead of a token breaks it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids, self._steps = token_ids, asyncio.Queue[bool]()
        self.cancelled = False

    def next(self, *, fail: bool = False) -> None:
        self._steps.put_nowait(fail)

    async def generate(self, request: GenerationRequest) -> Completion:
        assert request.on_tokens is not None
        try:
            for token in self._token_ids:
                if await self._steps.get():
                    raise GenerationError("the engine is gone")
                request.on_tokens([token])
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return await ScriptedGenerator([self._token_ids]).generate(replace(request, on_tokens=None))

    async def close(self) -> None: ...


def text_of(path: str, data: Any) -> str:
    """The text that one event adds."""
    if path == "/v1/messages":
        return str(data.get("delta", {}).get("text", "")) if data["type"] == "content_block_delta" else ""
    if path == "/v1/responses":
        return str(data["delta"]) if data["type"] == "response.output_text.delta" else ""
    choice = data["choices"][0] if data.get("choices") else {}
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


async def read_events(answer: Any, path: str, wanted: int) -> list[str]:
    """Texts of events until ``wanted`` have come."""
    texts: list[str] = []
    while len(texts) < wanted:
        line = (await answer.content.readline()).decode().strip()
        if line.startswith("data: ") and (text := text_of(path, json.loads(line[6:]))):
            texts.append(text)
    return texts


@pytest.mark.parametrize("path", STREAMS)
def test_H2_tokens_are_sent_as_they_come_and_a_turn_is_kept_before_its_end_is_told(
    hermes: ChatRenderer, path: str
) -> None:
    """A client may hang up on the terminal event."""

    async def scenario() -> None:
        engine = Gated(said(hermes, "abc"))
        async with served(hermes, [], generator=engine) as service:
            headers = {"Authorization": f"Bearer {service.session.key}"}
            engine.next()
            async with service.http.post(
                service.url + path, json=STREAMS[path] | {"stream": True}, headers=headers
            ) as answer:
                assert await read_events(answer, path, 1) == ["a"]
                engine.next()
                assert await read_events(answer, path, 1) == ["b"]
                assert service.session.transcript.turns == []
                engine.next()
                engine.next()
                assert await read_events(answer, path, 1) == ["c"]
                terminal = {"/v1/responses": b"response.completed", "/v1/messages": b"message_stop"}
                while terminal.get(path, b'"finish_reason": "stop"') not in (await answer.content.readline()):
                    pass
                assert len(service.session.transcript.turns) == 1

    run(scenario())


@pytest.mark.parametrize("path", STREAMS)
def test_H3_an_answer_that_breaks_off_does_not_look_like_an_end_and_is_not_trained(
    hermes: ChatRenderer, path: str
) -> None:
    async def scenario() -> None:
        engine = Gated(said(hermes, "abc"))
        engine.next()
        async with served(hermes, [], generator=engine) as service:
            body, headers = STREAMS[path] | {"stream": True}, {"Authorization": f"Bearer {service.session.key}"}
            async with service.http.post(service.url + path, json=body, headers=headers) as answer:
                assert await read_events(answer, path, 1) == ["a"]
                engine.next(fail=True)
                text = await answer.text()
            assert answer.status == 200 and "the engine is gone" in text
            for end in ("[DONE]", "response.completed", "message_stop", '"finish_reason": "stop"'):
                assert end not in text
            assert "broke off" in service.session.broken and service.session.transcript.turns == []
            exported = await service.post("/rl/export", {"session_id": service.session.id}, ADMIN)
            assert exported[1]["trajectories"] == []

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_at_once_is_a_status_that_clients_try_again(hermes: ChatRenderer, stream: bool) -> None:
    async def scenario() -> None:
        engine = Gated(said(hermes, "abc"))

        async def fails(_: GenerationRequest) -> Completion:
            raise GenerationError("the engine is gone")

        engine.generate = fails  # type: ignore[method-assign]
        async with served(hermes, [], generator=engine) as service:
            status, answer = await service.post("/v1/messages", STREAMS["/v1/messages"] | {"stream": stream})
            assert (status, answer["error"]["type"]) == (503, "overloaded_error")
            assert service.session.broken == ""

    run(scenario())


@pytest.mark.parametrize("num_told", [0, 1])
def test_a_silent_stream_is_kept_alive(hermes: ChatRenderer, num_told: int) -> None:
    async def scenario() -> None:
        engine = Gated(said(hermes, "a"))
        for _ in range(num_told):
            engine.next()
        async with served(hermes, [], generator=engine, keep_alive_s=0.01) as service:
            headers = {"Authorization": f"Bearer {service.session.key}"}
            body = {"messages": [USER], "stream": True}
            async with service.http.post(f"{service.url}/v1/chat/completions", json=body, headers=headers) as answer:
                while not (await answer.content.readline()).startswith(b": keep-alive"):
                    pass

    run(scenario())


def test_a_client_that_hangs_up_ends_its_request_at_the_engine(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        engine = Gated(said(hermes, "abc"))
        engine.next()
        async with served(hermes, [], generator=engine) as service:
            headers = {"Authorization": f"Bearer {service.session.key}"}
            body = {"messages": [USER], "stream": True}
            answer = await service.http.post(f"{service.url}/v1/chat/completions", json=body, headers=headers)
            await read_events(answer, "/v1/chat/completions", 1)
            answer.close()
            while not engine.cancelled:
                await asyncio.sleep(0.001)
            assert service.session.transcript.turns == [] and service.session.broken == ""

    run(scenario())


def test_H5_headers_are_the_servers_own_and_there_once(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, ["yes"]) as service:
            host, port = service.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"messages": [USER]}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
                f"x-api-key: {service.session.key}\r\nConnection: close\r\nX-Odd: 1\r\nTraceparent: 00-1\r\n\r\n"
            )
            writer.write(head.encode() + body)
            raw, _, payload = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            names = (
                *(
                    "tools",
                    "tool_choice",
                    "parallel_tool_calls",
                    "n",
                    "stop",
                    "max_tokens",
                    "max_completion_tokens",
                    "user",
                ),
                *(
                    "temperature",
                    "top_p",
                    "top_k",
                    "seed",
                    "stream",
                    "stream_options",
                    "logprobs",
                    "top_logprobs",
                    "metadata",
                ),
                *("response_format", "chat_template_kwargs", "instructions", "text", "max_output_tokens", "system"),
                "stop_sequences",
            )
            assert len(names) == len(set(names)) and b"x-odd" not in names
            assert f"content-length: {len(payload)}".encode() in raw.lower()

    run(scenario())


def test_H6_sessions_are_opened_without_asking_anybody(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, [], max_sessions=600) as service:
            answers = await asyncio.gather(*(service.post("/rl/start_session", {}, ADMIN) for _ in range(500)))
            assert len({answer["api_key"] for _, answer in answers}) == 500
            assert service.engine.requests == []

    run(scenario())


def test_H11_null_is_the_default_everywhere_and_unknown_fields_are_tolerated(hermes: ChatRenderer) -> None:
    names = [
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "n",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "response_format",
        "user",
        "metadata",
        "chat_template_kwargs",
        "instructions",
        "text",
        "max_output_tokens",
        "system",
        "stop_sequences",
        "top_k",
    ]

    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            for path, body in STREAMS.items():
                nulls = dict.fromkeys(name for name in names if name not in body)
                status, answer = await service.post(path, nulls | body | {"no_such_field": [1]})
                assert status == 200, answer

    run(scenario())


def test_H12_no_secret_is_a_default_and_admin_routes_need_theirs(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, [], admin_token="") as service:
            for key in ("", "-", "areal-admin-key", service.session.key):
                assert (await service.post("/rl/start_session", {}, key))[0] == 401
        async with served(hermes, []) as service:
            assert service.url.startswith("http://127.0.0.1:")
            assert (await service.post("/rl/start_session", {}, "wrong"))[0] == 401
            assert (await service.post("/rl/export", {"session_id": service.session.id}))[0] == 401
            assert (await service.post("/v1/chat/completions", {"messages": [USER]}, ADMIN))[0] == 401

    run(scenario())


def test_a_session_over_http_from_its_start_to_its_export(hermes: ChatRenderer) -> None:
    """H14: a session without a completion is exported as nothing, without a crash."""

    async def scenario() -> None:
        async with served(hermes, ["one", "two"]) as service:
            _, session = await service.post("/rl/start_session", {}, ADMIN)
            key = session["api_key"]
            _, first = await service.post("/v1/chat/completions", {"messages": [USER]}, key)
            history = [USER, {"role": "assistant", "content": "one"}, USER]
            await service.post("/v1/chat/completions", {"messages": history}, key)
            assert (await service.post("/rl/set_reward", {"reward": 0.5, "interaction_id": first["id"]}, key))[0] == 200
            assert (await service.post("/rl/set_reward", {"reward": 2}, key))[0] == 200
            assert (await service.post("/rl/set_reward", {"reward": 1, "interaction_id": "no"}, key))[0] == 404
            assert (await service.post("/rl/set_reward", {"reward": float("nan")}, key))[0] == 400
            assert (await service.post("/rl/set_reward", {}, key))[0] == 400
            assert (await service.post("/rl/end_session", {}, key))[1]["interaction_count"] == 2
            assert (await service.post("/v1/chat/completions", {"messages": [USER]}, key))[0] == 400
            assert (await service.post("/rl/set_reward", {"reward": 1}, key))[0] == 200  # late, and the last word
            _, told = await service.post("/rl/export", {"session_id": session["session_id"], "discount": 0.5}, ADMIN)
            assert told["drifts"] == {"start": 1, "clean": 1}
            (merged,) = told["trajectories"]  # the first turn is worth 0.5 + 0.5 * 1.0, the second 1.0
            assert merged["reward"] == 1.0
            assert sum(merged["loss_mask"]) == len("one") + len("two") + 2
            assert (await service.post("/rl/set_reward", {"reward": 1}, key))[0] == 401
            _, empty = await service.post("/rl/export", {"session_id": service.session.id}, ADMIN)
            assert (empty["trajectories"], empty["turns"]) == ([], [])

    run(scenario())


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


def test_idle_sessions_are_closed_and_their_number_is_bounded(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, [], idle_s=0.0) as service:
            assert (await service.post("/rl/start_session", {}, ADMIN))[0] == 200
            assert len(service.sessions) == 1
        async with (
            served(hermes, [], max_sessions=1) as service,
            service.http.post(
                f"{service.url}/rl/start_session", headers={"Authorization": f"Bearer {ADMIN}"}
            ) as answer,
        ):
            assert (answer.status, "retry-after" in answer.headers) == (429, True)

    run(scenario())


def test_a_session_has_a_limit_of_turns(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes", max_turns=3) as service:
            body = {"messages": [USER], "n": 2}
            assert (await service.post("/v1/chat/completions", body))[0] == 200
            status, answer = await service.post("/v1/chat/completions", body)
            assert (status, answer["error"]["code"]) == (400, "max_turns_exceeded")

    run(scenario())


@pytest.mark.parametrize("text", ["ď", "今日", "🙂", "a🙂b"])
@pytest.mark.parametrize("path", STREAMS)
def test_H15_characters_of_several_tokens_are_whole_in_every_chunk(hermes: ChatRenderer, path: str, text: str) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: text) as service:
            _, events = await service.post(path, STREAMS[path] | {"stream": True})
            texts = [text_of(path, data) for _, data in events if data != "[DONE]"]
            assert "".join(texts) == text and not any("\ufffd" in one for one in texts)

    run(scenario())


def test_bytes_that_are_no_text_are_replaced_and_the_tokens_kept(hermes: ChatRenderer) -> None:
    broken = [*hermes.encode("🙂")[:2], hermes.eos_token_ids[0]]

    async def scenario() -> None:
        async with served(hermes, lambda _: broken) as service:
            _, events = await service.post("/v1/completions", {"prompt": "hi", "stream": True})
            assert "".join(text_of("/v1/completions", d) for _, d in events if d != "[DONE]") == hermes.spelled(
                broken[:2]
            )
            assert service.session.transcript.turns[0].completion.token_ids.tolist() == broken

    run(scenario())


def test_stop_strings_end_the_text_and_are_never_half_shown(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "one Observation: two") as service:
            choice = await service.chat("hi", stop=["Observation:", "###"])
            assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
            assert service.engine.requests[0].sampling.stop == ("Observation:", "###")
            body = {"messages": [USER], "stop": "Observation:", "stream": True}
            _, events = await service.post("/v1/chat/completions", body)
            assert "".join(text_of("/v1/chat", data) for _, data in events[:-1]) == "one "
            body = STREAMS["/v1/messages"] | {"stop_sequences": ["Observation:"]}
            _, answer = await service.post("/v1/messages", body)
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "Observation:")

    run(scenario())


def test_the_runs_sampling_wins_and_the_smallest_budget_counts(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "x" * 100, max_new_tokens=50) as service:
            choice = await service.chat("hi", max_tokens=3, temperature=0.0, top_p=0.1, seed=9)
            assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "xxx")
            await service.chat("hi", max_completion_tokens=65536)
            first, second = (request.sampling for request in service.engine.requests)
            assert (first.temperature, first.top_p, first.max_new_tokens, second.max_new_tokens) == (0.7, 1.0, 3, 50)
            assert first.seed != second.seed

    run(scenario())


@pytest.mark.parametrize("path", STREAMS)
def test_I5_what_is_too_long_is_refused_and_never_cut_on_either_side(hermes: ChatRenderer, path: str) -> None:
    async def scenario() -> None:
        long = json.loads(json.dumps(STREAMS[path]).replace('"hi"', json.dumps("hi" * 2048)))
        async with served(hermes, lambda _: "yes") as service:
            status, answer = await service.post(path, long | {"stream": True})
            assert status == 400 and "context holds 4096" in answer["error"]["message"]
            assert service.engine.requests == [] and service.session.num_calls == 0

    run(scenario())


def test_H9_usage_has_every_field_that_strict_clients_look_for(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            answers = {path: (await service.post(path, body))[1]["usage"] for path, body in STREAMS.items()}
            assert answers["/v1/responses"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
            assert answers["/v1/responses"]["output_tokens_details"] == {"reasoning_tokens": 0}
            assert answers["/v1/chat/completions"]["completion_tokens"] == len("yes") + 1
            assert answers["/v1/messages"]["cache_read_input_tokens"] == 0

    run(scenario())


def test_several_choices_are_sampled_apart_and_kept_apart(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda request: f"answer {request.sampling.seed}") as service:
            _, answer = await service.post("/v1/chat/completions", {"messages": [USER], "n": 3})
            contents = [choice["message"]["content"] for choice in answer["choices"]]
            assert contents == ["answer 5", "answer 6", "answer 7"]
            history = [USER, {"role": "assistant", "content": "answer 6"}, USER]
            await service.post("/v1/chat/completions", {"messages": history})
            assert service.session.transcript.turns[3].place.parent == 1
            assert (await service.post("/v1/chat/completions", {"messages": [USER], "n": 0}))[0] == 400

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
            await service.chat("hi", response_format=FORMAT, tools=[ADD])  # the answer may be a call
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


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {}, "messages must be a list with at least one"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages must be of type list"),
        ("/v1/chat/completions", {"messages": ["hi"]}, r"messages\[0\] needs a role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url' is",
        ),
        ("/v1/chat/completions", {"messages": [USER], "tools": [{"type": "web"}]}, r"tools\[0\] is no function"),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 0}, "must be at least 1"),
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": True}, "max_completion_tokens|max_tokens must be"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"messages\[0\] cannot"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": 1}},
            "dict",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "cannot be rendered"),
        ("/v1/completions", {"prompt": "\ud800"}, "cannot be rendered"),
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": {"tokenize": False}}, "'tokenize'"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, "'computer_call' are not supported"),
        ("/v1/responses", {"input": "hi", "previous_response_id": "x"}, "send the whole conversation"),
        ("/v1/messages", {"messages": []}, "at least one message"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt must be one text"),
    ],
)
def test_what_a_client_can_mend_is_a_400_that_names_it(
    hermes: ChatRenderer, path: str, body: Any, message: str
) -> None:
    async def scenario() -> None:
        async with served(hermes, []) as service:
            status, answer = await service.post(path, body)
            assert status == 400
            with pytest.raises(ValueError, match=message):
                raise ValueError(answer["error"]["message"])

    run(scenario())


def test_a_body_that_is_no_json_object_is_refused(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, []) as service:
            for data in (b"{", b"[]", b"[" * 100_000, b"\xff"):
                headers = {"x-api-key": service.session.key}
                async with service.http.post(f"{service.url}/v1/messages", data=data, headers=headers) as answer:
                    assert (answer.status, (await answer.json())["type"]) == (400, "error")

    run(scenario())


def test_streams_of_many_sessions_at_once_do_not_mix(hermes: ChatRenderer) -> None:
    async def ask(service: Served, number: int) -> None:
        _, session = await service.post("/rl/start_session", {}, ADMIN)
        messages = [{"role": "user", "content": f"number {number};"}]
        body = {"messages": messages, "stream": True}
        _, events = await service.post("/v1/chat/completions", body, session["api_key"])
        assert "".join(text_of("/v1/chat", data) for _, data in events[:-1]) == f"you said {number}"

    async def scenario() -> None:
        def echo(request: GenerationRequest) -> str:
            return "you said " + hermes.spelled(request.token_ids).split("number ")[1].split(";")[0]

        async with served(hermes, echo, max_sessions=200) as service:
            await asyncio.gather(*(ask(service, number) for number in range(100)))
            assert len(service.engine.requests) == 100

    run(scenario())


def test_drift_is_told_for_a_conversation_over_the_messages_api(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, ["one", "two"]) as service:
            body = {"max_tokens": 9, "system": "s", "messages": [USER]}
            await service.post("/v1/messages", body)
            blocks = [{"type": "text", "text": "one"}]
            body["messages"] = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": blocks}]
            await service.post("/v1/messages", body)
            assert service.session.transcript.drifts == {Drift.START: 1, Drift.CLEAN: 1}

    run(scenario())
