"""What squeue and sacct say, read from outputs as several versions of Slurm write them, and from commands that fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_hpc.cluster import jobs
from areal_hpc.cluster.jobs import (
    Place,
    accounted,
    cancel,
    first_failure,
    last_incarnation,
    parse_accounts,
    parse_queue,
    places,
    queued,
    queued_beside,
    release,
    submit_script,
)
from areal_hpc.errors import SubmissionError


def command(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose programs go first."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


# 20.11 to 24.11 write these fields alike; what differs is what stands where there is nothing.
@pytest.mark.parametrize("nothing", ["N/A", "Unknown", ""])
def test_A31_A32_fields_are_read_by_their_separator(nothing: str) -> None:
    found = parse_queue(f"12|PENDING|Resources|{nothing}\n")
    assert found is not None
    assert (found.state, found.reason, found.starts) == ("PENDING", "Resources", "")


def test_a_component_that_waits_says_why_the_job_does() -> None:
    text = "12+0|PENDING|None|2026-11-30T05:00:00\n12+1|PENDING|BadConstraints|N/A\n"
    found = parse_queue(text)
    assert found is not None
    assert (found.state, found.reason, found.starts) == ("PENDING", "BadConstraints", "2026-11-30T05:00:00")


def test_no_lines_are_no_job() -> None:
    assert parse_queue("\n") is None


@pytest.mark.parametrize("state", ["REQUEUED", "REQUEUE_HOLD", "PREEMPTED", "SPECIAL_EXIT", "COMPLETING"])
def test_A20_whatever_the_queue_lists_is_not_over(commands: Path, state: str) -> None:
    command(commands, "squeue", f'echo "12|{state}|None|N/A"')
    found = queued("12")
    assert found is not None
    assert found.state == state


def test_a_job_that_the_queue_has_forgotten_is_none(commands: Path) -> None:
    command(commands, "squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert queued("12") is None


def test_a_queue_that_does_not_answer_is_an_error_with_its_words(commands: Path) -> None:
    command(commands, "squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(SubmissionError, match="squeue failed: Unable to contact slurm controller; try again"):
        queued("12")
    command(commands, "scancel", 'echo "Invalid user" >&2; exit 1')
    with pytest.raises(SubmissionError, match="scancel failed: Invalid user"):
        cancel(["12"])


def test_a_command_that_hangs_or_is_not_there_is_an_error(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(commands, "squeue", "exec sleep 60")
    monkeypatch.setattr(jobs, "ASK_S", 0.2)
    with pytest.raises(SubmissionError, match=r"squeue does not answer: .*timed out"):
        queued("12")
    monkeypatch.setenv("PATH", str(commands / "nowhere"))
    with pytest.raises(SubmissionError, match=r"squeue does not answer: .*; type this on a login node"):
        queued("12")


def test_a_job_and_the_tasks_of_arrays_are_told_apart_by_one_call(commands: Path) -> None:
    rows = ["12|RUNNING|None|now", "13_4|RUNNING|None|now", "13_5|PENDING|Priority|N/A", "13_6|PENDING|Priority|N/A"]
    rows += ["13_3|COMPLETING|None|now", "15_3|PENDING|Priority|N/A", "16_1|COMPLETING|None|now"]
    lines = "\n".join(f'echo "{row}"' for row in rows)
    command(commands, "squeue", f'echo "$@" >>{commands}/calls\n{lines}')
    found, tasks = queued_beside("12", ["13", "15", "16"])
    assert found is not None
    assert (found.state, tasks) == ("RUNNING", {"13": {"PENDING": 2, "RUNNING": 1}, "15": {"PENDING": 1}})
    (call,) = (commands / "calls").read_text(encoding="utf-8").splitlines()
    assert "--array --jobs 12,13,15,16 " in call
    command(commands, "squeue", "true")
    assert queued_beside("12", ["13"]) == (None, {})


def test_a_script_is_handed_in_as_it_is(commands: Path) -> None:
    script = commands / "script"
    script.touch()
    command(commands, "sbatch", f'echo "$@" >{commands}/call; echo "a word of the site"; echo "14;cluster"')
    assert submit_script(script, ["--array=1-3"]) == "14"
    assert (commands / "call").read_text(encoding="utf-8") == f"--parsable --array=1-3 {script}\n"
    command(commands, "sbatch", 'echo "Invalid partition" >&2; exit 1')
    with pytest.raises(SubmissionError, match=f"sbatch refused the job: Invalid partition; the script is {script}"):
        submit_script(script, [])


HET = """\
12+0|PREEMPTED|0:0|0:0|2026-11-30T05:00:00|2026-11-30T05:00:40|40||
12+0.batch|CANCELLED|0:15||2026-11-30T05:00:00|2026-11-30T05:00:41|41||
12+0|FAILED|1:0|9:0|2026-11-30T05:01:00|2026-11-30T05:02:00|60|7200|billing=4,cpu=4,gres/gpu=8,gres/gpu:h100=8,mem=1G,node=2
12+0.batch|FAILED|1:0||2026-11-30T05:01:00|2026-11-30T05:02:00|60||
12+0.0|CANCELLED by 1000|0:9||2026-11-30T05:01:02|2026-11-30T05:01:40|38||
12+1|FAILED|1:0|7:0|2026-11-30T05:01:00|2026-11-30T05:02:00|60|K|
12+1.0|FAILED|7:0||2026-11-30T05:01:02|2026-11-30T05:01:30|28||
"""


def test_A29_the_step_that_failed_first_is_found_behind_the_jobs_own_code() -> None:
    rows = last_incarnation(parse_accounts(HET))
    assert [(row.component, row.step, row.state) for row in rows] == [
        (0, "", "FAILED"),
        (0, "batch", "FAILED"),
        (0, "0", "CANCELLED"),
        (1, "", "FAILED"),
        (1, "0", "FAILED"),
    ]
    assert (rows[0].derived_code, rows[0].elapsed_s, rows[0].energy_j, rows[3].energy_j) == (9, 60, 7200, None)
    assert [(row.nodes, row.gpus) for row in (rows[0], rows[3])] == [(2, 8), (0, 0)]
    failure = first_failure(rows)
    assert failure is not None
    assert (failure.job, failure.component, failure.step, failure.exit_code) == ("12", 1, "0", 7)


def test_A29_a_job_that_succeeds_over_a_failed_step_still_tells_of_it() -> None:
    text = "5|COMPLETED|0:0|1:0|a|b|1||\n5.batch|COMPLETED|0:0||a|b|1||\n5.0|FAILED|1:0||a|b|1||\n"
    failure = first_failure(parse_accounts(text))
    assert failure is not None
    assert (failure.step, failure.exit_code) == ("0", 1)


def test_the_script_itself_is_named_where_no_step_failed() -> None:
    text = "5|FAILED|2:0|0:0|a|b|1||\n5.batch|FAILED|2:0||a|b|1||\n5.0|COMPLETED|0:0||a|a|1||\n"
    failure = first_failure(parse_accounts(text))
    assert failure is not None
    assert failure.step == "batch"
    assert first_failure(parse_accounts("5|CANCELLED by 0|0:0|0:0|None|b|0||\n")) is None


def test_an_incarnation_that_never_began_has_no_steps_of_the_one_before() -> None:
    text = "5|NODE_FAIL|0:0|0:0|a|b|1||\n5.0|FAILED|1:0||a|b|1||\n5|CANCELLED by 0|0:0|0:0|None|c|0||\n"
    (row,) = last_incarnation(parse_accounts(text))
    assert (row.state, row.start, row.step) == ("CANCELLED", "", "")


def test_a_site_without_accounts_says_so(commands: Path) -> None:
    command(commands, "sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
    with pytest.raises(SubmissionError, match="storage is disabled; this site may keep no accounts"):
        accounted(["12"])


def test_of_several_jobs_each_that_slurm_lets_go_is_cancelled_and_each_other_is_named(commands: Path) -> None:
    """scancel itself goes on after one that it is refused."""
    said = "scancel: error: Kill job error on job id {}: {}"
    over = said.format(12, "Job/step already completing or completed")
    command(commands, "scancel", f'echo "$*" >>{commands}/calls; echo "{over}" >&2; exit 1')
    cancel(["12", "13_1"])
    assert (commands / "calls").read_text() == "12 13_1\n"
    refused = said.format("13_1", "Access/permission denied"), said.format(15, "Unable to contact slurm controller")
    command(commands, "scancel", f'printf "%s\\n" "{over}" "{refused[0]}" "{refused[1]}" >&2; exit 1')
    with pytest.raises(SubmissionError, match=r"13_1: Access/permission denied; .*15: Unable to contact") as raised:
        cancel(["12", "13_1", "15"])
    assert "job id 12" not in str(raised.value)
    command(commands, "scancel", "exit 9")
    with pytest.raises(SubmissionError, match="scancel failed: it ended with 9 and no word; try again"):
        cancel(["12"])


def test_a_job_that_is_held_has_no_priority_and_is_released(commands: Path) -> None:
    rows = "9_1|PENDING|0|JobHeldUser", "9_2|RUNNING|4294901757|None", "12|PENDING|100|None"
    command(commands, "squeue", f"printf '%s\\n' '{rows[0]}' '{rows[1]}' '{rows[2]}'")
    assert places(["9_1", "9_2", "12", "13"]) == {
        "9_1": Place(state="PENDING", is_held=True, reason="JobHeldUser"),
        "9_2": Place(state="RUNNING", is_held=False),
        "12": Place(state="PENDING", is_held=False),
    }
    command(commands, "scontrol", f'echo "$*" >>{commands}/calls')
    release(["9_1", "9_3"])
    assert (commands / "calls").read_text() == "release 9_1 9_3\n"
    command(commands, "scontrol", 'echo "Invalid job id specified" >&2; exit 1')
    with pytest.raises(
        SubmissionError, match=r"scontrol release failed: Invalid job id specified; `scontrol show job`"
    ):
        release(["9_1"])
