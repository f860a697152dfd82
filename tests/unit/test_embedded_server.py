"""The embedded engine over HTTP: SGLang's shapes, refusals, streams, control, faults."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from embedded_api import ENDLESS, GREEDY, PROMPT, TOKEN, Api, run
from tiny_models import make_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, "llama", 0)
    return directory


# -- access


def test_every_route_asks_for_the_token(model: Path) -> None:
    async def use(api: Api) -> None:
        routes = {(route.method, route.resource.canonical) for route in api.runner.app.router.routes()}
        assert len(routes) > 20
        async with aiohttp.ClientSession() as session:
            for method, path in routes:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"bearer{TOKEN}"}):
                    async with session.request(method, api.url + path, headers=headers) as response:
                        assert response.status == 401, (method, path)
        assert (await api.get("/health"))[0] == 200

    run(model, use)


def test_without_a_token_nothing_is_asked_for(model: Path) -> None:
    async def use(api: Api) -> None:
        async with aiohttp.ClientSession() as session, session.get(api.url + "/health") as response:
            assert response.status == 200

    run(model, use, token="")


# -- generate


def test_G2_ids_are_continued_as_they_are_and_never_by_way_of_their_text(model: Path) -> None:
    ids = [200, 201, 65, 255, 66]  # bytes that are no characters

    async def use(api: Api) -> None:
        assert api.engine.text.encode(api.engine.text.decode(ids)) != ids
        answer = await api.generate(input_ids=ids, sampling_params=GREEDY)
        assert answer["meta_info"]["prompt_tokens"] == len(ids)
        whole = torch.tensor([ids + answer["output_ids"]])
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(model)(whole).logits[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer["output_ids"]
        wanted = logits.log_softmax(-1).amax(-1).tolist()
        assert [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]] == pytest.approx(
            wanted, abs=1e-4
        )

    run(model, use)


def test_one_prompt_gives_an_object_and_more_give_a_list(model: Path) -> None:
    async def use(api: Api) -> None:
        single = await api.generate(sampling_params=GREEDY, rid="mine")
        assert single["meta_info"].pop("e2e_latency") > 0
        logprobs = single["meta_info"].pop("output_token_logprobs")
        assert [token_id for _, token_id, _ in logprobs] == single["output_ids"]
        assert single["text"] == api.engine.text.decode(single["output_ids"])
        assert single["meta_info"] == {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 12},
            "prompt_tokens": 20,
            "completion_tokens": 12,
            "cached_tokens": 0,
            "weight_version": "1",
            "weight_versions": [{"version": "1", "start": 0, "end": 12}],
            "num_retractions": 0,
            "input_token_logprobs": [],
        }
        batch = await api.generate(input_ids=[PROMPT, PROMPT[:3]], sampling_params=GREEDY, rid=["a", "b"])
        assert [answer["meta_info"]["id"] for answer in batch] == ["a", "b"]
        assert batch[0]["output_ids"] == single["output_ids"]
        [one] = await api.generate(input_ids=[PROMPT], sampling_params=[GREEDY])
        assert one["output_ids"] == single["output_ids"]
        samples = await api.generate(sampling_params={**GREEDY, "temperature": 1.0, "n": 3}, rid="r")
        assert [sample["meta_info"]["id"] for sample in samples] == ["r_0", "r_1", "r_2"]
        text = "".join(api.engine.text.decode([token_id]) for token_id in range(65, 75))
        by_text = await api.generate(input_ids=None, text=text, sampling_params=GREEDY)
        by_ids = await api.generate(input_ids=api.engine.text.encode(text), sampling_params=GREEDY)
        assert by_text["output_ids"] == by_ids["output_ids"]
        plain = await api.generate(sampling_params=GREEDY, return_logprob=False)
        assert "output_token_logprobs" not in plain["meta_info"]

    run(model, use)


def test_prompt_and_top_logprobs_have_the_shapes_of_sglang(model: Path) -> None:
    async def use(api: Api) -> None:
        answer = await api.generate(
            sampling_params=GREEDY, logprob_start_len=17, top_logprobs_num=2, return_text_in_logprobs=True
        )
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT[17:]
        assert meta["input_token_logprobs"][0][0] is None
        assert all(entry[0] < 0 for entry in meta["input_token_logprobs"][1:])
        assert meta["input_top_logprobs"][0] is None
        assert [len(row) for row in meta["input_top_logprobs"][1:]] == [2, 2]
        for (logprob, token_id, text), top in zip(
            meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
        ):
            assert top[0] == [logprob, token_id, text]  # greedy
            assert text == api.engine.text.decode([token_id])

    run(model, use)


def test_E3_what_the_engine_does_not_do_is_refused_by_name(model: Path) -> None:
    sampling = [
        ("repetition_penalty", 1.05),
        ("frequency_penalty", 0.1),
        ("regex", "a+"),
        ("json_schema", 5),
        ("beam_width", 4),
        ("n", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", 2029),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 0),
        ("min_p", 2),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop_token_ids", [999]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", "yes"),
        ("sampling_seed", -1),
    ]
    fields: list[dict[str, Any]] = [
        {"lora_path": "adapter"},
        {"return_hidden_states": True},
        {"text": "both"},
        {"input_ids": None},
        {"input_ids": []},
        {"input_ids": [[], [1]]},
        {"input_ids": ["a"]},
        {"input_ids": [272]},
        {"input_ids": [1] * 2048},
        {"input_ids": [[1], [2]], "rid": ["only one"]},
        {"input_ids": 5},
        {"input_ids": [[1], 2]},
        {"logprob_start_len": 20},
        {"logprob_start_len": "all"},
        {"sampling_params": [5]},
    ]

    async def use(api: Api) -> None:
        for key, value in sampling:
            status, answer = await api.post("/generate", input_ids=PROMPT, sampling_params={key: value})
            assert (status, key in answer["error"]["message"] or "token ids" in answer["error"]["message"]) == (
                400,
                True,
            )
        for body in fields:
            status, answer = await api.post("/generate", **{"input_ids": PROMPT, "return_logprob": True, **body})
            assert status == 400, body
            assert answer["error"]["message"]
        for raw in (b"{", b"[1]"):
            async with api.session.post(api.url + "/generate", data=raw) as response:
                assert response.status == 400
        neutral = {**GREEDY, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "regex": None}
        await api.generate(sampling_params=neutral, lora_path=None, return_hidden_states=False)

    run(model, use)


def test_a_stop_string_or_token_is_cut_from_the_text_and_kept_in_the_tokens(model: Path) -> None:
    async def use(api: Api) -> None:
        sampling = {**ENDLESS, "max_new_tokens": 200, "sampling_seed": 1}
        free = (await api.generate(sampling_params=sampling))["output_ids"]
        decode = api.engine.text.decode
        stop = next(t for t in map(decode, pairwise(free)) if t.isascii() and t.isprintable())
        whole = decode(free)
        cut = await api.generate(sampling_params={**sampling, "stop": stop})
        assert cut["text"] == whole[: whole.index(stop)]
        assert decode(cut["output_ids"]).endswith(stop)
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        kept = await api.generate(sampling_params={**sampling, "stop": [stop], "no_stop_trim": True})
        assert kept["text"] == decode(cut["output_ids"])
        by_token = await api.generate(sampling_params={**sampling, "stop_token_ids": [free[30]]})
        end = free.index(free[30])
        assert by_token["output_ids"] == free[: end + 1]
        assert by_token["text"] == decode(free[:end])

    run(model, use)


async def events(api: Api, **body: Any) -> list[Any]:
    async with api.session.post(api.url + "/generate", json={"stream": True, **body}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = (await response.text()).strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_H15_a_stream_grows_and_ends_as_the_whole_answer(model: Path) -> None:
    async def use(api: Api) -> None:
        sampling = {**ENDLESS, "max_new_tokens": 120, "sampling_seed": 1}
        whole = (await api.generate(sampling_params=sampling))["text"]
        stop = next(whole[i : i + 3] for i in range(20, len(whole)) if whole[i : i + 3].isascii())
        for params in (sampling, {**sampling, "stop": [stop]}):
            expected = await api.generate(sampling_params=params)
            stream = await events(api, input_ids=PROMPT, sampling_params=params, return_logprob=True)
            assert len(stream) == len(expected["output_ids"])
            for before, after in pairwise(stream):
                assert after["text"].startswith(before["text"])
                assert after["output_ids"][:-1] == before["output_ids"]
                assert before["meta_info"]["finish_reason"] is None
            last = stream[-1]
            assert (last["text"], last["output_ids"]) == (expected["text"], expected["output_ids"])
            assert last["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        samples = await events(api, input_ids=PROMPT, sampling_params={**GREEDY, "n": 2})
        assert {event["index"] for event in samples} == {0, 1}

    run(model, use)


def test_a_client_that_hangs_up_leaves_nothing_running(model: Path) -> None:
    async def use(api: Api) -> None:
        for stream in (False, True):
            request = asyncio.create_task(
                api.post("/generate", input_ids=PROMPT, sampling_params={**ENDLESS, "n": 2}, stream=stream)
            )
            await api.until(lambda info: info["num_running"] == 2)
            request.cancel()
            await api.until(lambda info: info["num_running"] == 0)

    run(model, use)


# -- control


def test_abort_by_id_and_all(model: Path) -> None:
    async def use(api: Api) -> None:
        first, second = (
            asyncio.create_task(api.generate(sampling_params=ENDLESS, rid=rid)) for rid in ("first", "second")
        )
        await api.until(lambda info: info["num_running"] == 2)
        assert await api.post("/abort_request", rid="first") == (200, "")
        answer = await first
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        num = answer["meta_info"]["completion_tokens"]
        assert 0 < num < 1900
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == num
        assert not second.done()
        assert (await api.post("/abort_request"))[0] == 400
        assert (await api.post("/abort_request", abort_all=True))[0] == 200
        assert (await second)["meta_info"]["finish_reason"]["type"] == "abort"

    run(model, use)


def test_D12_pausing_and_continuing_twice_is_doing_it_once(model: Path) -> None:
    async def use(api: Api) -> None:
        assert (await api.post("/pause_generation", mode="sometimes"))[0] == 400
        for mode, flushed in (("in_place", 400), ("retract", 200)):
            request = asyncio.create_task(api.generate(sampling_params=ENDLESS))
            await api.until(lambda info: info["num_running"] == 1)
            for _ in range(2):
                status, answer = await api.post("/pause_generation", mode=mode)
                assert (status, answer["status"]) == (200, "ok")
            assert (await api.post("/flush_cache"))[0] == flushed
            assert (await api.get("/health"))[0] == 200
            assert (await api.get("/health_generate"))[0] == 503
            for _ in range(2):
                status, answer = await api.post("/continue_generation")
                assert (status, answer["status"]) == (200, "ok")
            meta = (await request)["meta_info"]
            assert meta["completion_tokens"] == 1900
            assert meta["num_retractions"] == (mode == "retract")
            assert (await api.get("/health_generate"))[0] == 200
        assert (await api.post("/pause_generation"))[0] == 200  # abort is the default

    run(model, use)


def test_the_state_routes_tell_what_runs(model: Path) -> None:
    async def use(api: Api) -> None:
        await api.generate(sampling_params=GREEDY)
        for path in ("/server_info", "/get_server_info"):
            status, info = await api.get(path)
            assert (status, info["version"], info["areal_hpc"]) == (
                200,
                "areal-embedded",
                {"checksums": True, "deltas": True, "stages": True, "priorities": True},
            )
            assert (info["num_generated_tokens"], info["num_running"], info["num_waiting"]) == (12, 0, 0)
        for path in ("/model_info", "/get_model_info"):
            status, info = await api.get(path)
            assert (status, info["model_path"], info["weight_version"]) == (200, str(model), "1")
        assert (await api.get("/v1/models"))[1]["data"][0]["max_model_len"] == 2048

    run(model, use)


def test_a_crash_of_the_engine_is_in_the_log_and_answers_500_and_health_503(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(api: Api) -> None:
        def crash(*_: Any) -> torch.Tensor:
            raise RuntimeError("the loop broke")

        requests = [
            asyncio.create_task(api.post("/generate", input_ids=PROMPT, sampling_params=ENDLESS)) for _ in "123456"
        ]
        await api.until(lambda info: info["num_running"] == 4)
        monkeypatch.setattr(api.engine.model, "decode", crash)
        for status, answer in await asyncio.gather(*requests):
            assert status == 500
            assert "the loop broke" in answer["error"]["message"]
        assert (await api.get("/health"))[0] == 503
        assert (await api.get("/health_generate"))[0] == 503
        assert (await api.post("/generate", input_ids=PROMPT, sampling_params=GREEDY))[0] == 500
        assert (await api.post("/pause_generation"))[0] == 500

    run(model, use)
    (died,) = (record for record in caplog.records if record.levelname == "CRITICAL")
    assert died.exc_info is not None
    assert str(died.exc_info[1]) == "the loop broke" and died.exc_info[2] is not None, "where it broke, too"


def test_a_server_ends_while_requests_run(model: Path) -> None:
    """One that waits for them takes two minutes."""

    async def use(api: Api) -> None:
        asked = asyncio.create_task(api.generate(sampling_params=ENDLESS))
        await api.until(lambda info: bool(info["num_running"]))
        await api.post("/pause_generation", mode="in_place")
        async with asyncio.timeout(30.0):
            await api.runner.cleanup()
        with pytest.raises(aiohttp.ClientError):
            await asked

    run(model, use)
