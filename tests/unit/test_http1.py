"""HTTP/1.1 as it may come over a socket: in any pieces, cut short, malformed, more than was asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.generation.http1 import BrokenOff, Line, Lines, Unreachable

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\nhello \r\n5;odd=1\r\nworld\r\n0\r\nX-Trailer: x\r\n\r\n"
)
LAST = WHOLE.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")


class Server:
    """Answers the n-th request of all with the n-th script: pieces of bytes, and a hang-up where one is None."""

    def __init__(self, *scripts: Sequence[bytes | None]) -> None:
        self._scripts = list(scripts)
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        while head := await _head(reader):
            length = next(
                (int(line.split()[1]) for line in head.split(b"\r\n") if b"content-length" in line.lower()), 0
            )
            self.requests.append(head + await reader.readexactly(length))
            for piece in self._scripts.pop(0):
                if piece is None:
                    writer.close()
                    return
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@asynccontextmanager
async def lines_to(server: Server, *, path: str = "", idle_s: float = 2.0) -> AsyncIterator[Lines]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    lines = Lines(f"http://127.0.0.1:{port}{path}", {"Authorization": "Bearer key"}, connect_s=5.0, idle_s=idle_s)
    try:
        yield lines
    finally:
        lines.close()
        for writer in server.writers:
            writer.close()
        listening.close()


def talk(server: Server, scenario: Callable[[Lines], Awaitable[Any]], **options: Any) -> Any:
    async def body() -> Any:
        async with asyncio.timeout(10.0), lines_to(server, **options) as lines:
            return await scenario(lines)

    return asyncio.run(body())


async def get(lines: Lines) -> tuple[int, str, bytes]:
    async with lines.asked("GET", "/health") as line:
        return line.status, line.content_type, await line.whole()


def pieces_of(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


@settings(max_examples=40, deadline=None)
@given(
    answer=st.sampled_from([(WHOLE, "application/json"), (CHUNKED, "text/event-stream")]),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
)
def test_an_answer_is_the_same_however_it_is_cut(answer: tuple[bytes, str], cuts: list[int]) -> None:
    data, content_type = answer
    server = Server(pieces_of(data, cuts), [WHOLE])

    async def scenario(lines: Lines) -> list[tuple[int, str, bytes]]:
        return [await get(lines), await get(lines)]

    first, second = talk(server, scenario)
    assert first == (200, content_type, b"hello world")
    assert second == (200, "application/json", b"hello world")
    assert server.num_connections == 1


@settings(max_examples=40, deadline=None)
@given(answer=st.sampled_from([WHOLE, CHUNKED]), end=st.integers(0, 1000), cut=st.integers(0, 1000))
def test_H3_an_answer_that_is_cut_short_is_never_taken_for_a_whole_one(answer: bytes, end: int, cut: int) -> None:
    begun = answer[: end % len(answer)]
    server = Server([*pieces_of(begun, [cut]), None] if begun else [None], [WHOLE])

    async def scenario(lines: Lines) -> tuple[int, str, bytes]:
        with pytest.raises(BrokenOff, match="closed the connection"):
            await get(lines)
        return await get(lines)

    assert talk(server, scenario) == (200, "application/json", b"hello world")
    assert server.num_connections == 2


def test_the_request_is_what_the_server_reads() -> None:
    server = Server([WHOLE], [WHOLE])

    async def scenario(lines: Lines) -> None:
        async with lines.asked("POST", "/generate", b'{"a": 1}') as line:
            assert await line.whole() == b"hello world"
        await get(lines)

    talk(server, scenario, path="/engine/")
    post, got = server.requests
    assert post.startswith(b"POST /engine/generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer key\r\n" in post
    assert post.endswith(b'Content-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}')
    assert got.startswith(b"GET /engine/health HTTP/1.1\r\n")
    assert got.endswith(b"\r\nAuthorization: Bearer key\r\n\r\n")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([LAST], id="the server says it closes"),
        pytest.param([WHOLE, b"HTTP/1.1 200 OK\r\n"], id="it says more than was asked"),
        pytest.param([WHOLE + WHOLE], id="it answers twice"),
        pytest.param([WHOLE, None], id="it hangs up"),
    ],
)
def test_a_connection_that_cannot_be_trusted_any_more_is_not_used_again(script: list[bytes | None]) -> None:
    server = Server(script, [WHOLE])

    async def scenario(lines: Lines) -> None:
        assert await get(lines) == (200, "application/json", b"hello world")
        await asyncio.sleep(0.01)  # what it says or does crosses the loopback
        assert await get(lines) == (200, "application/json", b"hello world")

    talk(server, scenario)
    assert server.num_connections == 2


@pytest.mark.parametrize("garbage", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01"])
def test_what_is_no_http_is_no_answer(garbage: bytes) -> None:
    async def scenario(lines: Lines) -> None:
        with pytest.raises(BrokenOff, match="no answer"):
            await get(lines)

    talk(Server([garbage]), scenario)


def test_an_answer_that_was_not_read_to_its_end_leaves_no_connection_behind() -> None:
    server = Server([WHOLE[:-3]], [WHOLE])

    async def scenario(lines: Lines) -> None:
        async with lines.asked("GET", "/health") as line:
            assert await line.part() == b"hello wo"
        assert await get(lines) == (200, "application/json", b"hello world")

    talk(server, scenario)
    assert server.num_connections == 2


def test_whoever_closes_ends_what_is_under_way() -> None:
    async def scenario(lines: Lines) -> None:
        asking = asyncio.ensure_future(get(lines))
        while not server.requests:
            await asyncio.sleep(0)
        lines.close()
        with pytest.raises(BrokenOff, match="closed the connection"):
            await asking

    server = Server([])
    talk(server, scenario)


def test_no_connection_is_told_from_one_that_broke_off() -> None:
    async def scenario(lines: Lines) -> None:
        with pytest.raises(Unreachable, match="Connect call failed"):
            await get(lines)

    async def body() -> None:
        async with lines_to(Server()) as lines:
            pass
        await scenario(lines)  # nobody listens there any more

    asyncio.run(body())


def test_a_server_that_takes_no_connection_is_not_waited_for_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async def never(*_: Any) -> tuple[Any, Line]:
            await asyncio.sleep(3600.0)
            raise AssertionError("unreachable")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
        with pytest.raises(Unreachable, match=r"no connection in 0\.01 s"):
            await get(Lines("http://127.0.0.1:1", {}, connect_s=0.01, idle_s=1.0))

    asyncio.run(body())
