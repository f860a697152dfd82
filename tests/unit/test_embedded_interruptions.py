"""Aborts, pauses, updates and faults in the embedded engine, each at an exact token.

Actions that must happen at an exact token are taken from a sequence's listener, which runs in the engine's thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from embedded_engines import (
    FREE,
    LIMIT_S,
    PROMPT,
    MakeEngine,
    Models,
    assert_logprobs,
    at_token,
    complete,
    expected_logprobs,
    load,
    one,
    submit,
)
from safetensors.torch import load_file

from areal_hpc.errors import GenerationError
from areal_hpc.generation.embedded.scheduler import PAUSE, Quarantined

# -- aborts


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
def test_a_pause_changes_nothing_in_what_is_sampled(models: Models, make_engine: MakeEngine, mode: str) -> None:
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
    models: Models, make_engine: MakeEngine
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
    models: Models, make_engine: MakeEngine
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


def test_D18_a_new_request_never_copies_a_row_of_older_weights(models: Models, make_engine: MakeEngine) -> None:
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
    models: Models, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    weights = load_file(models["old"][0] / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    damaged = torch.full_like(weights[name], torch.nan)
    engine.scheduler.call(lambda: engine.model.serving.load([(name, damaged)])).result(LIMIT_S)
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
