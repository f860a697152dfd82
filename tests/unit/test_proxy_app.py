"""The service itself: its headers, and its refusals in the shape of each API."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from raw_http import sent
from served import USER, run, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Transcript
from areal_hpc.proxy.app import refusals_in_shape


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
            names = [line.partition(b":")[0].lower() for line in raw.split(b"\r\n")[1:]]
            assert len(names) == len(set(names)) and not {b"x-odd", b"traceparent", b"x-api-key"} & set(names)
            assert {b"content-length", b"content-type", b"date", b"server"} <= set(names)
            assert f"content-length: {len(payload)}".encode() in raw.lower()

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/embeddings", 404, "not_found_error"),
        ("GET", "/v1/chat/completions", 405, "invalid_request_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("POST", "/v1/chat/completions", 413, "invalid_request_error"),
        ("POST", "/v1/messages", 413, "request_too_large"),
    ],
)
def test_what_is_not_served_is_refused_in_the_apis_own_shape(
    hermes: ChatRenderer, monkeypatch: pytest.MonkeyPatch, method: str, path: str, status: int, kind: str
) -> None:
    monkeypatch.setattr("areal_hpc.proxy.app.MAX_BODY_BYTES", 1000)

    async def scenario() -> None:
        async with served(hermes, []) as service:
            headers = {"Authorization": f"Bearer {service.session.key}"}
            body = {"messages": [USER], "padding": "x" * 2000 * (status == 413)}
            async with service.http.request(method, service.url + path, json=body, headers=headers) as answer:
                told = await answer.json()
                assert (answer.status, told["error"]["type"]) == (status, kind)
                assert ("type" in told) == path.startswith("/v1/messages")  # Anthropic's has a type of its own

    run(scenario())


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "server_error"), ("/v1/messages", "api_error")])
def test_an_error_of_our_own_is_told_in_the_apis_own_shape_and_logged(
    hermes: ChatRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, kind: str
) -> None:
    def raises(*_: Any) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            monkeypatch.setattr(Transcript, "commit", raises)
            status, told = await service.post(path, {"messages": [USER], "max_tokens": 9})
            assert (status, told["error"]["type"]) == (500, kind)
            assert "ask again" in told["error"]["message"] and "foresaw" not in told["error"]["message"]
            assert "nobody foresaw this" in caplog.text and service.session.num_open == 0

    run(scenario())


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_client_that_goes_while_it_is_answered_is_no_error_of_ours(
    caplog: pytest.LogCaptureFixture, is_gone: bool
) -> None:
    transport = Mock(is_closing=lambda: is_gone)

    async def handle(_: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Cannot write to closing transport")

    async def scenario() -> None:
        asked = make_mocked_request("POST", "/v1/messages", transport=transport)
        assert (await refusals_in_shape(asked, handle)).status == (499 if is_gone else 500)

    run(scenario())
    assert bool(caplog.records) is not is_gone


def test_whatever_model_a_client_names_the_runs_own_answers(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            async with service.http.get(f"{service.url}/v1/models") as answer:  # some ask before they have a key
                assert [model["id"] for model in (await answer.json())["data"]] == ["tiny"]
            _, told = await service.post("/v1/chat/completions", {"model": "gpt-9", "messages": [USER]})
            assert told["model"] == "gpt-9"

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_compressed_body_that_is_damaged_is_the_clients_fault(
    hermes: ChatRenderer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    asked = json.dumps({"messages": [USER], "max_tokens": 9}).encode()
    packed = gzip.compress(asked)

    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            for data, status in ((packed, 200), (asked, 400), (packed[:-12], 400)):
                headers = (f"x-api-key: {service.session.key}", "Content-Encoding: gzip")
                told = await sent(service.url, path, data, *headers, f"Content-Length: {len(data)}")
                assert told[0] == status, told
                assert status == 200 or told[1]["error"]["type"] == "invalid_request_error"
            assert "an error of our own" not in caplog.text

    run(scenario())


def test_a_body_that_does_not_come_to_its_end_is_not_awaited_for_ever(
    hermes: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_hpc.proxy.app.BODY_S", 0.05)

    async def scenario() -> None:
        async with served(hermes, []) as service:
            headers = (f"x-api-key: {service.session.key}", "Content-Length: 9")
            status, told = await sent(service.url, "/v1/messages", b"{", *headers)
            assert (status, told["type"]) == (408, "error")

    run(scenario())
