"""The command line: one line for a mistake, its exit code, and no torch before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_hpc.cli import main
from areal_hpc.cluster.owner import Owner
from areal_hpc.config.schema import Config
from areal_hpc.errors import RoleDied, RunDirError, Stalled
from areal_hpc.fs import publish, publish_json
from areal_hpc.roles import launcher
from areal_hpc.run_dir import RunDir

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")


PLAN = ["plan", QUICKSTART, "cluster.shape=het"]


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["config", QUICKSTART], ["keys"], ["--version"], PLAN]
)
def test_what_only_tells_starts_without_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom areal_hpc.cli import main\ntry: main()\nfinally: print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout
    loaded = set(yaml.safe_load(done.stderr))
    assert "areal_hpc.cli" in loaded
    assert not loaded & {"torch", "transformers", "aiohttp", "matplotlib"}


@pytest.mark.parametrize("words", [["config", QUICKSTART], ["keys"], PLAN])
def test_whoever_has_seen_enough_ends_what_is_told_without_a_complaint(words: list[str]) -> None:
    """As in ``areal-hpc keys | head``."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc", *words],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def refused(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line that a mistake gets."""
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("areal-hpc: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_an_unknown_key_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "trainer.total_steps" in refused(["config", QUICKSTART, "trainer.total_stepz=3"], capsys)


@pytest.mark.parametrize("command", ["status", "stop", "inspect"])
def test_a_directory_without_a_run_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert f"{path} is not a run directory" in refused([command, str(path)], capsys)


@pytest.mark.parametrize("command", ["status", "stop", "why", "logs", "report", "ledger", "inspect"])
def test_a_project_with_a_config_of_its_own_is_no_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {total_steps: 3}\n", encoding="utf-8")
    assert f"{tmp_path} is not a run directory (no attempts" in refused([command, str(tmp_path)], capsys)
    (tmp_path / "checkpoints" / "global_step_3").mkdir(parents=True)
    assert f"{tmp_path} is not a run directory (no attempts" in refused([command, str(tmp_path)], capsys)


def test_stop_of_a_run_that_ended_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run")
    publish(run.config, b"")
    assert "has never been started" in refused(["stop", str(run.root)], capsys)
    attempt = run.attempt(1).create()
    publish_json(attempt.state, {"state": "finished", **Owner.this_process().record()})
    assert main(["stop", str(run.root)]) == 0
    assert capsys.readouterr().out == f"{run.root}: finished\n"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RunDirError("in use; stop it"), 2, "in use; stop it"),
        (RoleDied("trainer-0 ended"), 1, "trainer-0 ended"),
        (Stalled("stuck for 600 s at generator-0"), 70, "stuck for 600 s at generator-0"),
        (OSError(28, "No space left on device", "/runs"), 1, "[Errno 28] No space left on device: '/runs'"),
        (
            PermissionError(13, "Permission denied", "/there-is-none"),
            2,
            "/there-is-none: permission denied; ask root, who owns /, to let you use it, or give the key that names it "
            "a path of your own",
        ),
        (
            PermissionError(1, "Operation not permitted"),
            2,
            "[Errno 1] Operation not permitted; your user may not do that here",
        ),
        (
            PermissionError(13, "Permission denied", 7),
            2,
            "[Errno 13] Permission denied: 7; your user may not do that here",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["user", "run", "stall", "system", "path", "permission", "descriptor", "ctrl-c"],
)
def test_how_a_run_fails_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(launcher, "run_local", fail)
    monkeypatch.setattr("areal_hpc.telemetry.setup_logging", lambda *_: None)
    assert refused(["run", QUICKSTART], capsys, code) == f"areal-hpc: {line}\n"


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(launcher, "run_local", fail)
    monkeypatch.setattr("areal_hpc.telemetry.setup_logging", lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        main(["run", QUICKSTART])


def test_overrides_may_stand_before_and_after_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def note(config: Config, **options: object) -> int:
        seen.update(options, seed=config.seed, name=config.name)
        return 0

    monkeypatch.setattr(launcher, "run_local", note)
    monkeypatch.setattr("areal_hpc.telemetry.setup_logging", lambda *_: None)
    assert main(["run", QUICKSTART, "seed=5", "--resume", "name=other"]) == 0
    assert (seen["seed"], seen["name"], seen["resume"], seen["takeover"]) == (5, "other", True, False)
    assert seen["resume_from"] is None
    assert main(["run", QUICKSTART, "--resume-from", "20", "name=other"]) == 0
    assert (seen["resume"], seen["resume_from"]) == (True, 20)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_outside_of_a_job_a_run_is_of_this_machine_and_in_one_of_the_shape_that_it_has(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(launcher, "run_local", lambda config, **_: seen.append(config.cluster.shape) or 0)
    monkeypatch.setattr("areal_hpc.telemetry.setup_logging", lambda *_: None)
    for name in ("SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    words = [command, QUICKSTART, "generation.replicas=1"]
    for more in ([], ["cluster.shape=split"]):
        assert main([*words, *more]) == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    for more in ([], ["cluster.shape=split"], ["cluster.shape=local"]):
        assert main([*words, *more]) == 0
    assert seen == ["local", "local", "het", "split", "local"]


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("second", "to name the run, write name=second"),
        ("trainer.total_steps", "write trainer.total_steps=int"),
        ("trainer.total_stepz", "an override is written with `=`; did you mean trainer.total_steps or "),
        ("my runs/a", "check the path"),
    ],
)
def test_a_word_that_is_neither_file_nor_override_is_told_what_it_may_be(
    word: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("run", "config", "plan", "submit"):
        line = refused([command, QUICKSTART, word], capsys)
        assert line.startswith(f"areal-hpc: {word} is neither a file nor KEY=VALUE; {advice}")


def test_a_replay_takes_overrides_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("areal_hpc.telemetry.setup_logging", lambda *_: None)
    run = RunDir.create(tmp_path / "run")
    publish(run.config, Path(QUICKSTART).read_bytes())
    line = refused(["replay", str(run.root), "second", "--train-only"], capsys)
    assert line == "areal-hpc: override `second`: write it as dotted.key=value, such as algorithm.clip_high=0.28\n"


def test_the_help_tells_what_each_word_is(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in ((["run"], "name=second for another run"), (["replay"], "overrides: what is"), (["why"], "RUN")):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["run", QUICKSTART, "--resumed"], ["status", "a", "b"], ["replay", "a"], []])
def test_words_that_no_command_takes_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err
