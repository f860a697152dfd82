"""HTTP to one engine: bounded calls, and errors that say whether the engine ever saw the request.

What may be repeated: a connection that was refused, since nothing was sent (``call`` does that by itself); and calls
whose second effect is none (``order``, and GET). A request that was sent and not answered is never sent again.

Connections are kept and used again, but only while they are younger than any engine's own limit on idle ones. Past that
a server may hang up just as a request is on its way, and nobody could tell whether it was read. No proxy from the
environment is used, and the token appears in no message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from areal_hpc.errors import GenerationError
from areal_hpc.json_bytes import from_json, to_json
from areal_hpc.waits import waiting

ATTEMPTS = 4
"""How often a call that may be repeated is made, with growing pauses in between."""

JSON = {"Content-Type": "application/json"}
LONGEST = 600
"""Characters of an answer that an error repeats: what to do stands at its end, behind paths and others' words."""
IDLE_S = 2.0
"""Longest time for which a connection lies idle and is still used; uvicorn, under SGLang and vLLM, closes after 5 s."""


class EngineLost(GenerationError):
    """The engine broke the connection or did not answer in time; whether it worked on the request is not known."""


class EngineRefused(EngineLost):
    """The engine took no connection, so it never saw the request: another engine may be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where an engine's server is, and which of the processes that have been that engine it is."""

    url: str
    token: str | Path = ""
    """What the server asks for, or the file that holds it. One of its own for each process keeps a client from
    taking another process, which got the port of one that died, for the engine."""
    incarnation: int = 0


class Connection:
    """Calls to the server at ``url``.

    Args:
        engine: its name.
        token: what the server asks for, or the file that holds it; empty for none.
        connect_s: longest time until a connection stands.
        idle_s: longest time for which one lies idle and is still used.
    """

    def __init__(self, engine: str, url: str, *, token: str | Path, connect_s: float, idle_s: float = IDLE_S) -> None:
        self.url = url.rstrip("/")
        self._engine = engine
        self._token = token
        self._connect_s, self._idle_s = connect_s, idle_s
        self._session: aiohttp.ClientSession | None = None

    def __str__(self) -> str:
        return f"engine {self._engine} at {self.url}"

    async def call(
        self, method: str, path: str, body: Any, limit_s: float, *, each: Callable[[Any], None] | None = None
    ) -> tuple[int, Any]:
        """One exchange: status, and the JSON answer (the text where it is none).

        Args:
            each: is given every event of an answer that comes as server-sent events; the last one is the answer.

        Raises:
            EngineRefused: no connection, however often it was tried; or the server there asks for another token.
            EngineLost: no answer in ``limit_s`` seconds, or half of one.
        """
        for attempt in range(ATTEMPTS):
            try:
                return await self._exchange(method, path, body, limit_s, each)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if attempt == ATTEMPTS - 1:
                    raise EngineRefused(f"{self} takes no connection: {error}") from error
                await asyncio.sleep(0.1 * 2**attempt)
            except TimeoutError as error:
                raise EngineLost(f"{self} did not answer {path} in {limit_s:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise EngineLost(f"{self} did not answer {path}: {type(error).__name__} {error}") from error
        raise AssertionError("the last attempt returns or raises")

    async def order(self, path: str, body: Any, limit_s: float, *, also: int = 200) -> Any:
        """POST until it is answered, ``ATTEMPTS`` times at most; for calls whose second effect is none.

        Args:
            also: another status that means success.

        Raises:
            GenerationError: refused, or lost each time.
        """
        for attempt in range(ATTEMPTS):
            last = attempt == ATTEMPTS - 1
            try:
                status, answer = await self.call("POST", path, body, limit_s)
            except EngineRefused:
                raise  # ``call`` has tried often enough
            except EngineLost:
                if last:
                    raise
            else:
                if status < 500 or last:
                    return answer if status == also != 200 else self.accepted(path, status, answer)
            await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def accepted(self, path: str, status: int, answer: Any) -> Any:
        """``answer``, if it is a success.

        Raises:
            GenerationError: it is a refusal.
        """
        if status != 200 or (isinstance(answer, dict) and not answer.get("success", True)):
            raise GenerationError(f"{self} refused {path}: status {status}, {excerpt(answer)}")
        return answer

    async def move(self, url: str, token: str | Path) -> None:
        """Talk to another address from now on. What is under way at the old one is lost."""
        self.url, self._token = url.rstrip("/"), token
        await self.close()

    async def close(self) -> None:
        """Close what is open; a later call opens it again, also one that is made while the old connections close."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _exchange(
        self, method: str, path: str, body: Any, limit_s: float, each: Callable[[Any], None] | None
    ) -> tuple[int, Any]:
        if self._session is None:
            self._session = self._open()
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=self._connect_s)
        request_id = body.get("rid", "") if isinstance(body, dict) else ""
        with waiting(f"an answer to {path}", self._engine, limit_s=limit_s, about=request_id):
            data, headers = (None, None) if body is None else (to_json(body), JSON)
            url = self.url + path
            async with self._session.request(method, url, data=data, headers=headers, timeout=timeout) as response:
                if response.status == 401:
                    raise EngineRefused(f"{self} does not know us (status 401): another process may have its port now")
                if each is not None and response.content_type == "text/event-stream":
                    return response.status, await _last_event(response, each)
                return response.status, _decoded(await response.read())

    def _open(self) -> aiohttp.ClientSession:
        token = self._token.read_text().strip() if isinstance(self._token, Path) else self._token
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )


async def _last_event(response: aiohttp.ClientResponse, each: Callable[[Any], None]) -> Any:
    """The last event before ``[DONE]``.

    Raises:
        ClientPayloadError: the stream ended without saying that it does.
    """
    last, pending = None, b""
    async for chunk in response.content.iter_any():  # lines may be longer than what aiohttp's readline takes
        *events, pending = (pending + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return last
            last = _decoded(data)
            each(last)
    raise aiohttp.ClientPayloadError("its stream broke off")


def _decoded(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError:
        return data.decode(errors="replace")


def excerpt(answer: Any) -> str:
    """An answer as an error message can carry it."""
    text = str(answer)
    return text if len(text) <= LONGEST else text[:LONGEST] + " ..."
