"""Whatever comes over HTTP is answered or refused in the API's shape: no error of ours, wherever it stands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from anything import ANYTHING, DEEP, NUMBERS, nested, places, spoilt, written
from hypothesis import given, settings
from hypothesis import strategies as st
from online_world import STANDING
from served import ADD, ADMIN, STREAMS, USER, Served, run, served

from areal_hpc.config.schema import AgentConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.proxy.online import Online

TEXT = {"type": "text", "text": "hi"}
RICH: Mapping[str, Any] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": [TEXT]},
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ],
        "tools": [ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {}}},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False},
        **{"stop": ["x"], "n": 1, "seed": 1, "logprobs": True, "top_logprobs": 2, "max_tokens": 5, "temperature": 0.5},
    },
    "/v1/completions": {"prompt": ["hi"], "logprobs": 1, "stop": "x", "max_tokens": 5, "echo": False, "n": 1},
    "/v1/responses": {
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]},
        ],
        "tools": [{"type": "function", "strict": True, **ADD["function"]}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        "include": ["message.output_text.logprobs"],
        **{"max_output_tokens": 5, "top_logprobs": 2, "temperature": 0.5, "metadata": {"a": "b"}},
    },
    "/v1/messages": {
        "system": [TEXT],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    TEXT,
                    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}, TEXT]},
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        **{"max_tokens": 5, "stop_sequences": ["x"], "temperature": 0.5},
    },
}
EXAMPLES = 60
"""Of each endpoint; 500 of each have found nothing more."""
ASKED = {**RICH, "/v1/messages/count_tokens": RICH["/v1/messages"]}
SESSIONS = {
    "/rl/start_session": {"api_key": "k"},
    "/rl/start_group": {"size": 2, "metadata": {"a": 1}},
    "/rl/set_reward": {"reward": 1.0, "interaction_id": "i", "session_id": "s"},
    "/rl/end_session": {},
    "/rl/export": {"session_id": "s", "discount": 0.5},
}


@dataclass(slots=True)
class Asking:
    """A service, with and without agents in daily use, on a loop that turns while it is asked."""

    loop: asyncio.AbstractEventLoop
    service: Served

    def ask(self, method: str, path: str, body: Any = None, key: str = ADMIN) -> tuple[int, Any]:
        return self.loop.run_until_complete(self._ask(method, path, body, key))

    async def _ask(self, method: str, path: str, body: Any, key: str) -> tuple[int, Any]:
        data, headers = None if body is None else written(body), {"Authorization": f"Bearer {key}"}
        async with self.service.http.request(method, self.service.url + path, data=data, headers=headers) as answer:
            text = await answer.text()
            is_stream = answer.content_type == "text/event-stream"
            return answer.status, text if is_stream else json.loads(text)

    def new_key(self) -> str:
        status, answer = self.ask("POST", "/rl/start_session", {})
        assert status == 200, answer
        return str(answer["api_key"])


@pytest.fixture(scope="module", params=["of a run", "of agents in daily use"])
def asking(request: pytest.FixtureRequest, hermes: ChatRenderer) -> Iterator[Asking]:
    def online(sessions: Any, open_session: Any) -> Online:
        settings: dict[str, Any] = {"standing_key": STANDING, "score": None, "note": lambda *_: None}
        return Online(sessions, open_session, AgentConfig(), **settings)

    more = {} if request.param == "of a run" else {"online": online}
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    opening = served(hermes, lambda _: "yes", max_sessions=10**6, max_turns=10**6, max_tokens=1 << 14, **more)
    yield Asking(loop, loop.run_until_complete(stack.enter_async_context(opening)))
    loop.run_until_complete(stack.aclose())
    loop.close()


def check(status: int, answer: Any, path: str) -> None:
    """An answer, or a refusal in the API's shape that says something."""
    assert status < 500, answer
    if status == 200:
        return
    assert answer["error"]["message"], answer
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error"


@pytest.mark.parametrize("path", RICH)
def test_what_bodies_are_rich_in_is_understood(hermes: ChatRenderer, path: str) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            status, answer = await service.post(path, RICH[path])
            assert status == 200, answer

    run(scenario())


@pytest.mark.parametrize("path", ASKED)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_field_of_a_request_may_hold_anything(asking: Asking, path: str, data: Any) -> None:
    body = dict(data.draw(st.sampled_from([ASKED[path], STREAMS[path.removesuffix("/count_tokens")]])))
    for _ in range(data.draw(st.integers(1, 3))):
        body = spoilt(body, data.draw(st.sampled_from(list(places(body)))), data.draw(ANYTHING))
    body |= data.draw(st.sampled_from([{}, {"stream": True}, {"n": 2}, {"previous_response_id": "resp_x-0"}]))
    status, answer = asking.ask("POST", path, body, asking.new_key())
    check(status, answer, path)
    if isinstance(answer, str):
        assert "server_error" not in answer and "api_error" not in answer
        assert answer.rstrip().endswith(("[DONE]", "}")), "a stream that breaks off"


@pytest.mark.parametrize("path", SESSIONS)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_field_of_what_is_said_of_sessions_may_hold_anything(asking: Asking, path: str, data: Any) -> None:
    status, session = asking.ask("POST", "/rl/start_session", {})
    assert status == 200
    body = {**SESSIONS[path], **({"session_id": session["session_id"]} if "session_id" in SESSIONS[path] else {})}
    for where in data.draw(st.lists(st.sampled_from([*body, "unknown"]), max_size=2)):
        body[where] = data.draw(ANYTHING | st.integers(0, 3))
    key = data.draw(st.sampled_from([ADMIN, session["api_key"], STANDING, "no key"]))
    check(*asking.ask("POST", path, body, key), path)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("depth", [600, 990])  # what JSON's reader takes, and nothing that calls itself does
def test_what_is_too_deep_is_refused_wherever_it_stands(asking: Asking, path: str, depth: int) -> None:
    key = asking.new_key()
    for where in places(ASKED[path]):
        for kind in DEEP:
            status, answer = asking.ask("POST", path, spoilt(ASKED[path], where, nested(kind, depth)), key)
            check(status, answer, path)
            assert status == 400 and ("levels" in answer["error"]["message"] or depth == 990), where


@pytest.mark.parametrize("depth", [100, 600, 960])
def test_arguments_of_a_call_may_be_as_deep_as_they_like(asking: Asking, depth: int) -> None:
    """They travel as a text, which a template is given as the object that it says, if it may be."""
    function = {"name": "add", "arguments": '{"a": ' * depth + "1" + "}" * depth}
    said = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    body = {"messages": [USER, said, {"role": "tool", "tool_call_id": "c", "content": "2"}], "tools": [ADD]}
    status, answer = asking.ask("POST", "/v1/chat/completions", body, asking.new_key())
    assert status == 200, answer


def query_of(**wanted: str | None) -> str:
    return "&".join(f"{name}={quote(value)}" for name, value in wanted.items() if value is not None)


@given(
    order=st.none() | st.sampled_from(["asc", "desc"]) | st.text(max_size=5),
    limit=st.none() | NUMBERS | st.text(max_size=5),
    after=st.none() | st.text(max_size=5),
    name=st.sampled_from(["", "x"]),
)
def test_whatever_is_asked_of_a_stored_answers_items(
    asking: Asking, order: str | None, limit: str | None, after: str | None, name: str
) -> None:
    key = asking.new_key()
    status, answer = asking.ask("POST", "/v1/responses", {"input": "hi"}, key)
    assert status == 200
    path = f"/v1/responses/{answer['id']}{name}"
    listing = f"{path}/input_items?{query_of(order=order, limit=limit, after=after)}"
    status, listed = asking.ask("GET", listing, None, key)
    check(status, listed, path)
    well_formed = order in (None, "asc", "desc") and after is None and not name
    sane = limit is None or (limit in {str(number) for number in range(1, 101)})
    assert (status == 200) is (well_formed and sane)
    query = query_of(stream=order, starting_after=limit)
    for method in ("GET", "DELETE", "GET"):
        check(*asking.ask(method, f"{path}?{query}", None, key), path)
