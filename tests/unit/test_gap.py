"""When trainer and engines are said to differ, and what is suspected: by what the evidence rules out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.algorithms.stats import finish
from areal_hpc.config.load import load
from areal_hpc.training.gap import FRESH, FRESH_MAX, GapWatch, fresh_gap, suspects
from areal_hpc.types import Batch

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def gap(mean: float, largest: float | None = None) -> dict[str, float]:
    return {FRESH: mean, FRESH_MAX: 3 * mean if largest is None else largest}


def test_only_answers_of_the_weights_that_the_step_starts_from_are_measured() -> None:
    """In the step that makes version 4: an answer of version 3 with a token that nobody sampled and one without a
    number; one of version 2; and one that weights 3 went on with, from what weights 2 had left in the cache.
    """
    batch = Batch(
        token_ids=np.zeros(10, np.int32),
        loss_mask=np.array([True, True, False, True, True, True, True, False, True, True]),
        behaviour=np.array([-1.0, -2.0, 0.0, -1.5, -np.inf, -9.0, -9.0, 0.0, -5.0, -6.0], np.float32),
        versions=np.array([3, 3, -1, 3, 3, 2, 2, -1, 2, 3], np.int32),
        advantages=np.ones(10, np.float32),
        boundaries=np.array([0, 5, 7, 10], np.int32),
        proximal=np.array([-1.25, -2.0, 0.0, -1.0, -1.0, -1.0, -1.0, 0.0, -1.0, -1.0], np.float32),
    )
    told = finish(fresh_gap(batch, 4))
    assert told[FRESH] == pytest.approx((0.25 + 0.0 + 0.5) / 3)
    assert told[FRESH_MAX] == pytest.approx(0.5)
    assert math.isnan(finish(fresh_gap(batch, 9))[FRESH])
    assert fresh_gap(replace(batch, proximal=None), 4) == {}  # not computed, so it would be compared with itself


def test_what_is_small_or_not_measured_is_no_alarm() -> None:
    watch = GapWatch(0.05, [])
    assert watch.look(1, gap(0.05)) is None
    assert watch.look(2, gap(math.nan)) is None
    assert watch.look(3, {}) is None  # an algorithm without rollouts
    assert GapWatch(0.0, []).look(1, gap(7.0)) is None


def test_a_gap_from_the_first_step_on_is_suspected_to_be_a_setting() -> None:
    config = load([QUICKSTART], ["rollout.sampling.top_p=0.9", "rollout.sampling.temperature=0.7"])
    said = GapWatch(0.05, suspects(config)).look(1, gap(0.4))
    assert said is not None
    assert said.startswith("step 1: trainer and engines differ by 0.4 nats a token (largest 1.2)")
    order = ["rollout.sampling.top_p cut the distribution", "before the temperature 0.7", "another model, rotary"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)
    assert "other weights" not in said and "bfloat16" not in said


def test_a_gap_that_was_not_there_before_is_suspected_to_be_the_weights() -> None:
    watch = GapWatch(0.05, ["a setting"])
    for step in range(1, 6):
        assert watch.look(step, gap(0.002)) is None
    said = watch.look(6, gap(0.3))
    assert said is not None and "it was 0.002 in the 5 steps before" in said and "other weights" in said
    assert "a setting" not in said  # it was there all the time
    assert watch.look(7, gap(0.002)) is None


def test_a_few_tokens_that_differ_by_much_are_suspected_first() -> None:
    said = GapWatch(0.05, ["a setting"]).look(1, gap(0.06, 20.0))
    assert said is not None
    assert said.index("experts chosen otherwise") < said.index("a setting")


def test_rounding_is_suspected_where_there_is_some() -> None:
    (only,) = suspects(load([QUICKSTART], ["model.dtype=bfloat16"]))
    assert "bfloat16" in only
    assert suspects(load([QUICKSTART], [])) == []


def test_schemas_are_suspected_where_agents_may_ask_for_them() -> None:
    (only,) = suspects(load([QUICKSTART], ["agent.command=[agent]"]))
    assert "JSON of a schema" in only
