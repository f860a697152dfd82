"""Logs of a run: whose, how much, and how they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.cluster.owner import Owner
from areal_hpc.errors import ConfigError
from areal_hpc.fs import publish_json
from areal_hpc.report import logs
from areal_hpc.report.logs import log_files, show_logs
from areal_hpc.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "run")
    attempt = made.attempt(1).create()
    for name, text in {"trainer-0": "a\nb\nc\n", "trainer-1": "d\n", "rollout-0": "e\n", "step-0": "f\n"}.items():
        (attempt.logs / f"{name}.log").write_text(text)
    state(made, 1, "running")
    return made


def state(run: RunDir, epoch: int, name: str) -> None:
    publish_json(run.attempt(epoch).state, {"state": name, **Owner.this_process().record()})


def shown(run: RunDir, *words: object, lines: int = 50) -> list[str]:
    return [line for line in show_logs(run, *words, lines=lines, follow=False) if not line.startswith("==> ")]


def test_all_of_a_role_or_one_process(run: RunDir) -> None:
    assert list(log_files(run)) == ["rollout-0", "step-0", "trainer-0", "trainer-1"]
    assert shown(run, "trainer") == ["a", "b", "c", "d"]
    assert shown(run, "trainer", 1) == ["d"]
    with pytest.raises(ConfigError, match=r"no log of trainer-2; there are: rollout-0, step-0, trainer-0, trainer-1"):
        shown(run, "trainer", 2)


def test_a_run_that_waits_has_none_and_says_so(tmp_path: Path) -> None:
    assert list(show_logs(RunDir.create(tmp_path / "new"), lines=5, follow=False)) == [
        f"{tmp_path}/new has no logs yet"
    ]


def test_the_batch_script_is_the_launcher_and_comes_first(run: RunDir) -> None:
    (run.slurm / "12").mkdir(parents=True)
    (run.slurm / "12.log").write_text("step 1\n")
    assert next(iter(log_files(run))) == "launcher"
    assert list(show_logs(run, "launcher", lines=5, follow=False)) == [
        f"==> launcher ({run.slurm}/12.log) <==",
        "step 1",
    ]


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
def test_the_last_lines_are_read_from_the_end(run: RunDir, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(logs, "BLOCK", block)
    for lines, expected in {
        1: ["c"],
        2: ["b", "c"],
        3: ["a", "b", "c"],
        9: ["a", "b", "c"],
        0: ["a", "b", "c"],
    }.items():
        assert shown(run, "trainer", 0, lines=lines) == expected


def test_following_shows_whole_lines_as_they_come_and_ends_with_the_run(run: RunDir) -> None:
    log = run.attempt(1).log("trainer", 0)
    steps = iter(
        [
            lambda: log.open("a").write("d"),
            lambda: log.open("a").write("one\n"),
            lambda: state(run, 1, "restarting"),
            lambda: (run.attempt(2).create().log("trainer", 0).write_text("again\n"), state(run, 2, "running")),
            lambda: (run.attempt(2).log("trainer", 0).open("a").write("last\n"), state(run, 2, "finished")),
        ]
    )
    told = list(show_logs(run, "trainer", 0, lines=1, follow=True, sleep=lambda _: next(steps)()))
    assert [line for line in told if not line.startswith("==> ")] == ["c", "done", "again", "last"]
    assert [line for line in told if line.startswith("==> ")] == [
        f"==> trainer-0 ({log}) <==",
        f"==> trainer-0 ({run.attempt(2).log('trainer', 0)}) <==",
    ]


def test_following_a_stopped_run_ends_only_where_no_job_goes_on_with_it(run: RunDir) -> None:
    state(run, 1, "stopped")
    assert list(show_logs(run, "rollout", lines=1, follow=True))[1:] == ["e"]
    (run.slurm / "12").mkdir(parents=True)
    told = list(show_logs(run, "rollout", lines=1, follow=True, sleep=lambda _: state(run, 1, "finished")))
    assert told[1:] == ["e"]
