"""One run over three attempts: through, back to an early step with two trainer ranks, and on with one again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from launched import GROUPS, Launched, arguments, command, launched, newest_checkpoint, num_consumed
from tiny_models import make_model

from areal_hpc.buffer.chain import ChainName
from areal_hpc.buffer.epochs import load_lineage
from areal_hpc.buffer.records import RecordType
from areal_hpc.buffer.scan import ChainReader
from areal_hpc.checkpoint import at_step, steps_of
from areal_hpc.cli import main
from areal_hpc.roles.wiring.evaluations import results
from areal_hpc.run_dir import RunDir
from areal_hpc.watermark import Watermark

pytestmark = pytest.mark.long

PACED = ("rollout.reward=tiny_task:paced", "rollout.reward_workers=1")
"""So that a worker has time to hear of the last checkpoint, and to delete what it covers, before the run ends."""
EVERY = ("checkpoint.every_steps=2", "checkpoint.keep=1", "checkpoint.keep_every=2", "buffer.segment_mb=0.001", *PACED)
EVALUATE = ("evaluation.every_steps=2", "evaluation.num_prompts=2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one start of the run has left."""

    run: RunDir
    text: str
    trained: list[float | None]
    saved: list[float | None]
    tickets: set[int]
    """Of the sealed groups of the first attempt that have not been deleted from the ring."""


def tickets_of_the_first_attempt(run: RunDir) -> set[int]:
    names = [
        name for path in (run.ring / "chains").iterdir() if (name := ChainName.parse(path.name)) and name.epoch == 1
    ]
    records = [record for name in names for record in ChainReader(run.ring / "chains", name).poll(last=True)]
    return {record.meta["ticket"] for record in records if record.type is RecordType.DATA}


def told(started: Launched) -> Attempt:
    assert started.wait() == 0, started.text
    return Attempt(
        run=started.run,
        text=started.text,
        trained=[record.number("step") for record in started.records("step")],
        saved=[record.number("step") for record in started.records("checkpoint")],
        tickets=tickets_of_the_first_attempt(started.run),
    )


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[Attempt]:
    """Steps 1 to 6; then from step 2 to 7 with two ranks; then to 8 with one."""
    directory = tmp_path_factory.mktemp("resumed")
    model = directory / "tiny"
    make_model(model, "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
    made = []
    for words in (
        ("trainer.total_steps=6",),
        ("trainer.total_steps=7", "trainer.ranks=2", "--resume-from", "2"),
        ("trainer.total_steps=8", "--resume"),
    ):
        with launched(directory, model, *EVERY, *EVALUATE, *words) as started:
            made.append(told(started))
    refused = command("run", *arguments(directory, model), *EVERY, "--resume-from", "3")
    assert refused.returncode == 2
    assert refused.stderr.count("has no checkpoint of it; there are: 2, 4, 6, 8") == 1, refused.stderr
    return made


def test_C18_C35_each_attempt_goes_on_from_exactly_its_step_on_any_number_of_ranks(attempts: list[Attempt]) -> None:
    assert [started.trained for started in attempts] == [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6, 7], [8]]
    assert "going back to step 2: the checkpoints of steps 4, 6 and all that was trained" in attempts[1].text
    run = attempts[0].run
    assert load_lineage(run, 4) == {1: 2, 2: 7, 3: None}
    layouts = [at_step(run, load_lineage(run, epoch + 1), step).layout for epoch, step in ((1, 2), (2, 4), (3, 8))]
    assert layouts == [{"ranks": 1}, {"ranks": 2}, {"ranks": 1}]


def test_every_prompt_of_the_surviving_history_is_consumed_once(attempts: list[Attempt]) -> None:
    """The ring had deleted groups that step 2 had not yet consumed: those prompts were run again, none was skipped."""
    run = attempts[0].run
    assert 2 * GROUPS not in attempts[0].tickets, "nothing that step 2 lacks was deleted"
    assert attempts[0].tickets
    assert main(["ledger", str(run.root)]) == 0
    assert num_consumed(run) == 8 * GROUPS
    for step in (2, 4, 6):
        consumed = Watermark.from_state(at_step(run, load_lineage(run, 4), step).state["ring"]["consumed"])
        assert len(consumed) == step * GROUPS


def test_every_checkpoint_was_told_and_those_taken_back_are_gone(attempts: list[Attempt]) -> None:
    assert [started.saved for started in attempts] == [[2, 4, 6], [4, 6, 7], [8]]
    run = attempts[0].run
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-00000002.e00000001",
        "step-00000004.e00000002",
        "step-00000006.e00000002",
        "step-00000008.e00000003",
    ]
    assert steps_of(run, load_lineage(run, 4)) == [2, 4, 6, 8]
    assert newest_checkpoint(run).version == (3, 8)


def test_C20_what_was_taken_back_is_evaluated_again(attempts: list[Attempt]) -> None:
    """Step 6 may have been passed over by the evaluator of attempt 2; what attempt 1 found there counts for nothing."""
    epochs = {step: result["epoch"] for step, result in results(attempts[0].run, 3).items()}
    assert {step for step, epoch in epochs.items() if epoch == 1} <= {0, 2}
    assert (epochs[0], epochs[7], epochs[8]) == (1, 2, 3)
