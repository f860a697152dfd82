"""A whole run whose trainer is Megatron: a rank that is killed, and a run that changes its backend and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import GROUPS, Launched, command, launched, newest_checkpoint, num_consumed
from tiny_models import make_model

pytestmark = pytest.mark.megatron

MEGATRON = ("trainer.backend=megatron", "trainer.ranks=2", "checkpoint.every_steps=2", "limits.start_s=120")


def finished(started: Launched, last: int) -> None:
    assert started.wait() == 0, started.text
    assert newest_checkpoint(started.run).version.step == last
    assert num_consumed(started.run) == last * GROUPS
    assert started.left_over() == []


@pytest.mark.long
def test_C31_a_run_goes_on_with_another_backend_and_survives_a_dead_rank(tmp_path: Path) -> None:
    """The reference to step 2, then two tensor-parallel ranks of which one is killed, to step 6; then an export.

    Each start compares the weights that it serves with those of the checkpoint that it goes on from, bit for bit.
    """
    model = tmp_path / "tiny"
    make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    with launched(tmp_path, model, "trainer.total_steps=2") as started:
        finished(started, 2)
    words = (*MEGATRON, "trainer.parallel.tensor=2", "trainer.total_steps=6", "--resume")
    with launched(tmp_path, model, *words) as started:
        started.wait_for_step(4)
        started.roles()["trainer-1"].kill()
        finished(started, 6)
        assert "trainer-1 ended with signal 9 (SIGKILL)" in started.text
    assert "proven" in command("ledger", tmp_path / "run").stdout
    told = command("export", tmp_path / "run", tmp_path / "exported")
    assert told.returncode == 0 and "the weights of step 6" in told.stdout, told.stderr


def test_what_cannot_be_trained_so_is_said_before_anything_is_written(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", "qwen3", 1)
    words = (*MEGATRON, "trainer.ranks=3", "trainer.parallel.tensor=3")
    with launched(tmp_path, tmp_path / "tiny", *words) as started:
        assert started.wait() == 2
    assert "trainer.parallel.tensor = 3 does not divide its 4 attention heads" in started.text
    assert not (tmp_path / "run").exists()
