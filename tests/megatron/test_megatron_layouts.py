"""The Megatron trainer against the reference on every kind of layout: log-probs, loss, gradient norm, weights.

The reference is held against transformers in float64 by its own tests, on one rank; how many ranks there are, and what
each of them holds, must not be visible in the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import Run
from safetensors.torch import load_file
from steps import NUM_STEPS, make, make_reference, train, weights_of, whole_batch

from areal_hpc.config.schema import ParallelConfig
from areal_hpc.training.ranks import Ranks

pytestmark = [pytest.mark.megatron, pytest.mark.long]

LAYOUTS = [
    ("qwen3", "tp2"),
    ("qwen2", "tp4"),  # more ranks than key-value heads
    ("llama", "pp2"),
    ("qwen2", "pp2"),
    ("qwen2", "dp2"),
    ("qwen3", "tp2 pp2"),
    ("qwen2", "tp2 dp2"),
    ("qwen3", "cp2"),
    ("qwen3", "tp2 cp2"),
    ("llama", "pp2 vpp2"),
    ("qwen3_moe", "dp2 ep2"),
    ("qwen3_moe", "tp2 etp2"),
    ("qwen3_moe", "tp2 ep2 pp2"),
]


def whole_story(ranks: Ranks, parallel: ParallelConfig, path: Path, saved: Path) -> dict[str, Any]:
    backend = make(ranks, parallel, path)
    story = {"loaded": weights_of(backend), "logprobs": backend.logprobs(whole_batch())}
    story["reference"] = backend.reference_logprobs(whole_batch())
    story["told"] = train(backend, backend.data_ranks, 1, NUM_STEPS)
    backend.snapshot()(saved)
    return story | {"trained": weights_of(backend)}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the reference makes of the same steps."""
    stories = {}
    for family in {family for family, _ in LAYOUTS}:
        backend = make_reference(models[family])
        story = {"loaded": weights_of(backend), "logprobs": backend.logprobs(whole_batch())}
        story["told"] = train(backend, Ranks(), 1, NUM_STEPS)
        stories[family] = story | {"trained": weights_of(backend)}
    return stories


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_C35_every_layout_trains_as_the_reference_does(
    run: Run,
    models: dict[str, Path],
    expected: dict[str, dict[str, Any]],
    tmp_path: Path,
    family: str,
    layout: str,
) -> None:
    stories, right = run(layout, whole_story, models[family], tmp_path), expected[family]
    stored = load_file(models[family] / "model.safetensors")
    for story in stories:
        assert list(story["loaded"]) == sorted(stored)
        for name, tensor in story["loaded"].items():
            np.testing.assert_array_equal(tensor, stored[name].numpy(), err_msg=name)  # there and back, bit for bit
        np.testing.assert_allclose(story["logprobs"], right["logprobs"], atol=1e-5)
        np.testing.assert_array_equal(story["reference"], story["logprobs"])  # the same weights
        for found, told in zip(story["told"], right["told"], strict=True):
            assert found == pytest.approx(told, rel=2e-4, abs=2e-6)
        for name, tensor in story["trained"].items():
            np.testing.assert_array_equal(tensor, stories[0]["trained"][name], err_msg=name)
            np.testing.assert_allclose(tensor, right["trained"][name], atol=2e-5, err_msg=name)
