from __future__ import annotations

import asyncio

import numpy as np
import pytest

from areal_hpc.errors import GenerationError
from areal_hpc.generation.scripted import ScriptedGenerator, Utf8Renderer, scripted_logprob, utf8_bytes
from areal_hpc.types import Completion, GenerationRequest, Sampling, StopReason


def request(num: int = 16, **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", token_ids=(1, 2), sampling=Sampling(max_new_tokens=num, **sampling), session="s"
    )


def test_answers_come_in_order_and_then_run_out() -> None:
    generator = ScriptedGenerator(["four", [7, 8]])
    first = asyncio.run(generator.generate(request()))
    second = asyncio.run(generator.generate(request()))
    assert (first.token_ids.tolist(), first.text, first.stop) == (list(b"four"), "four", StopReason.STOP)
    assert second.token_ids.tolist() == [7, 8]
    with pytest.raises(GenerationError, match="2 answers"):
        asyncio.run(generator.generate(request()))
    assert [asked.request_id for asked in generator.requests] == ["r"] * 3


def test_a_function_answers_by_the_request_and_may_fail() -> None:
    def script(asked: GenerationRequest) -> list[int]:
        if asked.session == "s":
            raise GenerationError("engine on fire")
        return [9]

    with pytest.raises(GenerationError, match="on fire"):
        asyncio.run(ScriptedGenerator(script).generate(request()))


def test_log_probs_are_a_fixed_function_of_token_and_position() -> None:
    completion = asyncio.run(ScriptedGenerator([[5, 5, 6]]).generate(request()))
    expected = [scripted_logprob(5, 0), scripted_logprob(5, 1), scripted_logprob(6, 2)]
    assert completion.logprobs == pytest.approx(expected)
    assert len(set(expected)) == 3
    assert all(-2.1 <= logprob < 0 for logprob in expected)


def test_budget_and_stop_tokens_are_obeyed() -> None:
    cut = asyncio.run(ScriptedGenerator(["abcdef"]).generate(request(3)))
    assert (cut.text, cut.stop) == ("abc", StopReason.LENGTH)
    exact = asyncio.run(ScriptedGenerator(["abc"]).generate(request(3)))
    assert (exact.text, exact.stop) == ("abc", StopReason.STOP)
    stopped = asyncio.run(ScriptedGenerator(["abcdef"]).generate(request(stop_token_ids=(ord("b"),))))
    assert (stopped.text, stopped.stop) == ("ab", StopReason.STOP)


def test_a_version_that_changes_in_the_middle_shows_in_the_answer() -> None:
    async def scenario() -> Completion:
        generator = ScriptedGenerator([[1] * 10], version=3)
        asking = asyncio.create_task(generator.generate(request()))
        for _ in range(4):
            await asyncio.sleep(0)
        generator.version = 4
        return await asking

    versions = asyncio.run(scenario()).versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {3, 4}


def test_an_abort_returns_what_there_is() -> None:
    async def scenario() -> Completion:
        generator = ScriptedGenerator([[1] * 1000])
        asking = asyncio.create_task(generator.generate(request(1000)))
        for _ in range(5):
            await asyncio.sleep(0)
        await generator.abort("r")
        await generator.abort("unknown")
        return await asking

    completion = asyncio.run(scenario())
    assert completion.stop is StopReason.ABORT
    assert 0 < len(completion.token_ids) < 10


def test_a_completion_is_returned_as_it_is() -> None:
    empty = Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        stop=StopReason.ABORT,
    )
    assert asyncio.run(ScriptedGenerator([empty]).generate(request())) is empty


def test_a_tokenizer_may_be_given() -> None:
    generator = ScriptedGenerator(
        ["ab"], encode=lambda text: [2 * token for token in utf8_bytes(text)], decode=lambda ids: f"{len(ids)} tokens"
    )
    completion = asyncio.run(generator.generate(request()))
    assert completion.token_ids.tolist() == [194, 196]
    assert completion.text == "2 tokens"


def test_the_shipped_renderer_writes_a_line_for_each_message_and_reads_its_own_bytes() -> None:
    renderer = Utf8Renderer()
    messages = ({"role": "system", "content": "é"}, {"role": "user", "content": "2 + 2?"})
    token_ids = renderer.render(messages)
    assert bytes(token_ids).decode() == "system: é\nuser: 2 + 2?\nassistant: "
    assert renderer.decode(token_ids) == bytes(token_ids).decode()
