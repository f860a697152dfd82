"""The Responses API: conversations that go on from an answer by its id alone."""

from __future__ import annotations

from typing import Any

import pytest
from served import ADD, CALL, Served, run, served

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Drift

PATH = "/v1/responses"


async def answered(service: Served, stream: bool = False, **body: Any) -> Any:
    status, told = await service.post(PATH, {**body, "stream": stream})
    assert status == 200, told
    return told[-1][1]["response"] if stream else told


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_gone_on_from_by_its_id_with_its_real_tokens(hermes: ChatRenderer, stream: bool) -> None:
    """As if the client had sent everything again, instructions included, which is what the judge does."""

    async def scenario() -> None:
        async with served(hermes, ["One.", CALL % 2, "Three.", "Three."]) as service:
            first = await answered(service, stream, instructions="Be brief.", input="1?")
            assert (first["store"], first["previous_response_id"]) == (True, None)
            again = {"instructions": "Be brief.", "tools": [{"type": "function", **ADD["function"]}], "stream": stream}
            second = await answered(service, **again, input="2?", previous_response_id=first["id"])
            assert second["previous_response_id"] == first["id"]
            (call,) = second["output"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
            await answered(service, **again, input=[result], previous_response_id=second["id"])
            whole = [
                {"role": "user", "content": "1?"},
                *first["output"],
                {"role": "user", "content": "2?"},
                call,
                result,
            ]
            await answered(service, **again, input=whole)
            turns = service.session.transcript.turns
            assert turns[2].place.context == turns[3].place.context
            assert turns[2].place.context[: len(turns[1].token_ids)] == turns[1].token_ids
            assert service.session.transcript.drifts[Drift.CLEAN] == 2  # the tools came with the second

    run(scenario())


def test_instructions_hold_for_one_answer(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            wish = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
            first = await answered(service, instructions="Be brief.", input="1?", text=wish)
            await answered(service, instructions="Be long.", input="2?", previous_response_id=first["id"])
            told = hermes.spelled(service.engine.requests[-1].token_ids)
            assert told.startswith("<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\n1?<|im_end|>")
            assert "Be brief" not in told and "schema" not in told

    run(scenario())


def test_what_was_not_stored_or_is_another_sessions_is_not_found(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            kept = await answered(service, input="1?")
            gone = await answered(service, input="1?", store=False)
            assert gone["store"] is False
            other = (await service.post("/rl/start_session", {}, "an-admin-token"))[1]["api_key"]
            for previous, key in ((gone["id"], ""), (kept["id"], other), ("resp_x", "")):
                body = {"input": "2?", "previous_response_id": previous}
                status, told = await service.post(PATH, body, key)
                assert status == 400
                assert told["error"]["code"] == "previous_response_not_found"
                assert told["error"]["param"] == "previous_response_id"
            assert len(service.session.transcript.turns) == 2 and service.session.num_open == 0

    run(scenario())


IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": IMAGE}}),
        (PATH, {"type": "input_image", "image_url": IMAGE}),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0"}}),
    ],
)
def test_images_are_refused_in_the_apis_own_shape(hermes: ChatRenderer, path: str, content: Any) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            said = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, content]}
            body = {"input": [said]} if path == PATH else {"messages": [said], "max_tokens": 9}
            status, told = await service.post(path, body)
            assert (status, told["error"]["type"]) == (400, "invalid_request_error")
            assert f"content of type '{content['type']}' is not supported" in told["error"]["message"]

    run(scenario())
