"""Deterministic training: the same bits, whatever is killed, and however many processes do the work.

``tests/benchmarks/deterministic.py --kills 20`` does the same with many more kills.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from bit_identity import STEPS, WORDS, learned, rows, run_with_kills
from launched import launched
from tiny_models import make_model

from areal_hpc.accelerator import REPRODUCIBLE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(path, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    return path


@pytest.mark.long
@pytest.mark.timeout(600)  # five starts of a whole run; half a minute where the machine has nothing else to do
@pytest.mark.parametrize(
    ("words", "victims"),
    [
        (("rollout.workers=2",), ("everything", "trainer-0", "rollout-1")),
        (("trainer.ranks=2",), ("trainer-1",)),
    ],
    ids=["one rank", "two ranks"],
)
def test_a_run_that_was_killed_learns_the_same_bits(
    words: Sequence[str], victims: Sequence[str], model: Path, tmp_path: Path
) -> None:
    of_trainer = [word for word in words if word.startswith("trainer.")]
    whole = f"trainer.total_steps={STEPS}"
    with launched(tmp_path, model, *WORDS, *of_trainer, whole, name="undisturbed", fresh=True) as started:
        started.wait_for_step(1)
        environments = [process.environ() for process in started.roles().values()]
        assert all(REPRODUCIBLE.items() <= environment.items() for environment in environments)
        assert started.wait() == 0, started.text
    undisturbed = rows(started.run)
    assert sorted(undisturbed) == list(range(1, STEPS + 1))
    outcomes = {str(record.values["outcome"]) for record in started.records("group")}
    assert outcomes == {"sealed", "filtered", "failed"}, "the prompts were to have all three"
    killed = run_with_kills(tmp_path, model, words, victims, seed=len(victims))
    assert rows(killed) == undisturbed
    assert learned(killed) == learned(started.run)
