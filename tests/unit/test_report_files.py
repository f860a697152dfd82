"""Report and status of a run directory: the text word for word, the files beside it, and a launcher that died."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.owner import Owner
from areal_hpc.errors import RunDirError
from areal_hpc.fs import publish_json
from areal_hpc.report import status_lines, write_report
from areal_hpc.report.files import configuration
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Record
from areal_hpc.telemetry.records import to_line

START = 1_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "gsm8k")
    run.config.write_text("trainer: {total_steps: 8}\nbuffer: {max_staleness: 2}\nname: größe\n", encoding="utf-8")
    return run


def write(run: RunDir, epoch: int, role: str, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
    lines = [
        to_line(Record(time=START + second, role=role, index=0, epoch=epoch, kind=kind, values=values))
        for second, (kind, values) in enumerate(records)
    ]
    run.attempt(epoch).create().records(role, 0).write_bytes(b"".join(lines))


def step(number: int) -> tuple[str, dict[str, Any]]:
    values = {
        "step": number, "version": number, "reward_mean": number / 8, "staleness_mean": 0.5, "staleness_max": 1,
        "logprob_gap": 0.01, "kept_fraction": 0.98, "clip_fraction": 0.02, "tokens_trained": 1500,
        "trainable_tokens": 1000.0, "tokens_generated": 1000, "train_tokens_per_s": 700.0, "ring_fill": 0.75,
        "seconds_step": 10.0, "seconds_train": 6.0, "seconds_wait": 3.0, "seconds_publish": 1.0, "seconds_paused": 0.5,
        "ring_dropped_filtered": 9, "ring_dropped_failed": 0, "ring_dropped_stale": number // 3,
        "ring_dropped_newer": 4, "ring_dropped_corrupt": 0,
    }  # fmt: skip
    return "step", values


@pytest.fixture
def two_attempts(run: RunDir) -> RunDir:
    """Killed after step 6, resumed from a checkpoint of step 4, finished."""
    write(run, 1, "trainer", [step(n) for n in range(1, 7)])
    write(run, 1, "evaluator", [("evaluation", {"step": 0, "reward_mean": 0.125, "samples": 8})])
    write(run, 2, "trainer", [step(n) for n in range(5, 9)])
    write(run, 2, "evaluator", [("evaluation", {"step": 8, "reward_mean": 0.5, "samples": 8})])
    write(run, 2, "rollout", [("group", {"outcome": "sealed"})] * 3 + [("group", {"outcome": "filtered"})])
    write(run, 2, "launcher", [("run", {"event": "started"}), ("run", {"event": "finished"})])
    return run


def test_the_report_word_for_word(two_attempts: RunDir) -> None:
    stream = io.StringIO()
    write_report(two_attempts, stream)
    assert stream.getvalue().splitlines() == [
        "run gsm8k",
        "  outcome       finished",
        "  attempts      2, 2 steps taken back by restarts",
        "  steps         8 of 8",
        "  reward        0.5625 (first 10 steps) to 0.5625 (last 10)",
        "  evaluation    first 0.125, last 0.5, best 0.5 at step 8",
        "  staleness     mean 0.5, max 1, bound 2",
        "  log-prob gap  mean 0.01 nats per token",
        "  tokens kept   98%, clipped 2%",
        "  tokens        12,000 trained, 8,000 of them generated",
        "  speed         150 tokens trained per second",
        "  time          0:01:20 in steps: 60% training, 30% waiting, 10% publishing weights; generation paused 5%",
        "  groups        sealed 3, filtered 1, failed 0, stale 2, newer 4",
        f"  next          `areal-hpc ledger {two_attempts.root}` proves that no prompt was lost or trained on twice",
        f"  written       summary.json, curves.png, curves.svg in {two_attempts.root}",
    ]


def test_what_was_saved_of_the_weights_is_told_where_only_changes_are_sent(run: RunDir) -> None:
    saved = {"weight_bytes": 3 << 20, "weight_bytes_saved": 13 << 20}
    write(run, 1, "trainer", [("step", {**step(number)[1], **saved}) for number in (1, 2)])
    stream = io.StringIO()
    write_report(run, stream)
    assert "  weights       6.0 MiB sent to each engine, 81% of its bytes saved" in stream.getvalue().splitlines()


def test_what_engines_were_sent_is_told(run: RunDir) -> None:
    write(run, 1, "trainer", [("step", {**step(number)[1], "weight_bytes": 3 << 20}) for number in (1, 2)])
    stream = io.StringIO()
    write_report(run, stream)
    assert "  weights       6.0 MiB sent to each engine" in stream.getvalue().splitlines()


def test_how_much_of_its_quota_the_ring_has_held_is_told_where_there_is_one(run: RunDir) -> None:
    held = {1: 30 << 20, 2: 48 << 20, 3: 2 << 20}
    gauges = [{"ring_bytes": num_bytes, "ring_max_bytes": 64 << 20} for num_bytes in held.values()]
    write(run, 1, "trainer", [("step", {**step(n)[1], **more}) for n, more in zip(held, gauges, strict=True)])
    stream = io.StringIO()
    write_report(run, stream)
    assert "  ring          at most 48.0 MiB of 64.0 MiB held" in stream.getvalue().splitlines()


def test_a_run_without_evaluations_says_nothing_of_them(run: RunDir) -> None:
    write(run, 1, "trainer", [step(1)])
    stream = io.StringIO()
    write_report(run, stream)
    assert not any(line.startswith("  evaluation ") for line in stream.getvalue().splitlines())


def test_an_evaluation_that_failed_is_told_with_its_reason_and_is_no_zero(run: RunDir) -> None:
    reason = "all 8 samples failed, the last by RewardRaised: no\nsuch caf\u00e9"
    write(run, 1, "evaluator", [("evaluation", {"step": 0, "samples": 0, "failed": 8, "reason": reason})])
    stream = io.StringIO()
    write_report(run, stream)
    told = "all 8 samples failed, the last by RewardRaised: no\\nsuch caf\\xe9"
    assert f"  not evaluated  step 0: {told}" in stream.getvalue().splitlines()
    assert "evaluation " not in stream.getvalue()
    assert f"evaluation   failed at step 0: {told}" in status_lines(run)


def test_after_a_failure_the_report_says_how_often_it_was_tried_and_what_to_do(two_attempts: RunDir) -> None:
    died = ("restart", {"process": "generator-0", "reason": "x", "pause_s": 0.0})
    again = ("restart", {"process": "run", "reason": "x", "pause_s": 0.0})
    write(two_attempts, 3, "launcher", [again, died, died, ("run", {"event": "restarting"})])
    write(two_attempts, 4, "launcher", [again, ("run", {"event": "failed"})])
    stream = io.StringIO()
    write_report(two_attempts, stream)
    lines = stream.getvalue().splitlines()
    assert lines[1:4] == [
        "  outcome       failed",
        "  attempts      4, 2 steps taken back by restarts; the last 2 in a row made no step",
        "  restarts      generator-0 2",
    ]
    assert lines[-4:-1] == [
        f"  next          `areal-hpc why {two_attempts.root}` tells who waited for whom when it ended",
        f"  next          `areal-hpc resume {two_attempts.root}` goes on from the newest checkpoint",
        f"  next          `areal-hpc ledger {two_attempts.root}` proves that no prompt was lost or trained on twice",
    ]
    facts = json.loads(two_attempts.summary.read_text(encoding="utf-8"))
    assert (facts["attempts_in_vain"], facts["restarts"]) == (2, 2)


@pytest.mark.parametrize(("outcome", "resumes"), [("stopped", True), ("aborted", True), ("finished", False)])
def test_what_to_do_next_depends_on_how_it_ended(outcome: str, resumes: bool, run: RunDir) -> None:
    write(run, 1, "trainer", [step(1)])
    write(run, 1, "launcher", [("run", {"event": outcome})])
    stream = io.StringIO()
    write_report(run, stream)
    assert (f"`areal-hpc resume {run.root}` goes on" in stream.getvalue()) is resumes
    assert ("areal-hpc" in stream.getvalue()) is resumes


def test_the_report_leaves_its_files_beside_the_run(two_attempts: RunDir) -> None:
    write_report(two_attempts, io.StringIO())
    summary = json.loads(two_attempts.summary.read_text(encoding="utf-8"))
    assert summary["last_step"] == 8
    assert summary["evaluations"][1] == {"step": 8, "reward_mean": 0.5, "samples": 8}
    assert two_attempts.curves("png").read_bytes().startswith(b"\x89PNG")
    assert b"bound (2)" in two_attempts.curves("svg").read_bytes()


def test_on_a_terminal_the_report_is_a_table(two_attempts: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    write_report(two_attempts, stream)
    assert "0:01:20 in steps: 60% training" in stream.getvalue()


def test_E17_a_run_that_recorded_nothing_has_a_report_and_a_status(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "empty")
    stream = io.StringIO()
    write_report(run, stream)
    assert "  steps         - of -" in stream.getvalue().splitlines()
    assert status_lines(run) == ["run    empty", "state  not started"]


@pytest.mark.parametrize("data", [b"", b"\x00\xff", b"a: [", b"name"], ids=["empty", "binary", "half", "word"])
def test_a_damaged_configuration_is_named_with_where_to_find_another(run: RunDir, data: bytes) -> None:
    run.config.write_bytes(data)
    with pytest.raises(RunDirError, match=rf"{run.config} is damaged; restore it, every checkpoint of the run holds a"):
        configuration(run)


def test_damaged_lines_are_said(two_attempts: RunDir) -> None:
    with two_attempts.attempt(1).records("trainer", 0).open("ab") as file:
        file.write(b"\x00\xff garbage\n{torn")
    stream = io.StringIO()
    write_report(two_attempts, stream)
    assert "1 lines could not be read and are left out" in stream.getvalue()


def test_J14_the_report_works_where_the_locale_knows_only_ascii(two_attempts: RunDir) -> None:
    code = (
        "import sys, pathlib; from areal_hpc.run_dir import RunDir\n"
        "from areal_hpc.report import write_report, status_lines\n"
        "run = RunDir.open(pathlib.Path(sys.argv[1])); write_report(run); print(status_lines(run))"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    subprocess.run([sys.executable, "-c", code, str(two_attempts.root)], env=environment, check=True, timeout=60)


def state(run: RunDir, epoch: int, name: str, owner: Owner | None = None) -> None:
    publish_json(run.attempt(epoch).state, {"state": name, **(owner or Owner.this_process()).record()})


def test_the_status_word_for_word(two_attempts: RunDir) -> None:
    state(two_attempts, 2, "finished")
    for name in ("step-00000004.e00000001", "step-00000008.e00000002", ".step-00000008.e00000002.77.ab.tmp", "notes"):
        (two_attempts.checkpoints / name).mkdir()
    write(two_attempts, 2, "generator", [("generation", {"tokens_per_s": 900.0})])
    assert status_lines(two_attempts, now=lambda: START + 65.0) == [
        "run          gsm8k",
        "state        finished (attempt 2)",
        "step         8 of 8",
        "reward       1 (mean of 10: 0.8125)",
        "evaluation   0.5 at step 8",
        "staleness    mean 0.5, max 1",
        "generation   900 tokens/s",
        "training     700 tokens/s",
        "ring         75% full",
        "dropped      9 filtered, 0 failed, 2 stale, 4 newer",
        "weights      version 8",
        "last record  0:01:02 ago, last step 0:01:02 ago",
        "checkpoints  2, newest of step 8",
    ]


def test_a_fresh_attempt_shows_where_the_one_before_came_to(two_attempts: RunDir) -> None:
    two_attempts.attempt(3).create()
    shown = dict(line.split(maxsplit=1) for line in status_lines(two_attempts))
    assert shown["state"] == "starting, no state file yet (attempt 3)"
    assert shown["step"] == "8 of 8"
    assert shown["evaluation"] == "0.5 at step 8"


def test_the_status_shows_what_each_engine_has_to_do(two_attempts: RunDir) -> None:
    """The sum over the workers that still report; an engine that one of them gives nothing is out, with the reason."""
    records = [
        Record(time=START + second, role="rollout", index=index, epoch=2, kind="routing", values=values)
        for second, index, values in (
            (10.0, 0, {"generator-0": 9000, "generator-1": 1}),  # superseded
            (50.0, 0, {"generator-0": 1200, "generator-1": 30}),
            (51.0, 1, {"generator-0": 34, "generator-1": "it serves\nversion 3"}),
            (1.0, 2, {"generator-0": 7}),  # this worker has said nothing since
        )
    ]
    path = two_attempts.attempt(2).records("rollout", 0)
    path.write_bytes(path.read_bytes() + b"".join(map(to_line, records)))
    told = "generator-0 1,234 tokens outstanding, generator-1 is out: it serves\\nversion 3"
    limits = "generation: {max_requests: 16, max_outstanding_tokens: 8000}\n"
    for more, also in (("", ""), (limits, "; at most 16 requests and 8,000 tokens for each process at each")):
        two_attempts.config.write_text(two_attempts.config.read_text(encoding="utf-8") + more, encoding="utf-8")
        lines = status_lines(two_attempts, lambda: START, ask=lambda _: None)
        (engines,) = [line for line in lines if line.startswith("engines")]
        assert engines.split(maxsplit=1)[1] == told + also


def test_the_status_says_that_nothing_is_kept_also_before_the_first_step_of_an_attempt(two_attempts: RunDir) -> None:
    filtered = ("group", {"outcome": "filtered", "reason": "zero_variance"})
    write(two_attempts, 3, "rollout", [("group", {"outcome": "sealed", "reason": ""}), *[filtered] * 40])
    shown = dict(line.split(maxsplit=1) for line in status_lines(two_attempts))
    assert shown["step"] == "8 of 8"
    assert shown["warning"].startswith("no group was kept of the last 40 (40 filtered: zero_variance)")


def state_line(run: RunDir) -> str:
    return status_lines(run)[1]


def test_a_running_launcher_is_believed_while_it_lives(two_attempts: RunDir) -> None:
    owner = Owner.this_process()
    state(two_attempts, 2, "running", owner)
    assert state_line(two_attempts) == f"state        running, process {owner.pid} on {owner.host} (attempt 2)"


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot": "another boot"}, {"pid": 2**22 + 1}])
def test_a_running_launcher_that_is_gone_is_dead(two_attempts: RunDir, change: dict[str, Any]) -> None:
    """A killed launcher, a host that was started anew, a pid that belongs to another process by now."""
    state(two_attempts, 2, "running", dataclasses.replace(Owner.this_process(), **change))
    assert state_line(two_attempts).startswith("state        dead: process ")
    assert "`areal-hpc resume` goes on" in state_line(two_attempts)


def test_G10_whoever_falls_silent_is_named_while_the_run_goes_on(two_attempts: RunDir) -> None:
    state(two_attempts, 2, "running")
    pulses = {"trainer-0": "alive", "generator-0": "silent", "rollout-0": "alive", "evaluator-0": "ended"}
    shown = status_lines(two_attempts, watch=lambda _: pulses)
    assert shown[-1] == "processes    rollout-0, trainer-0 alive; evaluator-0 ended; generator-0 silent"
    state(two_attempts, 2, "restarting")
    assert status_lines(two_attempts, watch=lambda _: {})[-1] == "processes    none has come up yet"
    assert status_lines(two_attempts, watch=lambda _: {})[1].startswith("state        restarting, process ")
    state(two_attempts, 2, "finished")
    assert not any(line.startswith("processes") for line in status_lines(two_attempts, watch=lambda _: pulses))


def test_a_running_launcher_on_another_host_cannot_be_judged(two_attempts: RunDir) -> None:
    state(two_attempts, 2, "running", dataclasses.replace(Owner.this_process(), host="node17", start_ticks=1))
    assert "running, process" in state_line(two_attempts)
    assert "on node17" in state_line(two_attempts)
