"""Answers of the Responses API that the session keeps: retrieved by the real client, forgotten, each message once."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from online_world import STANDING, World, world
from served import ADD, CALL, Served, run, served

from areal_hpc.dialogue.messages import message
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.proxy.stored import Answers, Stored

TOOL: Any = {"type": "function", **ADD["function"], "strict": None}


@asynccontextmanager
async def client_of(service: Served, key: str = "") -> Any:
    async with openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key=key or service.session.key, max_retries=0
    ) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_retrieved_as_it_was_given(hermes: ChatRenderer, stream: bool) -> None:
    async def scenario() -> None:
        async with served(hermes, ["yes"]) as service, client_of(service) as client:
            asked: Any = {"model": "m", "input": "1?", "instructions": "Be brief.", "metadata": {"a": "b"}}
            if stream:
                *_, last = [event async for event in await client.responses.create(**asked, stream=True)]
                assert last.type == "response.completed"
                given = last.response
            else:
                given = await client.responses.create(**asked)
            again = await client.responses.retrieve(given.id)
            assert again == given
            assert (again.output_text, again.instructions, again.metadata) == ("yes", "Be brief.", {"a": "b"})
            assert again.usage.output_tokens == len(service.session.transcript.turns[0].completion.token_ids)

    run(scenario())


def test_what_a_response_answered_is_listed_page_by_page(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, ["One.", CALL % 2, "Three."]) as service, client_of(service) as client:
            first = await client.responses.create(model="m", instructions="Be brief.", input="1?")
            second = await client.responses.create(model="m", input="2?", tools=[TOOL], previous_response_id=first.id)
            result = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "3"}
            third = await client.responses.create(
                model="m", input=[result], tools=[TOOL], previous_response_id=second.id
            )
            items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
            assert [(item.type, getattr(item, "role", "")) for item in items] == [
                ("message", "user"),
                ("message", "assistant"),
                ("message", "user"),
                ("function_call", ""),
                ("function_call_output", ""),
            ]
            texts = [item.content[0].text for item in items[:3]]
            assert (texts, items[3].call_id, items[4].call_id) == (["1?", "One.", "2?"], *[result["call_id"]] * 2)
            assert items[4].output == "3" and len({item.id for item in items}) == len(items)
            newest = await client.responses.input_items.list(third.id, limit=1)
            assert [item.type for item in newest.data] == ["function_call_output"] and newest.has_more
            assert [item async for item in client.responses.input_items.list(third.id)] == items[::-1]
            for odd in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_x"}):
                with pytest.raises(openai.BadRequestError, match=next(iter(odd))):
                    await client.responses.input_items.list(third.id, **odd)

    run(scenario())


def test_a_response_that_is_forgotten_is_none_and_what_went_on_from_it_stays_whole(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, ["One.", "Two.", "Three."]) as service, client_of(service) as client:
            first = await client.responses.create(model="m", input="1?")
            second = await client.responses.create(model="m", input="2?", previous_response_id=first.id)
            await client.responses.delete(first.id)
            for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
                with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
                    await gone(first.id)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="2?", previous_response_id=first.id)
            assert caught.value.code == "previous_response_not_found"
            await client.responses.create(model="m", input="3?", previous_response_id=second.id)
            told = hermes.spelled(service.session.transcript.turns[-1].place.context)
            assert [told.find(text) > 0 for text in ("1?", "One.", "2?", "Two.", "3?")] == [True] * 5

    run(scenario())


def test_what_is_not_stored_or_is_another_sessions_cannot_be_retrieved(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service, client_of(service) as client:
            gone = await client.responses.create(model="m", input="1?", store=False)
            kept = await client.responses.create(model="m", input="1?")
            other = (await service.post("/rl/start_session", {}, "an-admin-token"))[1]["api_key"]
            async with client_of(service, other) as stranger:
                for one, response_id in ((client, gone.id), (stranger, kept.id), (client, f"x{kept.id}")):
                    with pytest.raises(openai.NotFoundError) as caught:
                        await one.responses.retrieve(response_id)
                    assert (caught.value.param, caught.value.type) == ("response_id", "not_found_error")
            async with client_of(service, "sk-nobodys") as nobody:
                with pytest.raises(openai.AuthenticationError):
                    await nobody.responses.retrieve(kept.id)
            with pytest.raises(openai.BadRequestError, match="not streamed again"):
                await client.responses.retrieve(kept.id, stream=True)
            service.session.close()  # an episode that has ended may be looked at until it is taken
            assert await client.responses.retrieve(kept.id) == kept

    run(scenario())


def test_the_schema_of_one_answer_is_not_kept_with_the_system_item_that_it_was_told_behind(
    hermes: ChatRenderer,
) -> None:
    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service, client_of(service) as client:
            wish: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
            items: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1?"}]
            first = await client.responses.create(model="m", input=items, text=wish)
            told = hermes.spelled(service.engine.requests[-1].token_ids)
            assert told.startswith("<|im_start|>system\nBe brief.\n\nAnswer with one JSON value of this schema")
            await client.responses.create(model="m", input="2?", previous_response_id=first.id)
            told = hermes.spelled(service.engine.requests[-1].token_ids)
            assert told.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>")
            kept = [item async for item in client.responses.input_items.list(first.id, order="asc")]
            assert [item.content[0].text for item in kept] == ["Be brief.", "1?"]

    run(scenario())


@pytest.mark.parametrize("by_id", [True, False])
def test_each_message_is_kept_once_however_long_the_conversation(hermes: ChatRenderer, by_id: bool) -> None:
    """Also where the client sends everything again in each turn, as most do."""

    async def scenario() -> None:
        async with (
            served(hermes, lambda request: f"{len(request.token_ids)}.") as service,
            client_of(service) as client,
        ):
            sent: list[Any] = []
            previous: Any = openai.omit
            for number in range(12):
                new = {"role": "user", "content": f"{number}?"}
                given = await client.responses.create(
                    model="m",
                    instructions="Be brief.",
                    input=[new] if by_id else [*sent, new],
                    previous_response_id=previous,
                )
                sent += [new, {"role": "assistant", "content": given.output_text}]
                previous = given.id if by_id else openai.omit
            last = service.session.answers.find(service.session.call_of(given.id))
            assert last is not None and len(last.way()) == 12
            assert [len(one.messages) for one in last.way()] == [1] * 12
            assert [(one["role"], one["content"]) for one in last.conversation()] == [
                (one["role"], one["content"]) for one in sent
            ]

    run(scenario())


def test_a_standing_keys_last_episode_may_be_looked_at_while_it_waits_for_its_reward(hermes: ChatRenderer) -> None:
    async def scenario(world: World) -> None:
        async with client_of(world.served, STANDING) as client:
            kept = await client.responses.create(model="m", input="1?")
            before = world.served.sessions.of_key(STANDING)
            await world.post("/rl/end_session", {})
            assert await client.responses.retrieve(kept.id) == kept  # which begins no episode
            assert world.served.sessions.of_key(STANDING) is before
            await world.post("/rl/start_session", {})
            assert world.served.sessions.of_key(STANDING) is not before
            assert await client.responses.retrieve(kept.id) == kept

    world(hermes, scenario)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=12))
def test_conversations_are_the_ways_of_a_tree_whatever_is_forgotten(grown: list[tuple[int, int, bool]]) -> None:
    answers, whole = Answers(), dict[str, tuple[Any, ...]]()
    for number, (wanted, num_messages, forgotten) in enumerate(grown):
        known = [call for call in whole if answers.find(call)]
        before = known[wanted % len(known)] if known and wanted else ""
        added = tuple(message("user", f"{number}.{one}") for one in range(num_messages))
        answer = message("assistant", f"{number}")
        stored = Stored(
            before=answers.find(before), messages=added, answer=answer, lead=0, schema="", response={"id": number}
        )
        answers.keep(str(number), stored)
        whole[str(number)] = (*whole.get(before, ()), *added, answer)
        if forgotten and before:
            answers.forget(before)
            assert answers.find(before) is None
    for call, expected in whole.items():
        if (found := answers.find(call)) is not None:
            assert (found.conversation(), found.asked()) == (expected, expected[:-1])
