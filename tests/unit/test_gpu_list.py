"""What ``tests/GPU.md`` asks for can be asked for: no run of it is refused before it has reached a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
RUNS = re.findall(r"`(?:[A-Z_]+=\S+ )?RUN ([^`]+)`", (ROOT / "tests" / "GPU.md").read_text())


@pytest.mark.parametrize("words", sorted(set(RUNS)))
def test_a_run_of_the_list_is_one_that_begins(words: str) -> None:
    given = ["cluster.shape=local", "generation.python=ENV/bin/python", *words.split()]
    resolve(load([ROOT / "configs" / "gsm8k_grpo.yaml"], given))


def test_the_list_is_read() -> None:
    assert len(RUNS) >= 5
