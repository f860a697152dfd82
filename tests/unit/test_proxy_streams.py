"""Answers that are streamed: as they come, kept alive, broken off, cut at whole characters."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from dialogues import said
from served import ADD, ADMIN, CALL, STREAMS, USER, Gated, Served, events, run, served, text_of

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Transcript
from areal_hpc.errors import GenerationError
from areal_hpc.generation.scripted import ScriptedGenerator
from areal_hpc.proxy.app import APIS
from areal_hpc.types import Completion, GenerationRequest


async def read_events(answer: Any, path: str, wanted: int) -> list[str]:
    """Texts of events until ``wanted`` have come."""
    texts: list[str] = []
    while len(texts) < wanted:
        line = (await answer.content.readline()).decode().strip()
        if line.startswith("data: ") and (text := text_of(path, json.loads(line[6:]))):
            texts.append(text)
    return texts


@asynccontextmanager
async def begun(hermes: ChatRenderer, path: str) -> AsyncIterator[tuple[Gated, Served, aiohttp.ClientResponse]]:
    """An answer of three tokens, of which the client has got the first."""
    engine = Gated(said(hermes, "abc"))
    engine.next()
    async with served(hermes, [], generator=engine) as service:
        body, headers = STREAMS[path] | {"stream": True}, {"Authorization": f"Bearer {service.session.key}"}
        async with service.http.post(service.url + path, json=body, headers=headers) as answer:
            assert await read_events(answer, path, 1) == ["a"]
            yield engine, service, answer


@pytest.mark.parametrize("path", STREAMS)
def test_H2_tokens_are_sent_as_they_come_and_a_turn_is_kept_before_its_end_is_told(
    hermes: ChatRenderer, path: str
) -> None:
    """A client may hang up on the terminal event."""

    async def scenario() -> None:
        async with begun(hermes, path) as (engine, service, answer):
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
        async with begun(hermes, path) as (engine, service, answer):
            engine.next(fail=True)
            text = await answer.text()
            assert answer.status == 200 and "the engine is gone" in text
            for end in ("[DONE]", "response.completed", "message_stop", '"finish_reason": "stop"'):
                assert end not in text
            assert "broke off" in service.session.broken and service.session.transcript.turns == []
            exported = await service.post("/rl/export", {"session_id": service.session.id}, ADMIN)
            assert exported[1]["trajectories"] == []

    run(scenario())


def spoil(monkeypatch: pytest.MonkeyPatch, engine: Gated, path: str, where: str) -> None:
    """Have an error that nobody foresaw come up at one place of a streamed answer, once its first token is out."""

    def raises(*_: Any) -> Any:
        raise asyncio.CancelledError if where == "a wait of ours" else ZeroDivisionError("nobody foresaw this")

    if where == "the transcript":
        monkeypatch.setattr(Transcript, "commit", raises)
    elif where == "the end":
        monkeypatch.setattr(APIS[path].stream, "end", raises)
    elif where == "a delta":
        monkeypatch.setattr(APIS[path].stream, "delta", raises)
    else:
        monkeypatch.setattr(engine, "answer", raises)


@pytest.mark.parametrize("where", ["the engine's client", "a wait of ours", "a delta", "the transcript", "the end"])
@pytest.mark.parametrize("path", STREAMS)
def test_an_error_of_our_own_ends_a_stream_as_an_error_and_its_session_is_not_trained(
    hermes: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    where: str,
) -> None:
    """Also after the turn was committed: the client has not got what it would be rewarded for."""

    async def scenario() -> None:
        async with begun(hermes, path) as (engine, service, answer):
            spoil(monkeypatch, engine, path, where)
            for _ in said(hermes, "abc")[1:]:
                engine.next()
            rest = events((await answer.text()).lstrip())  # which raises if the connection breaks off
            name, last = rest[-1]
            if path == "/v1/responses":
                assert (name, last["response"]["error"]["code"]) == ("response.failed", "server_error")
            else:
                kind = "api_error" if path == "/v1/messages" else "server_error"
                assert last["error"]["type"] == kind and "start another session" in last["error"]["message"]
            assert not [data for _, data in rest if data == "[DONE]"]
            assert "broke off" in service.session.broken and service.session.num_open == 0
            assert service.session.id in caplog.text
            assert ("was cancelled" if where == "a wait of ours" else "nobody foresaw this") in caplog.text
            service.session.reward(1.0)
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


def test_a_client_that_takes_nothing_of_its_stream_is_in_time_one_that_went_away(
    hermes: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stays up and is not read: a few KiB of an answer of 64 fit into what the kernel holds for it."""
    monkeypatch.setattr("areal_hpc.proxy.access.UNREAD_S", 0.3)

    class Endless(ScriptedGenerator):
        begun, ended = asyncio.Event(), asyncio.Event()  # of its first answer

        async def generate(self, request: GenerationRequest) -> Completion:
            if self.begun.is_set():
                return await super().generate(request)
            self.begun.set()
            assert request.on_tokens is not None
            request.on_tokens(hermes.encode("x" * 64 * 1024))
            try:
                return await asyncio.Future()
            finally:
                self.ended.set()

    async def scenario() -> None:
        engine = Endless([said(hermes, "yes")], decode=hermes.spelled)
        async with served(hermes, [], generator=engine) as service:
            with closing(unread(service, {"messages": [USER], "stream": True})) as client:
                await engine.begun.wait()
                assert service.session.num_open == 1
                await engine.ended.wait()
                with pytest.raises(ConnectionError):
                    while client.recv(1 << 16):
                        pass
            session = service.session
            assert (session.num_open, session.broken, session.transcript.turns) == (0, "", [])
            assert (await service.chat("hi"))["message"]["content"] == "yes"

    run(scenario())


def unread(service: Served, body: Any) -> socket.socket:
    """A client that has asked and does not read."""
    address = urlsplit(service.url)
    client = socket.socket()
    client.settimeout(10.0)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.hostname, address.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(data)}\r\n"
    client.sendall(f"{head}x-api-key: {service.session.key}\r\n\r\n".encode() + data)
    return client


@pytest.mark.parametrize("text", ["ď", "今日", "🙂", "a🙂b"])
@pytest.mark.parametrize("path", STREAMS)
def test_H15_characters_of_several_tokens_are_whole_in_every_chunk(hermes: ChatRenderer, path: str, text: str) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: text) as service:
            _, events = await service.post(path, STREAMS[path] | {"stream": True})
            texts = [text_of(path, data) for _, data in events if data != "[DONE]"]
            assert "".join(texts) == text and not any("\ufffd" in one for one in texts)

    run(scenario())


@pytest.mark.parametrize("path", STREAMS)
def test_a_character_that_the_budget_cuts_takes_nothing_back_where_tokens_are_bytes(
    dialogues: dict[str, ChatRenderer], path: str
) -> None:
    """Decoded at once, a run of byte tokens with half a character at its end is no text from its beginning on."""
    dialogue = dialogues["sentencepiece"]
    sampled = dialogue.encode("🙂🙂")[1:7]  # behind the space that begins a text: four bytes, and two of four

    async def scenario() -> None:
        async with served(dialogue, lambda _: sampled, max_new_tokens=6) as service:
            _, events = await service.post(path, STREAMS[path] | {"stream": True})
            texts = [text_of(path, data) for _, data in events if data != "[DONE]"]
            assert "".join(texts) == "🙂\ufffd\ufffd"
            _, whole = await service.post(path, STREAMS[path])
            assert "🙂\ufffd\ufffd" in json.dumps(whole, ensure_ascii=False)
            turns = service.session.transcript.turns
            assert [turn.answer["content"] for turn in turns] == ["🙂\ufffd\ufffd"] * 2 and not service.session.broken
            assert [tuple(turn.completion.token_ids) for turn in turns] == [sampled] * 2

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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_usage_is_the_last_chunk_before_the_end_where_it_is_asked_for(
    hermes: ChatRenderer, path: str, wanted: bool | None
) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            body = STREAMS[path] | {"stream": True, "stream_options": {"include_usage": wanted}}
            _, events = await service.post(path, body)
            assert events.pop() == ("", "[DONE]")
            chunks = [data for _, data in events]
            if wanted:
                last = chunks.pop()
                assert (last["choices"], last["usage"]["completion_tokens"]) == ([], len("yes") + 1)
            assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)
            assert all(("usage" in chunk) == bool(wanted) for chunk in chunks)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    run(scenario())


def test_a_stream_that_shows_nothing_of_what_is_sampled_is_kept_alive_as_well(hermes: ChatRenderer) -> None:
    """Calls are told when they are whole, and their arguments may take minutes."""

    async def scenario() -> None:
        engine = Gated(said(hermes, CALL % 1))
        async with served(hermes, [], generator=engine, keep_alive_s=0.02) as service:
            headers = {"Authorization": f"Bearer {service.session.key}"}
            body = {"messages": [USER], "tools": [ADD], "stream": True}
            engine.next()
            async with service.http.post(f"{service.url}/v1/chat/completions", json=body, headers=headers) as answer:

                async def sampled() -> None:
                    for _ in said(hermes, CALL % 1)[2:]:
                        engine.next()
                        await asyncio.sleep(0.005)

                sampling = asyncio.create_task(sampled())
                while not (await answer.content.readline()).startswith(b": keep-alive"):
                    pass
                assert not sampling.done()
                await sampling
                engine.next()
                assert b'"finish_reason": "tool_calls"' in await answer.read()

    run(scenario())
