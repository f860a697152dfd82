"""Continuous batching in the embedded engine: what comes out does not depend on who else was there, or on pauses.

Actions that must happen at an exact token are taken from a sequence's listener, which runs in the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model

from areal_hpc.errors import DataError, GenerationError
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.scheduler import PAUSE, Quarantined
from areal_hpc.generation.embedded.sequence import SamplingParams, Sequence

LIMIT_S = 60.0
FREE = SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=1)
GREEDY = replace(FREE, temperature=0.0)
PROMPT = tuple(range(40, 60))
MakeEngine = Callable[..., EmbeddedEngine]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Two checkpoints of one architecture, with the transformers models that wrote them."""
    made = {}
    for seed, name in enumerate(("old", "new")):
        directory = tmp_path_factory.mktemp(name)
        made[name] = (directory, make_model(directory, "qwen2", seed))
    return made


@pytest.fixture
def make_engine(models: dict[str, tuple[Path, Any]]) -> Iterator[MakeEngine]:
    engines: list[EmbeddedEngine] = []

    def make(**options: Any) -> EmbeddedEngine:
        defaults = {"max_running": 4, "max_tokens": 256, "seed": 0, "version": "1"}
        engine = EmbeddedEngine(models["old"][0], **(defaults | options))
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def submit(engine: EmbeddedEngine, *sequences: Sequence) -> None:
    engine.scheduler.call(lambda: engine.scheduler.submit(sequences)).result(LIMIT_S)


def complete(engine: EmbeddedEngine, *sequences: Sequence) -> list[Sequence]:
    submit(engine, *sequences)
    for sequence in sequences:
        sequence.done.result(LIMIT_S)
    return list(sequences)


def one(engine: EmbeddedEngine, prompt: tuple[int, ...], params: SamplingParams, **options: Any) -> Sequence:
    [sequence] = engine.sequences(prompt, params, **options)
    return sequence


def at_token(sequence: Sequence, num: int, action: Callable[[], object]) -> Event:
    """Do ``action`` in the engine's thread right after token ``num``; the event says that it has been done."""
    done = Event()

    def listen(num_tokens: int) -> None:
        if num_tokens == num:
            action()
            done.set()

    sequence.listener = listen
    return done


def expected_logprobs(model: Any, sequence: Sequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs [T] that ``model`` gives the sampled tokens, in one pass over the whole sequence."""
    token_ids = torch.tensor([sequence.history])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(token_ids).logits[0].float() / temperature, -1)
    start = len(sequence.prompt)
    return logprobs[start - 1 : -1].gather(1, token_ids[0, start:, None])[:, 0]


def assert_logprobs(sequence: Sequence, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=1e-4, rtol=0)


def load(engine: EmbeddedEngine, directory: Path, version: str, *, flush_cache: bool) -> None:
    engine.updates.load_directory(directory, version, flush_cache=flush_cache, abort_all=False)


# -- batching


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_whoever_comes_and_goes(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine, temperature: float
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


def test_greedy_is_the_greedy_of_transformers(models: dict[str, tuple[Path, Any]], make_engine: MakeEngine) -> None:
    engine = make_engine()
    [sequence] = complete(engine, one(engine, PROMPT, GREEDY))
    reference = models["old"][1].generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=None
    )
    assert sequence.token_ids == reference[0, len(PROMPT) :].tolist()
    assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence))


def test_samples_of_one_prompt_compute_it_once(models: dict[str, tuple[Path, Any]], make_engine: MakeEngine) -> None:
    engine = make_engine()
    samples = complete(engine, *engine.sequences(PROMPT, replace(FREE, n=4)))
    assert [sequence.num_cached for sequence in samples] == [0, 19, 19, 19]
    assert len({tuple(sequence.token_ids) for sequence in samples}) == 4
    for sequence in samples:
        assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence))


def test_prompt_logprobs_are_those_of_transformers(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine
) -> None:
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


@pytest.mark.parametrize("num", [1, 2, 19])
def test_F1_an_abort_keeps_exactly_the_tokens_so_far(make_engine: MakeEngine, num: int) -> None:
    engine = make_engine()
    [free] = complete(engine, one(engine, PROMPT, FREE))
    sequence, beside = one(engine, PROMPT, FREE, request_id="a"), one(engine, PROMPT, FREE, request_id="b")
    at_token(sequence, num, lambda: engine.scheduler.abort("a"))
    complete(engine, sequence, beside)
    assert sequence.token_ids == free.token_ids[:num]
    assert len(sequence.logprobs) == num
    assert sequence.finish_reason is not None
    assert sequence.finish_reason["type"] == "abort"
    assert beside.token_ids == free.token_ids


def test_F1_an_abort_before_the_first_token_gives_an_empty_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    running, waiting = one(engine, PROMPT, FREE), one(engine, PROMPT, FREE, request_id="w")
    at_token(running, 1, lambda: engine.scheduler.abort("w"))
    complete(engine, running, waiting)
    assert waiting.token_ids == []
    assert waiting.spans(0) == []
    assert len(running.token_ids) == 20


def test_aborting_a_request_ends_all_its_samples_and_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine()
    samples = engine.sequences(PROMPT, replace(FREE, n=3), request_id="r")
    other = one(engine, PROMPT, FREE, request_id="r1")
    at_token(samples[0], 4, lambda: engine.scheduler.abort("r"))
    complete(engine, *samples, other)
    assert [len(sequence.token_ids) for sequence in samples] == [4, 3, 3]  # copies start one step later
    assert len(other.token_ids) == 20


# -- pauses and updates


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_nothing_in_what_is_sampled(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine, mode: str
) -> None:
    engine = make_engine()
    [expected] = complete(engine, one(engine, PROMPT, FREE))
    sequence, other = one(engine, PROMPT, FREE), one(engine, PROMPT[5:], FREE)
    paused = at_token(sequence, 6, lambda: engine.scheduler.pause(mode))
    submit(engine, sequence, other)
    assert paused.wait(LIMIT_S)
    stats = engine.scheduler.call(engine.scheduler.stats).result(LIMIT_S)
    assert (stats["num_running"], stats["num_waiting"]) == ((2, 0) if mode == "in_place" else (0, 2))
    late = one(engine, PROMPT, FREE)
    submit(engine, late)
    assert len(sequence.token_ids) == 6  # nothing is sampled while paused
    engine.scheduler.call(lambda: engine.scheduler.holds.discard(PAUSE))
    for done in (sequence, other, late):
        done.done.result(LIMIT_S)
    assert sequence.token_ids == late.token_ids == expected.token_ids
    assert sequence.num_retractions == (mode == "retract")
    assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence))
    assert_logprobs(other, expected_logprobs(models["old"][1], other))


def test_D15_an_aborting_pause_leaves_nothing_running(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=2)
    sequences = [one(engine, PROMPT, FREE) for _ in range(4)]
    at_token(sequences[0], 5, lambda: engine.scheduler.pause("abort"))
    complete(engine, *sequences)
    assert all(sequence.finish_reason["type"] == "abort" for sequence in sequences if sequence.finish_reason)
    assert [len(sequence.token_ids) for sequence in sequences] == [5, 4, 0, 0]  # the copy is one behind
    stats = engine.scheduler.call(engine.scheduler.stats).result(LIMIT_S)
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def test_D9_an_update_in_place_labels_each_token_with_the_weights_that_sampled_it(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine
) -> None:
    """Tokens after the swap are sampled by new weights over a cache of the old: transformers does the same here."""
    engine = make_engine()
    sequence = one(engine, PROMPT, FREE)
    paused = at_token(sequence, 8, lambda: engine.scheduler.pause("in_place"))
    submit(engine, sequence)
    assert paused.wait(LIMIT_S)
    load(engine, models["new"][0], "2", flush_cache=False)
    engine.scheduler.call(lambda: engine.scheduler.holds.discard(PAUSE))
    sequence.done.result(LIMIT_S)
    assert sequence.spans(20) == [{"version": "1", "start": 0, "end": 8}, {"version": "2", "start": 8, "end": 20}]

    old, new = models["old"][1], models["new"][1]
    history, num_old = torch.tensor([sequence.history]), len(PROMPT) + 7  # the last token is not in the cache yet
    with torch.no_grad():
        first = old(history[:, :num_old], use_cache=True)
        second = new(history[:, num_old:], past_key_values=first.past_key_values)
    logprobs = torch.log_softmax(torch.cat((first.logits, second.logits), 1)[0].float(), -1)
    expected = logprobs[len(PROMPT) - 1 : -1].gather(1, history[0, len(PROMPT) :, None])[:, 0]
    assert_logprobs(sequence, expected)


def test_D18_a_flushing_update_recomputes_what_runs_under_the_new_weights(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    sequence = one(engine, PROMPT, FREE)
    paused = at_token(sequence, 8, lambda: engine.scheduler.pause("in_place"))
    submit(engine, sequence)
    assert paused.wait(LIMIT_S)
    load(engine, models["new"][0], "2", flush_cache=True)
    engine.scheduler.call(lambda: engine.scheduler.holds.discard(PAUSE))
    sequence.done.result(LIMIT_S)
    old, new = (expected_logprobs(models[name][1], sequence) for name in ("old", "new"))
    assert_logprobs(sequence, torch.cat((old[:8], new[8:])))
    assert [span["version"] for span in sequence.spans(20)] == ["1", "2"]


def test_D18_a_new_request_never_copies_a_row_of_older_weights(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    sequence, same_prompt = one(engine, PROMPT, FREE), one(engine, PROMPT, FREE)
    paused = at_token(sequence, 8, lambda: engine.scheduler.pause("in_place"))
    submit(engine, sequence)
    assert paused.wait(LIMIT_S)
    load(engine, models["new"][0], "2", flush_cache=False)
    submit(engine, same_prompt)
    engine.scheduler.call(lambda: engine.scheduler.holds.discard(PAUSE))
    same_prompt.done.result(LIMIT_S)
    assert same_prompt.num_cached == 0
    assert_logprobs(same_prompt, expected_logprobs(models["new"][1], same_prompt))


def test_versions_that_sampled_nothing_leave_no_span(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = one(engine, PROMPT, FREE)

    def rename_twice() -> None:
        engine.scheduler.set_version("2")
        engine.scheduler.set_version("3")

    at_token(sequence, 8, rename_twice)
    complete(engine, sequence)
    assert sequence.spans(20) == [{"version": "1", "start": 0, "end": 8}, {"version": "3", "start": 8, "end": 20}]
    assert sequence.spans(8) == [{"version": "1", "start": 0, "end": 8}]


# -- faults


def test_D23_logits_that_are_not_finite_fail_their_request_and_leave_nothing_behind(
    models: dict[str, tuple[Path, Any]], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    weights = load_file(models["old"][0] / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    damaged = torch.full_like(weights[name], torch.nan)
    engine.scheduler.call(lambda: engine.model.load_weights([(name, damaged)])).result(LIMIT_S)
    sequence = one(engine, tuple(range(100)), FREE)
    submit(engine, sequence)
    with pytest.raises(GenerationError, match="not finite"):
        sequence.done.result(LIMIT_S)
    load(engine, models["old"][0], "1", flush_cache=True)
    # The short one gets the same row. Once a longer one decodes beside it, what lies behind its end is multiplied by 0.
    short, long = one(engine, PROMPT, FREE), one(engine, tuple(range(120)), FREE)
    at_token(short, 2, lambda: engine.scheduler.submit([long]))
    complete(engine, short)
    long.done.result(LIMIT_S)
    for sequence in (short, long):
        assert_logprobs(sequence, expected_logprobs(models["old"][1], sequence))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_crash_fails_every_request_and_every_later_call(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    engine = make_engine(max_running=2)

    def crash(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.model, phase, crash)
    sequences = [one(engine, PROMPT, FREE) for _ in range(5)]
    submit(engine, *sequences)
    for sequence in sequences:
        with pytest.raises(GenerationError, match="out of memory"):
            sequence.done.result(LIMIT_S)
    assert not engine.scheduler.alive
    with pytest.raises(GenerationError, match="out of memory"):
        engine.scheduler.call(lambda: None)


def test_closing_returns_what_there_is(make_engine: MakeEngine) -> None:
    engine = make_engine(max_running=1)
    running, waiting = one(engine, PROMPT, FREE), one(engine, PROMPT, FREE)
    paused = at_token(running, 3, lambda: engine.scheduler.pause("in_place"))
    submit(engine, running, waiting)
    assert paused.wait(LIMIT_S)
    engine.close()
    for sequence, num in ((running, 3), (waiting, 0)):
        sequence.done.result(0)
        assert len(sequence.token_ids) == num
    with pytest.raises(GenerationError, match="closed"):
        engine.scheduler.call(lambda: None)


def test_a_quarantined_engine_takes_no_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.scheduler.call(engine.scheduler.quarantine).result(LIMIT_S)
    with pytest.raises(Quarantined):
        submit(engine, one(engine, PROMPT, FREE))


def test_F7_what_does_not_fit_is_refused_and_what_just_fits_is_not(make_engine: MakeEngine) -> None:
    engine = make_engine(max_tokens=32)
    for prompt, params in (((), FREE), (PROMPT, FREE), ((272,), GREEDY), ((-1,), GREEDY)):
        with pytest.raises(DataError):
            engine.sequences(prompt, params)
    [sequence] = complete(engine, one(engine, PROMPT[:12], FREE))
    assert len(sequence.history) == 32


def test_a_context_beyond_the_model_is_refused(models: dict[str, tuple[Path, Any]]) -> None:
    with pytest.raises(DataError, match="2048"):
        EmbeddedEngine(models["old"][0], max_tokens=2049)
    with pytest.raises(DataError, match="float16"):
        EmbeddedEngine(models["old"][0], dtype="float16")
