"""What requests may ask for, what of it is obeyed, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dialogues import said
from served import STREAMS, USER, run, served, text_of

from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.dialogue.transcript import Drift
from areal_hpc.types import Completion, GenerationRequest, StopReason


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
        ("/v1/responses", {"input": "hi", "previous_response_id": "x"}, "Previous response with id 'x' not found"),
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


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "temperature"),
        ("/v1/responses", "top_p"),
        ("/v1/messages", "temperature"),
        ("/rl/set_reward", "reward"),
    ],
)
@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1e400", "NaN", "true", '"1"'])
def test_numbers_that_are_none_are_refused_by_name(hermes: ChatRenderer, path: str, field: str, number: str) -> None:
    async def scenario() -> None:
        async with served(hermes, []) as service:
            text = json.dumps({**STREAMS.get(path, {}), field: "HERE"}).replace('"HERE"', number)
            headers = {"Authorization": f"Bearer {service.session.key}", "Content-Type": "application/json"}
            async with service.http.post(service.url + path, data=text, headers=headers) as answer:
                told = (await answer.json())["error"]["message"]
                assert answer.status == 400 and (field in told or "NaN is not JSON" in told)

    run(scenario())


def test_a_seed_gives_the_same_answer_again_and_leaves_everything_else_independent(hermes: ChatRenderer) -> None:
    """Agents send one seed with every request: attempts of a group must differ all the same, and so must turns."""

    async def scenario() -> None:
        async with served(hermes, lambda _: "yes") as service:
            for content, more in (("a", {"seed": 7}), ("a", {"seed": 7}), ("a", {"seed": 8}), ("b", {"seed": 7})):
                await service.chat(content, **more)
            await service.chat("a")
            await service.post("/v1/responses", {"input": "a", "seed": 7})
            seeds = [request.sampling.seed for request in service.engine.requests]
            assert seeds[0] == seeds[1] == seeds[5] and len(set(seeds[1:5])) == 4
            service.session.sampling = replace(service.session.sampling, seed=6)
            await service.chat("a", seed=7)
            assert service.engine.requests[-1].sampling.seed not in seeds
            await service.post("/v1/chat/completions", {"messages": [USER], "seed": 7, "n": 2})
            assert len({request.sampling.seed for request in service.engine.requests[-2:]}) == 2

    run(scenario())


def test_log_probs_come_with_the_likeliest_tokens_in_each_apis_shape(hermes: ChatRenderer) -> None:
    def answer(request: GenerationRequest) -> Completion:
        ids = said(hermes, "no")
        tops = tuple(((-0.1, token), (-2.5, hermes.encode("y")[0]))[: request.num_top] for token in ids)
        return Completion(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array([-0.1, -0.2, -0.3], dtype=np.float32),
            versions=np.zeros(3, dtype=np.int32),
            stop=StopReason.STOP,
            top_logprobs=tops if request.num_top else (),
        )

    async def scenario() -> None:
        async with served(hermes, answer) as service:
            rows = (await service.chat("hi", logprobs=True, top_logprobs=2))["logprobs"]["content"]
            assert [row["token"] for row in rows] == ["n", "o", "<|im_end|>"]
            assert [row["logprob"] for row in rows] == pytest.approx([-0.1, -0.2, -0.3])
            assert rows[0]["bytes"] == [110]
            assert [(top["token"], top["logprob"]) for top in rows[0]["top_logprobs"]] == [("n", -0.1), ("y", -2.5)]
            assert (await service.chat("hi", logprobs=True))["logprobs"]["content"][0]["top_logprobs"] == []
            assert (await service.chat("hi", top_logprobs=2))["logprobs"] is None
            body = {"messages": [USER], "stream": True, "logprobs": True, "top_logprobs": 2}
            _, events = await service.post("/v1/chat/completions", body)
            told = [data["choices"][0]["logprobs"] for name, data in events[:-1] if not name]
            assert [one["content"] for one in told if one] == [rows]

            _, plain = await service.post("/v1/completions", {"prompt": "hi", "logprobs": 2})
            logprobs = plain["choices"][0]["logprobs"]
            assert (logprobs["tokens"], logprobs["text_offset"]) == (["n", "o", "<|im_end|>"], [0, 1, 2])
            assert logprobs["top_logprobs"][0] == {"n": -0.1, "y": -2.5}
            _, plain = await service.post("/v1/completions", {"prompt": "hi", "logprobs": 0})
            assert plain["choices"][0]["logprobs"]["top_logprobs"] is None

            wanted = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
            for stream in (False, True):
                _, response = await service.post("/v1/responses", {**wanted, "stream": stream})
                response = response[-1][1]["response"] if stream else response
                assert response["output"][0]["content"][0]["logprobs"] == rows
            status, refused = await service.post("/v1/responses", {"input": "hi", "top_logprobs": 21})
            assert (status, refused["error"]["param"]) == (400, "top_logprobs")

    run(scenario())


@pytest.mark.parametrize(("text", "reasoning"), [("<think>hm</think>\n\nyes", 17), ("<think>hm", 10), ("yes", 0)])
def test_reasoning_is_counted_by_its_tokens(hermes: ChatRenderer, text: str, reasoning: int) -> None:
    """A token is a byte, and one more ends the turn: what never came to an answer is all reasoning."""

    async def scenario() -> None:
        async with served(hermes, lambda _: text) as service:
            _, chat = await service.post("/v1/chat/completions", {"messages": [USER]})
            _, response = await service.post("/v1/responses", {"input": "hi"})
            assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == reasoning
            assert chat["usage"]["completion_tokens"] == len(text) + 1

    run(scenario())
