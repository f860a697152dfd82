"""Whatever an engine is asked over HTTP is done or refused; nothing of it is an error of ours, or the engine's end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from anything import ANYTHING, NUMBERS, places, spoilt, written
from embedded_api import PROMPT, TOKEN, Api, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_http import sent
from tiny_models import make_model

from areal_hpc.errors import DataError
from areal_hpc.generation.served.request import parse_generate

EXAMPLES = 40
"""Of each route; 900 of each have found nothing more."""
SAMPLING = {
    **{"n": 1, "max_new_tokens": 2, "min_new_tokens": 1, "temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    **{"stop": [], "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": True, "no_stop_trim": True},
    **{"sampling_seed": 1, "json_schema": None, "structural_tag": None, "frequency_penalty": 0.0},
}
WANTED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
TENSOR = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2, 3]], "checksums": [1], "nums_changed": [None]}
MANNER = {"weight_version": "2", "flush_cache": True, "abort_all_requests": False}
BODIES: Mapping[str, Any] = {
    "/generate": {"input_ids": PROMPT, "rid": "r", "sampling_params": SAMPLING, "priority": 1, "stream": False}
    | WANTED,
    "/pause_generation": {"mode": "retract"},
    "/abort_request": {"rid": "r", "abort_all": False},
    "/init_weights_update_group": {
        **{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2},
        **{"group_name": "w", "backend": "gloo"},
    },
    "/destroy_weights_update_group": {"group_name": "w"},
    "/update_weights_from_distributed": {"group_name": "w", "load_format": "flattened_bucket"} | TENSOR | MANNER,
    "/update_weights_from_disk": {"model_path": "nowhere"} | MANNER,
    "/update_weight_version": {"new_version": "1", "abort_all_requests": False},
    "/weights_checker": {"action": "checksum"},
    "/get_weights_by_name": {"name": "model.norm.weight", "truncate_size": 3},
}


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.AbstractEventLoop, Api]]:
    directory: Path = tmp_path_factory.mktemp("model")
    make_model(directory, "qwen2", seed=3)
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    opening = serving(directory, update_timeout_s=0.05)
    yield loop, loop.run_until_complete(stack.enter_async_context(opening))
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_field_of_a_request_may_hold_anything(
    asking: tuple[asyncio.AbstractEventLoop, Api], path: str, data: Any
) -> None:
    loop, api = asking
    body = dict(BODIES[path])
    for _ in range(data.draw(st.integers(1, 2))):
        where = data.draw(st.sampled_from(list(places(body))))
        body = spoilt(body, where, data.draw(ANYTHING | st.integers(-1, 3) | st.sampled_from([2**31, 2**63, 2**64])))
    loop.run_until_complete(is_done_or_refused(api, path, body))


async def is_done_or_refused(api: Api, path: str, body: Any) -> None:
    async with api.session.post(api.url + path, data=written(body)) as answer:
        assert answer.status in (200, 400), await answer.text()
    await api.post("/continue_generation")
    assert (await api.get("/health"))[0] == 200, f"{path} has ended the engine"


def test_what_is_asked_of_the_engine_here_is_done(asking: tuple[asyncio.AbstractEventLoop, Api]) -> None:
    loop, api = asking
    status, answer = loop.run_until_complete(api.post("/generate", **BODIES["/generate"]))
    assert (status, answer["meta_info"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"sampling_params": SAMPLING | {"top_k": 2**63}}, 200),
        ({"sampling_params": SAMPLING | {"temperature": 10**400}}, 400),
        ({"sampling_params": SAMPLING | {"n": 10**9}}, 400),
        ({"top_logprobs_num": -1}, 400),
        ({"top_logprobs_num": 2**62}, 200),
    ],
)
def test_no_request_alone_ends_the_engine_for_all(
    asking: tuple[asyncio.AbstractEventLoop, Api], change: dict[str, Any], status: int
) -> None:
    """Each of these was an exception in the engine's own thread, a list without an end, or an error of ours."""
    loop, api = asking

    async def scenario() -> None:
        assert (await api.post("/generate", **BODIES["/generate"] | change))[0] == status
        assert (await api.get("/health"))[0] == 200

    loop.run_until_complete(scenario())


def test_a_compressed_body_that_is_damaged_is_refused(asking: tuple[asyncio.AbstractEventLoop, Api]) -> None:
    loop, api = asking
    headers = (f"Authorization: Bearer {TOKEN}", "Content-Encoding: gzip", "Content-Length: 8")
    status, answer = loop.run_until_complete(sent(api.url, "/generate", b"no gzip!", *headers))
    assert status == 400 and "the body is not JSON" in answer["message"]


@given(given_text=ANYTHING)
def test_a_prompt_that_is_no_text_is_refused_where_texts_are_understood(given_text: Any) -> None:
    text: Any = SimpleNamespace(encode=lambda one: list(one.encode("utf-8", "surrogatepass")))
    try:
        asked = parse_generate({"text": given_text}, text)
    except DataError:
        return
    texts = given_text if isinstance(given_text, list) else [given_text]
    assert len(asked.prompts) == len(texts) and all(isinstance(one, str) for one in texts)


@settings(max_examples=EXAMPLES)
@given(name=st.text(max_size=5) | st.just("model.norm.weight"), size=NUMBERS | st.text(max_size=3))
def test_every_number_of_a_query_may_be_none(
    asking: tuple[asyncio.AbstractEventLoop, Api], name: str, size: str
) -> None:
    loop, api = asking
    status, answer = loop.run_until_complete(
        api.get(f"/get_weights_by_name?name={quote(name)}&truncate_size={quote(size)}")
    )
    assert status in (200, 400), answer
