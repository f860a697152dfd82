"""The same cases for every Generator: the scripted fake, clients of the embedded engine, of SGLang and vLLM, a router.

What a model has to do with is asked of the engines alone. They have one model, whose judge is transformers, in float32
and in one pass over the whole sequence.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedded_process import MAX_RUNNING, embedded
from generators import PROMPT, Opens, asked, assert_logprobs, kept, logits, opened, run, tagged
from real_engines import MAX_RUNNING as REAL_MAX_RUNNING
from real_engines import MAX_TOKENS, SGLANG, VLLM, served
from speaking_model import END, SAYS, TURN, make_speaking_model

from areal_hpc.dialogue.parts import Reading
from areal_hpc.dialogue.renderer import load_tokenizer
from areal_hpc.dialogue.structural_tag import calls_tag
from areal_hpc.dialogue.tool_calls import kinds_of
from areal_hpc.dialogue.tool_formats import FORMATS, ToolFormat
from areal_hpc.errors import GenerationError, RequestRefused
from areal_hpc.generation.client import EngineClient
from areal_hpc.types import Completion, StopReason

LONG_PROMPT = tuple(range(40, 90))
AFTER_A_TURN = (*PROMPT, END)
REAL = [pytest.param(engine.name, marks=getattr(pytest.mark, engine.name)) for engine in (SGLANG, VLLM)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The model that all engines have: where it is written, and as transformers have it."""
    directory: Path = tmp_path_factory.mktemp("model")
    return directory, make_speaking_model(directory, seed=5)


@pytest.fixture(scope="module")
def engine_url(judge: tuple[Path, Any]) -> Iterator[str]:
    with embedded(judge[0]) as [url]:
        yield url


@pytest.fixture(scope="module")
def sglang_url(judge: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(SGLANG, judge[0], tmp_path_factory.mktemp("sglang") / "sglang.log") as server:
        yield server.url


@pytest.fixture(scope="module")
def vllm_url(judge: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(VLLM, judge[0], tmp_path_factory.mktemp("vllm") / "vllm.log") as server:
        yield server.url


@pytest.fixture(params=["scripted", "client", "router", *REAL])
def generator(request: pytest.FixtureRequest) -> Opens:
    """Opens the generator under test inside the running loop."""
    return opener(request, request.param)


@pytest.fixture(params=["client", "router", *REAL])
def engine(request: pytest.FixtureRequest) -> Opens:
    """The same of those that have a model."""
    return opener(request, request.param)


def opener(request: pytest.FixtureRequest, kind: str) -> Opens:
    url = (
        ""
        if kind == "scripted"
        else request.getfixturevalue(f"{kind}_url" if kind in ("sglang", "vllm") else "engine_url")
    )

    return lambda: opened(kind, url)


def test_every_token_has_a_log_prob_and_a_version(generator: Opens) -> None:
    completion = run(generator, lambda made: made.generate(asked(12)))
    assert completion.token_ids.shape == completion.logprobs.shape == completion.versions.shape == (12,)
    assert (completion.token_ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert completion.versions.tolist() == [0] * 12
    assert completion.stop is StopReason.LENGTH


def test_a_stop_token_ends_the_answer_and_is_part_of_it(generator: Opens) -> None:
    async def scenario(made: Any) -> None:
        whole = (await made.generate(asked(8))).token_ids.tolist()
        stopped = await made.generate(asked(8, "r2", stop_token_ids=(whole[3],), ignore_eos=False))
        assert stopped.token_ids.tolist() == whole[: whole.index(whole[3]) + 1]
        assert stopped.stop is StopReason.STOP

    run(generator, scenario)


def test_many_at_once_do_not_mix(generator: Opens) -> None:
    async def scenario(made: Any) -> None:
        alone = [await made.generate(asked(num, f"alone{num}")) for num in (1, 5, 9)]
        together = await asyncio.gather(*(made.generate(asked(num, f"together{num}")) for num in (1, 5, 9)))
        assert [c.token_ids.tolist() for c in together] == [c.token_ids.tolist() for c in alone]

    run(generator, scenario)


def test_an_aborted_answer_is_a_beginning_and_says_so(generator: Opens) -> None:
    async def scenario(made: Any) -> None:
        whole = (await made.generate(asked(900, "whole"))).token_ids.tolist()
        asking = asyncio.create_task(made.generate(asked(900, "cut")))
        await asyncio.sleep(0.05)
        await made.abort("cut")
        cut = await asking
        assert cut.stop is StopReason.ABORT
        assert len(cut.token_ids) < 900
        assert cut.token_ids.tolist() == whole[: len(cut.token_ids)]

    run(generator, scenario)


@pytest.mark.parametrize("kind", ["engine", *REAL])
def test_a_request_that_the_engine_refuses_is_a_generation_error(kind: str, request: pytest.FixtureRequest) -> None:
    engine_url: str = request.getfixturevalue(f"{kind}_url")

    async def scenario() -> None:
        client = EngineClient("engine-0", engine_url, token="secret")
        with pytest.raises(RequestRefused, match=r"engine-0.* refuses the request: .*context"):
            await client.generate(asked(100_000))
        await client.close()
        stranger = EngineClient("engine-0", engine_url, token="wrong")
        with pytest.raises(GenerationError, match="status 401"):
            await stranger.generate(asked(4))
        await stranger.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_grammar_that_cannot_be_forced_is_refused_with_a_reason(engine: Opens, streamed: bool) -> None:
    nonsense = {"type": "nonsense"}

    async def scenario(made: Any) -> None:
        grammars = ({"json_schema": json.dumps(nonsense)}, {"structural_tag": tagged(nonsense)})
        for number, grammar in enumerate(grammars):
            request = asked(4, f"g{number}", **grammar)
            with pytest.raises(RequestRefused, match=r"refuses the request: .{20}"):
                await made.generate(replace(request, on_tokens=(lambda _: None) if streamed else None))
        assert (await made.generate(asked(4, "next"))).token_ids.size == 4

    run(engine, scenario)


def test_what_a_tag_begins_is_held_to_its_schema_and_log_probs_are_those_of_what_it_leaves(
    engine: Opens, judge: tuple[Path, Any]
) -> None:
    tokenizer = load_tokenizer(judge[0])
    must = tagged({"enum": ["x", "y"]}, at_least_one=True)

    async def scenario(made: Any) -> None:
        forced = asked(24, structural_tag=must, temperature=1.0, ignore_eos=False)
        completion = await made.generate(replace(forced, num_top=2))
        text = tokenizer.decode(completion.token_ids[:10].tolist())  # a token is a byte
        assert text in ('<a>"x"</a>', '<a>"y"</a>')
        choice = text.index('"') + 1
        others = [place for place in range(10) if place != choice]
        np.testing.assert_allclose(completion.logprobs[others], 0.0, atol=1e-6)  # there was no other token
        assert completion.logprobs[choice] < 0.0
        both = {tokenizer.decode([token]): logprob for logprob, token in completion.top_logprobs[choice]}
        assert set(both) == {"x", "y"} and sum(map(math.exp, both.values())) == pytest.approx(1.0, abs=1e-4)

    run(engine, scenario)


PICK = {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "word": {"type": "string", "enum": ["x", "y"]}}
STRICT = {"type": "object", "properties": PICK, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "pick", "strict": True, "parameters": STRICT}}


def test_calls_are_held_to_their_schema_in_every_format(engine: Opens, judge: tuple[Path, Any]) -> None:
    """By a model that knows none of them; the reader of answers is the judge."""
    tokenizer = load_tokenizer(judge[0])

    async def scenario(made: Any) -> None:
        async def held(family: str, written: ToolFormat) -> None:
            tag, end = calls_tag(written, [TOOL], forced=True), "}}" if family == "llama3" else written.held.end
            forced = asked(400, family, structural_tag=tag, stop=(end,), temperature=1.0, ignore_eos=False)
            text = tokenizer.decode((await made.generate(forced)).token_ids.tolist())
            call = Reading(format=written, kinds=kinds_of([TOOL])).read(text, final=True).calls[0]
            arguments = json.loads(call.arguments)
            assert call.name == "pick" and set(arguments) in ({"n"}, {"n", "word"}), text
            assert arguments["n"] in range(10) and arguments.get("word", "x") in ("x", "y"), text

        await asyncio.gather(*(held(family, written) for family, written in FORMATS.items()))

    run(engine, scenario)


def test_tokens_are_told_as_they_come_and_are_the_answers(generator: Opens) -> None:
    async def scenario(made: Any) -> None:
        told: list[int] = []
        before_the_end: list[int] = []
        asking = asyncio.create_task(made.generate(replace(asked(300), on_tokens=told.extend)))
        while not asking.done():
            before_the_end.append(len(told))
            await asyncio.sleep(0.001)
        completion = asking.result()
        assert told == completion.token_ids.tolist()
        assert completion.token_ids.tolist() == (await made.generate(asked(300, "again"))).token_ids.tolist()
        assert completion.logprobs.shape == completion.versions.shape == (300,)
        assert len({count for count in before_the_end if 0 < count < 300}) > 1  # not all at once

    run(generator, scenario)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probs_are_those_of_the_model_at_the_sampling_temperature(
    engine: Opens, judge: tuple[Path, Any], temperature: float
) -> None:
    request = asked(60, prompt=LONG_PROMPT, temperature=temperature)
    completion = run(engine, lambda made: made.generate(request))
    assert_logprobs(completion, logits(judge, LONG_PROMPT, completion), temperature)


def test_greedy_takes_the_likeliest_and_tells_its_log_prob_at_temperature_one(
    engine: Opens, judge: tuple[Path, Any]
) -> None:
    completion = run(engine, lambda made: made.generate(asked(60, prompt=LONG_PROMPT)))
    told = logits(judge, LONG_PROMPT, completion)
    assert completion.token_ids.tolist() == told.argmax(-1).tolist()
    assert_logprobs(completion, told)


@pytest.mark.parametrize(
    "limit", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.05}], ids=str
)
def test_E2_narrowed_sampling_keeps_to_its_set_and_its_log_probs_are_of_that(
    engine: Opens, judge: tuple[Path, Any], limit: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    completion = run(engine, lambda made: made.generate(asked(60, prompt=LONG_PROMPT, temperature=1.0, **limit)))
    told = logits(judge, LONG_PROMPT, completion)
    inside = kept(torch.softmax(told, -1), **limit, in_turn="vllm" in request.node.name)
    sampled = torch.tensor(completion.token_ids.astype(np.int64))[:, None]
    assert inside.gather(1, sampled).all()
    assert inside.sum() > len(completion.token_ids)  # there is something to sample from
    assert_logprobs(completion, torch.where(inside, told, -torch.inf))


def test_the_end_of_a_turn_ends_the_answer_unless_it_is_to_be_ignored(engine: Opens) -> None:
    async def scenario(made: Any) -> None:
        ended = await made.generate(asked(25, prompt=AFTER_A_TURN, ignore_eos=False))
        assert (ended.token_ids.tolist(), ended.stop, ended.text) == ([*TURN], StopReason.STOP, SAYS)
        ignored = await made.generate(asked(25, prompt=AFTER_A_TURN))
        assert (ignored.token_ids.tolist(), ignored.stop) == ([*TURN * 3][:25], StopReason.LENGTH)

    run(engine, scenario)


@pytest.mark.parametrize(
    ("stop", "num_tokens", "text"), [("漢", 5, "é"), ("漢😀", 9, "é"), ("é漢", 5, ""), ("😀", 9, "é漢")]
)
def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
    engine: Opens, stop: str, num_tokens: int, text: str
) -> None:
    request = asked(25, prompt=AFTER_A_TURN, stop=("nowhere", stop))
    completion = run(engine, lambda made: made.generate(request))
    assert completion.token_ids.tolist() == [*TURN[:num_tokens]]
    assert (completion.stop, completion.text) == (StopReason.STOP, text)


def test_a_budget_that_ends_within_a_character_loses_no_token_of_it(engine: Opens) -> None:
    """What an engine shows of half a character is its own affair, as long as the whole ones are right."""

    async def scenario(made: Any) -> None:
        told: list[int] = []
        for num in range(1, len(TURN)):
            told.clear()
            completion = await made.generate(
                replace(asked(num, f"cut{num}", prompt=AFTER_A_TURN), on_tokens=told.extend)
            )
            assert (completion.token_ids.tolist(), completion.stop) == ([*TURN[:num]], StopReason.LENGTH)
            assert told == [*TURN[: len(told)]]
            whole = SAYS.encode()[:num].decode(errors="ignore")
            assert completion.text.rstrip("\ufffd") == whole

    run(engine, scenario)


def test_a_seed_gives_the_same_sample_again_among_others(engine: Opens, request: pytest.FixtureRequest) -> None:
    async def scenario(made: Any) -> None:
        seeded = {"temperature": 1.0, "seed": 7}
        [first, *_] = await asyncio.gather(
            made.generate(asked(30, "first", **seeded)), *(made.generate(asked(30, f"o{k}", seed=k)) for k in range(3))
        )
        again = await made.generate(asked(30, "again", **seeded))
        other = await made.generate(asked(30, "other", temperature=1.0, seed=8))
        assert first.token_ids.shape == again.token_ids.shape == (30,)
        if "sglang" not in request.node.name:  # which heeds seeds only with kernels that no CPU has
            assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()

    run(engine, scenario)


def test_F7_the_longest_sequence_is_served_whole_and_a_longer_one_refused(
    engine: Opens, judge: tuple[Path, Any]
) -> None:
    async def scenario(made: Any) -> None:
        num = MAX_TOKENS - len(LONG_PROMPT)
        completion = await made.generate(asked(num, "fits", prompt=LONG_PROMPT, temperature=1.0))
        assert (len(completion.token_ids), completion.stop) == (num, StopReason.LENGTH)
        assert_logprobs(completion, logits(judge, LONG_PROMPT, completion))
        with pytest.raises(RequestRefused, match="refuses the request"):
            await made.generate(asked(4, "longer than the context", prompt=LONG_PROMPT * 40))

    run(engine, scenario)


def test_an_answer_that_is_aborted_before_its_first_token_is_empty(engine: Opens) -> None:
    """It waits behind as many as the engine runs at once."""

    async def scenario(made: Any) -> None:
        begun = [asyncio.Event() for _ in range(MAX_RUNNING)]
        running = [
            asyncio.create_task(made.generate(replace(asked(900, f"long{k}"), on_tokens=lambda _, k=k: begun[k].set())))
            for k in range(MAX_RUNNING)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        waiting = asyncio.create_task(made.generate(asked(50, "waits")))
        await asyncio.sleep(0.05)
        await made.abort("waits")
        completion = await waiting
        assert not any(task.done() for task in running)
        assert (completion.token_ids.size, completion.stop, completion.text) == (0, StopReason.ABORT, "")
        await asyncio.gather(*(made.abort(f"long{k}") for k in range(MAX_RUNNING)))
        assert [(await task).stop for task in running] == [StopReason.ABORT] * MAX_RUNNING

    assert MAX_RUNNING == REAL_MAX_RUNNING
    run(engine, scenario)


@pytest.mark.parametrize("kind", ["engine", *REAL])
def test_who_yields_goes_after_who_came_later_but_not_for_ever(kind: str, request: pytest.FixtureRequest) -> None:
    """SGLang's order is one of minutes, so that there even who yields for a moment goes after who came in them."""
    url: str = request.getfixturevalue(f"{kind}_url")
    begun: list[str] = []

    async def scenario() -> bool:
        """Whether the engine was full for as long as the three were on their way."""
        begun.clear()
        ours, patient, hasty = (EngineClient("engine-0", url, token="secret", yields_s=s) for s in (0.0, 60.0, 0.001))

        def ask(client: EngineClient, name: str, num: int) -> asyncio.Task[Completion]:
            told = replace(asked(num, name), on_tokens=lambda _: name in begun or begun.append(name))
            return asyncio.create_task(client.generate(told))

        for client in (ours, patient, hasty):  # a client's first request asks first what the engine can do
            await client.probe()
        running = [ask(ours, f"long{k}", 900) for k in range(MAX_RUNNING)]
        while len(begun) < MAX_RUNNING:
            await asyncio.sleep(0.01)
        waiting = []
        for client, name in ((patient, "evaluation"), (hasty, "first"), (ours, "second")):
            waiting.append(ask(client, name, 40))
            await asyncio.sleep(0.1)
        full = not any(task.done() for task in running)
        await ours.abort("long0")
        await asyncio.gather(*waiting)
        await asyncio.gather(*(ours.abort(f"long{k}") for k in range(MAX_RUNNING)))
        await asyncio.gather(*running)
        for client in (ours, patient, hasty):
            await client.close()
        return full

    assert any(asyncio.run(scenario()) for _ in range(5)), "a busy machine gives each too little time"
    fine, coarse = ["first", "second", "evaluation"], ["second", "evaluation", "first"]
    assert begun[MAX_RUNNING:] == (coarse if kind == "sglang" else fine)
