"""The agent service in this process, with a scripted engine behind it and sessions that a test opens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from dialogues import said

from areal_hpc.config.schema import ToolFormatName
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import GenerationError
from areal_hpc.generation.scripted import Scripted, ScriptedGenerator
from areal_hpc.proxy.app import Service, serve
from areal_hpc.proxy.online import Online
from areal_hpc.proxy.sessions import Limits, Session, Sessions
from areal_hpc.roles.wiring.agents import make_dialect
from areal_hpc.types import Completion, GenerationRequest, Sampling

ADMIN = "an-admin-token"
USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
STREAMS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 99},
}
Script = Sequence[str | Sequence[int]] | Callable[[GenerationRequest], Scripted]


@dataclass(slots=True, kw_only=True)
class Served:
    """A running service."""

    url: str
    sessions: Sessions
    engine: ScriptedGenerator
    session: Session
    http: aiohttp.ClientSession
    online: Online | None
    dialogue: ChatRenderer

    async def post(self, path: str, body: Any, key: str = "", **headers: str) -> tuple[int, Any]:
        """Status, and the JSON answer or the events of a stream as (name, data)."""
        bearer = {"Authorization": f"Bearer {key or self.session.key}"} if key != "-" else {}
        async with self.http.post(self.url + path, json=body, headers={**bearer, **headers}) as answer:
            if answer.content_type == "text/event-stream":
                return answer.status, events(await answer.text())
            return answer.status, await answer.json()

    async def chat(self, *contents: str, **more: Any) -> Any:
        """The first choice of an answer to user's messages."""
        messages = [{"role": "user", "content": content} for content in contents]
        status, answer = await self.post("/v1/chat/completions", {"model": "m", "messages": messages} | more)
        assert status == 200, answer
        return answer["choices"][0]


def events(text: str) -> list[tuple[str, Any]]:
    """Server-sent events; ``[DONE]`` as it is, comments under the name of a colon."""
    found = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            found.append((":", block))
            continue
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@asynccontextmanager
async def served(dialogue: ChatRenderer, script: Script, **options: Any) -> AsyncIterator[Served]:
    """``script``: what the engine says, texts end their turn; options of the session, the service and the engine."""

    def answers(request: GenerationRequest) -> Scripted:
        scripted = script(request) if callable(script) else next(remaining)
        return said(dialogue, scripted) if isinstance(scripted, str) else scripted

    remaining = iter(script if not callable(script) else ())
    engine = ScriptedGenerator(answers, decode=dialogue.spelled, token_s=options.pop("token_s", 0.0))
    sessions = Sessions(dialogue, idle_s=options.pop("idle_s", 60.0), max_sessions=options.pop("max_sessions", 100))

    def open_session(*, key: str = "") -> Session:
        return sessions.open(
            generator=options.get("generator", engine),
            sampling=Sampling(max_new_tokens=options.get("max_new_tokens", 512), temperature=0.7, seed=5),
            max_tokens=options.get("max_tokens", 4096),
            limits=options.get("limits", Limits(max_turns=options.get("max_turns", 50))),
            key=key,
        )

    online = options["online"](sessions, open_session) if "online" in options else None
    service = Service(
        sessions=sessions,
        dialect=make_dialect(dialogue, options.get("tool_format", ToolFormatName.AUTO)),
        model="tiny",
        open_session=open_session,
        admin_token=options.get("admin_token", ADMIN),
        keep_alive_s=options.get("keep_alive_s", 10.0),
        online=online,
        board=options.get("board"),
    )
    async with serve(service) as url, aiohttp.ClientSession() as http:
        yield Served(
            url=url,
            sessions=sessions,
            engine=engine,
            session=open_session(),
            http=http,
            online=online,
            dialogue=dialogue,
        )


def run(scenario: Awaitable[None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(scenario, 30)

    asyncio.run(limited())


class Gated:
    """An engine that gives one token for each ``next``; ``fail`` instead of a token breaks it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids, self._steps = token_ids, asyncio.Queue[bool]()
        self.cancelled = False

    def next(self, *, fail: bool = False) -> None:
        self._steps.put_nowait(fail)

    async def generate(self, request: GenerationRequest) -> Completion:
        try:
            for token in self._token_ids:
                if await self._steps.get():
                    raise GenerationError("the engine is gone")
                if request.on_tokens is not None:
                    request.on_tokens([token])
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return await self.answer(request)

    async def answer(self, request: GenerationRequest) -> Completion:
        """What is answered once all tokens are told."""
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
