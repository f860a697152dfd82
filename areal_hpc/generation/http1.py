"""HTTP/1.1 to one server on connections that are kept: as much of it as an engine's client needs.

    lines = Lines(url, headers, connect_s=10.0, idle_s=2.0)
    async with lines.asked("POST", "/generate", body) as line:      a connection on which the answer's head has come
        line.status, line.content_type
        await line.whole()      or      part after part: await line.part()

An engine is a process of the same run, so there is no TLS, redirect, cookie, compression or proxy; a general client's
care for these takes nearly as long as all else that the service does for a short request. The parser is llhttp, node's.

A connection carries one exchange at a time. It is used again only where its answer was read to the end and the server
keeps it open; an error or a cancellation in between closes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast
from urllib.parse import urlsplit

import httptools


class Unreachable(OSError):
    """No connection; nothing was sent."""


class BrokenOff(OSError):
    """The connection ended, or brought something else, before the answer was whole."""


class Line(asyncio.Protocol):
    """One connection, and the answer that is coming on it."""

    status: int
    content_type: str
    """Without its parameters, in lower case; empty where none was told."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._wake: asyncio.Future[None] | None = None
        self._fault = ""
        self._is_kept = False
        self.free_since = 0.0
        self._await_answer()
        self._is_whole = True  # nothing was asked yet

    def _await_answer(self) -> None:
        self.status, self.content_type = 0, ""
        self._parts: list[bytes] = []
        self._is_whole = False

    @property
    def is_free(self) -> bool:
        """Whether another request may be sent."""
        return self._is_whole and self._is_kept and not self._fault

    def send(self, request: bytes) -> None:
        self._await_answer()
        self._transport.write(request)

    async def head(self) -> None:
        """Wait for ``status`` and ``content_type``. Raises BrokenOff."""
        while not self.status:
            await self._news()

    async def part(self) -> bytes:
        """What has come of the body since the last time, waited for; nothing once it is whole. Raises BrokenOff."""
        while not self._parts and not self._is_whole:
            await self._news()
        part, self._parts = b"".join(self._parts), []
        return part

    async def whole(self) -> bytes:
        """The body. Raises BrokenOff where it does not come to its end."""
        while not self._is_whole:
            await self._news()
        return b"".join(self._parts)

    def hang_up(self) -> None:
        self._transport.abort()

    async def _news(self) -> None:
        if self._fault:
            raise BrokenOff(self._fault)
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake

    def _tell(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _fail(self, why: str) -> None:
        self._fault = self._fault or why
        self._tell()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # other loops have classes of their own
        self._is_kept = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"it said what is no answer ({error.__context__ or error})")
            self.hang_up()
        self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"it closed the connection{f' ({error})' if error else ''}")

    # the parser's side

    def on_message_begin(self) -> None:
        if self._is_whole:
            raise BrokenOff("nothing was asked")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.content_type = value.partition(b";")[0].strip().lower().decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status, self._is_kept = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._is_whole = True


class Lines:
    """The connections to the server at ``url``, as many as there are requests at once.

    Args:
        headers: go with every request.
        connect_s: longest time until a connection stands.
        idle_s: longest time for which one lies idle and is still used.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, connect_s: float, idle_s: float) -> None:
        split = urlsplit(url)
        assert split.scheme == "http" and split.hostname, f"an engine's address is http://host:port, not {url}"
        self._host, self._port, self._path = split.hostname, split.port or 80, split.path.rstrip("/")
        told = {"Host": split.netloc, **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in told.items()).encode("latin-1")
        self._connect_s, self._idle_s = connect_s, idle_s
        self._busy: set[Line] = set()
        self._free: deque[Line] = deque()  # the one used last is at the right

    @asynccontextmanager
    async def asked(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Line]:
        """A connection on which the head of the answer has come; the JSON ``body`` went with the request.

        Raises:
            Unreachable: no connection; nothing was sent.
            BrokenOff: no answer came; whether the server read the request is not known.
        """
        line = self._idle() or await self._connected()
        self._busy.add(line)
        try:
            line.send(self._request(method, path, body))
            await line.head()
            yield line
        finally:
            self._take_back(line)

    def close(self) -> None:
        """End all of them, also those that are in use."""
        for line in (*self._busy, *self._free):
            line.hang_up()
        self._free.clear()

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        begin = f"{method} {self._path}{path} HTTP/1.1\r\n".encode("ascii")
        if body is None:
            return begin + self._head + b"\r\n"
        described = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return begin + self._head + described + body

    def _idle(self) -> Line | None:
        """The free one that was used last; those that are too old, or that the server closed, go."""
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while self._free and self._free[0].free_since < oldest:
            self._free.popleft().hang_up()
        while self._free:
            if (line := self._free.pop()).is_free:
                return line
        return None

    async def _connected(self) -> Line:
        try:
            async with asyncio.timeout(self._connect_s):
                _, line = await asyncio.get_running_loop().create_connection(Line, self._host, self._port)
        except TimeoutError as error:
            raise Unreachable(f"no connection in {self._connect_s:g} s") from error
        except OSError as error:
            raise Unreachable(str(error)) from error
        return line

    def _take_back(self, line: Line) -> None:
        self._busy.discard(line)
        if line.is_free:
            line.free_since = asyncio.get_running_loop().time()
            self._free.append(line)
        else:
            line.hang_up()
