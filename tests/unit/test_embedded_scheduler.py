"""Continuous batching in the embedded engine: what comes out does not depend on who else was there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from embedded_engines import (
    FREE,
    GREEDY,
    LIMIT_S,
    PROMPT,
    MakeEngine,
    Models,
    assert_logprobs,
    at_token,
    complete,
    expected_logprobs,
    one,
    submit,
)

from areal_hpc.errors import DataError
from areal_hpc.generation.embedded.engine import EmbeddedEngine

# -- batching


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_whoever_comes_and_goes(
    models: Models, make_engine: MakeEngine, temperature: float
) -> None:
    engine = make_engine()
    sequences = [
        one(engine, tuple(range(i, 2 * i + 3)), replace(FREE, max_new_tokens=5 + 7 * (i % 5), temperature=temperature))
        for i in range(12)
    ]
    early, late = sequences[:6], sequences[6:]
    at_token(early[4], 3, lambda: engine.scheduler.submit(late))  # while others run and wait
    complete(engine, *early)
    for sequence in sequences:
        sequence.done.result(LIMIT_S)
        assert len(sequence.token_ids) == sequence.params.max_new_tokens
        assert sequence.finish_reason == {"type": "length", "length": sequence.params.max_new_tokens}
        assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence, temperature))
    assert engine.scheduler.stats()["num_generated_tokens"] == sum(len(s.token_ids) for s in sequences)


def test_greedy_is_the_greedy_of_transformers(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine()
    [sequence] = complete(engine, one(engine, PROMPT, GREEDY))
    reference = models["old"][1].generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=None
    )
    assert sequence.token_ids == reference[0, len(PROMPT) :].tolist()
    assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence))


def test_samples_of_one_prompt_compute_it_once(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine()
    samples = complete(engine, *engine.sequences(PROMPT, replace(FREE, n=4)))
    assert [sequence.num_cached for sequence in samples] == [0, 19, 19, 19]
    assert len({tuple(sequence.token_ids) for sequence in samples}) == 4
    for sequence in samples:
        assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence))


def test_prompt_logprobs_are_those_of_transformers(models: Models, make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens=700)
    prompt = tuple(i % 256 for i in range(600))  # more positions than are scored at once
    [sequence] = complete(engine, one(engine, prompt, FREE, logprob_start=5, num_top=2))
    with torch.no_grad():
        logprobs = torch.log_softmax(models["old"][1](torch.tensor([prompt])).logits[0].float(), -1)
    expected = logprobs[5:-1].gather(1, torch.tensor(prompt)[6:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(sequence.input_logprobs), expected, atol=1e-4, rtol=0)
    values, token_ids = logprobs[5].topk(2)
    assert [token_id for _, token_id in sequence.input_top_logprobs[0]] == token_ids.tolist()
    assert [value for value, _ in sequence.input_top_logprobs[0]] == pytest.approx(values.tolist(), abs=1e-4)
    assert len(sequence.input_top_logprobs) == 594
    assert len(sequence.top_logprobs) == 20


# -- seeds


def test_F10_a_seed_gives_the_same_sample_whatever_the_batch(make_engine: MakeEngine) -> None:
    alone, crowded = make_engine(), make_engine(seed=9)
    [expected] = complete(alone, one(alone, PROMPT, replace(FREE, sampling_seed=77)))
    others = [one(crowded, PROMPT[i:], replace(FREE, max_new_tokens=3 + i, sampling_seed=i)) for i in range(6)]
    [*_, sequence] = complete(crowded, *others, one(crowded, PROMPT, replace(FREE, sampling_seed=77)))
    assert sequence.token_ids == expected.token_ids
    [other] = complete(alone, one(alone, PROMPT, replace(FREE, sampling_seed=78)))
    assert other.token_ids != expected.token_ids


def test_F10_replicas_without_request_seeds_differ(make_engine: MakeEngine) -> None:
    def answer(**options: Any) -> list[int]:
        engine = make_engine(**options)
        return complete(engine, one(engine, PROMPT, replace(FREE, sampling_seed=None)))[0].token_ids

    assert answer(seed=1) == answer(seed=1)
    assert answer(seed=1) != answer(seed=2)
    assert answer(seed=None) != answer(seed=None)


# -- ends


def test_a_stop_token_ends_and_wins_over_the_budget(make_engine: MakeEngine) -> None:
    engine = make_engine()
    [free] = complete(engine, one(engine, PROMPT, FREE))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    for budget in (first + 1, 20):
        params = replace(FREE, stop_token_ids=frozenset({stop}), max_new_tokens=budget)
        [sequence] = complete(engine, one(engine, PROMPT, params))
        assert sequence.token_ids == free.token_ids[: first + 1]
        assert sequence.finish_reason == {"type": "stop", "matched": stop}


def test_end_of_turn_ends_unless_ignored_and_not_before_the_minimum(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=16)
    [end] = engine.model.architecture.eos_token_ids
    seeds = [replace(FREE, max_new_tokens=200, sampling_seed=seed) for seed in range(16)]
    ignoring = complete(engine, *(one(engine, PROMPT, params) for params in seeds))
    ending = complete(engine, *(one(engine, PROMPT, replace(params, ignore_eos=False)) for params in seeds))
    assert any(sequence.token_ids[-1] == end for sequence in ending)
    for ignored, ended in zip(ignoring, ending, strict=True):
        length = ignored.token_ids.index(end) + 1 if end in ignored.token_ids else 200
        assert ended.token_ids == ignored.token_ids[:length]
    late = [replace(params, ignore_eos=False, min_new_tokens=150) for params in seeds]
    for sequence in complete(engine, *(one(engine, PROMPT, params) for params in late)):
        assert end not in sequence.token_ids[:150]
        assert len(sequence.token_ids) >= 150


def test_a_stop_string_ends_at_the_token_that_completes_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.text is not None
    free = complete(engine, one(engine, PROMPT, replace(FREE, max_new_tokens=200)))[0].token_ids
    pairs = [(i, engine.text.decode(free[i : i + 2])) for i in range(len(free) - 1)]
    stop = next(text for _, text in pairs if text.isascii() and text.isprintable())
    end = next(i for i in range(len(free)) if stop in engine.text.decode(free[: i + 1]))
    params = replace(FREE, max_new_tokens=200, stop=("never said", stop))
    [sequence] = complete(engine, one(engine, PROMPT, params))
    assert sequence.token_ids == free[: end + 1]
    assert sequence.finish_reason == {"type": "stop", "matched": stop}
    [later] = complete(engine, one(engine, PROMPT, replace(params, min_new_tokens=end + 2)))
    assert later.token_ids[: end + 2] == free[: end + 2]


# -- refusals


def test_F7_what_does_not_fit_is_refused_and_what_just_fits_is_not(make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens=32)
    for prompt, params in (((), FREE), (PROMPT, FREE), ((272,), GREEDY), ((-1,), GREEDY)):
        with pytest.raises(DataError):
            engine.sequences(prompt, params)
    [sequence] = complete(engine, one(engine, PROMPT[:12], FREE))
    assert len(sequence.history) == 32


def test_a_context_beyond_the_model_is_refused(models: Models) -> None:
    with pytest.raises(DataError, match="2048"):
        EmbeddedEngine(models["old"][0], max_tokens=2049)
    with pytest.raises(DataError, match="float16"):
        EmbeddedEngine(models["old"][0], dtype="float16")


def test_the_queue_is_in_order_of_priority_and_of_arrival_and_what_has_begun_stays_first(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_running=1)
    numbers = [(5, 0), (3, 1), (5, 2), (1, 3), (3, 4), (1, 5), (9, 6)]
    begun: list[int] = []

    def sequence(priority: int, number: int) -> Any:
        [made] = engine.sequences(PROMPT, replace(FREE, max_new_tokens=3), priority=priority)
        made.listener = lambda _: None if number in begun else begun.append(number)
        return made

    first = sequence(7, -1)
    others = [sequence(priority, number) for priority, number in numbers]
    at_token(first, 1, lambda: (begun.append(-1), engine.scheduler.retract(), engine.scheduler.submit(others)))
    submit(engine, first)
    for one_of_them in (first, *others):
        one_of_them.done.result(LIMIT_S)
    assert begun == [-1, *(number for _, number in sorted(numbers))]
