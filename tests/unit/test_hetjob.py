"""The batch script: golden files that people use as they are, and every field on its way into it."""

from __future__ import annotations

import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.hetjob import job_of, render
from areal_hpc.cluster.satellites import render_satellite, satellite_job
from areal_hpc.config.cluster import ComponentConfig, seconds_of
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
PRELUDE = 'if [ -n "${AREAL_HPC_ENV:-}" ]; then source "$AREAL_HPC_ENV" || exit 2; fi  # such as sbatch/env/modules.sh'
GOLDEN = {
    "train": ("run", "cluster.shape=het"),
    "train_split": ("run", "cluster.shape=split"),
    "train_chain": ("run", "cluster.shape=split", "cluster.requeue=false"),
    "train_satellites": ("run", "cluster.shape=satellites"),
    "eval": ("eval", "cluster.shape=split"),
}
EVALUATES = ("evaluation.checkpoint=model", "model.path=model")
"""What makes a configuration one of `areal-hpc eval`."""


def config_of(*words: str) -> Config:
    return resolve(load([REPOSITORY / "configs/quickstart.yaml"], ["cluster.shape=het", *words]))


def script(*words: str, **options: Any) -> str:
    return render(job_of(config_of(*words), **{"log": "%j.log", **options}), "true")


def blocks(text: str) -> list[list[str]]:
    """The sbatch options of each component, without the marker."""
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    found: list[list[str]] = [[]]
    for line in lines:
        if line == "hetjob":
            found.append([])
        else:
            found[-1].append(line)
    return found


def typed(command: str, *words: str) -> str:
    """The script that a person types, for ``areal-hpc COMMAND``."""
    config = config_of(*words, "cluster.job_name=areal-hpc", *(EVALUATES if command == "eval" else ()))
    job = replace(job_of(config, log="areal-hpc-%j.log"), setup=(PRELUDE,))
    return render(job, f'python -u -m areal_hpc {command} "$@" {" ".join(words)}')


@pytest.mark.parametrize("name", GOLDEN)
def test_the_scripts_that_people_type_are_what_is_rendered(name: str) -> None:
    """To renew one after a change that is meant: paste what the assertion shows."""
    golden = (REPOSITORY / f"sbatch/{name}.sbatch").read_text(encoding="utf-8")
    assert typed(*GOLDEN[name]) == golden


@pytest.mark.parametrize("text", [script(), script("cluster.shape=split"), script("cluster.requeue=false")])
def test_the_script_is_one_that_bash_understands(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize(("words", "umask"), [((), "077"), (("run_group=users",), "007")])
def test_what_the_script_writes_is_the_owners_alone_or_the_groups(words: tuple[str, ...], umask: str) -> None:
    config = config_of(*words)
    for text in (script(*words), render_satellite(satellite_job(config, log="%j.log"), "true")):
        assert f"\numask {umask}\n" in text


FIELDS = [field.name for field in fields(ComponentConfig) if field.name not in ("nodes", "cpus", "gpus", "raw")]


@pytest.mark.parametrize("name", FIELDS)
def test_A1_every_field_reaches_sbatch_for_all_components_or_for_one(name: str) -> None:
    some, other = ("'70'", "'80'") if name == "time" else ("some", "other")
    option = f"--{name.replace('_', '-')}={some}".replace("'", "")
    assert all(option in block for block in blocks(script(f"cluster.all.{name}={some}")))
    one = blocks(script(f"cluster.generation.{name}={some}", "cluster.rollout.nodes=1"))
    assert [option in block for block in one] == [False, True, False]
    over = blocks(script(f"cluster.all.{name}={other}", f"cluster.generation.{name}={some}"))
    assert [option in block for block in over] == [False, True]


def test_A1_no_field_that_nobody_gave_is_asked_for() -> None:
    always = {"--job-name", "--output", "--open-mode", "--signal", "--requeue", "--nodes", "--ntasks-per-node"}
    assert {option.split("=")[0] for block in blocks(script()) for option in block} == always


def test_A1_an_unknown_field_is_an_error_that_names_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.all\.acount: unknown key .*did you mean cluster\.all\.account"):
        config_of("cluster.all.acount=x")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("cluster.comment=month of GPUs",), "--comment='month of GPUs'"),
        (("cluster.dependency=afterok:12",), "--dependency=afterok:12"),
        (("cluster.mail_type=END",), "--mail-type=END"),
        (("cluster.mail_user=me@example.org",), "--mail-user=me@example.org"),
        (("cluster.signal_lead_s=90",), "--signal=B:USR1@90"),
        (("cluster.requeue=false",), "--no-requeue"),
        (("cluster.job_name=mine",), "--job-name=mine"),
    ],
)
def test_what_is_the_whole_jobs_is_asked_for_once(words: tuple[str, ...], option: str) -> None:
    first, second = blocks(script(*words))
    assert option in first
    assert option not in second


def test_a_dependency_on_a_name_cannot_wait_for_its_own_job() -> None:
    """With one name in two components, `singleton` makes the second wait for the first for ever."""
    names = [next(o for o in block if "job-name" in o) for block in blocks(script("cluster.dependency=singleton"))]
    assert len(set(names)) == len(names)


def test_raw_options_of_all_come_before_those_of_one() -> None:
    text = script("cluster.all.raw=[--core-spec=0]", "cluster.generation.raw=[--core-spec=4, --hint=nomultithread]")
    assert [block[-3:] for block in blocks(text)][1] == ["--core-spec=0", "--core-spec=4", "--hint=nomultithread"]
    assert blocks(text)[0][-1] == "--core-spec=0"


def test_sizes_and_whole_nodes() -> None:
    words = ("cluster.all.cpus=8", "cluster.all.exclusive=yes", "cluster.generation.nodes=5")
    trainer, generation = blocks(script(*words))
    assert {"--nodes=1", "--cpus-per-task=8", "--exclusive"} <= set(trainer)
    assert {"--nodes=5", "--cpus-per-task=8", "--exclusive"} <= set(generation)


def test_A4_the_job_runs_where_it_was_submitted() -> None:
    assert "--chdir=/home/me/project" in blocks(script(directory=Path("/home/me/project")))[0]


def test_setup_comes_before_the_run() -> None:
    lines = script("cluster.setup=[module load cuda, source env/bin/activate]").splitlines()
    assert lines.index("module load cuda") < lines.index("source env/bin/activate") < lines.index("true &")


def test_a_plain_job_has_the_nodes_of_all_and_refuses_what_it_cannot_give() -> None:
    words = ("cluster.shape=split", "cluster.trainer.nodes=2", "cluster.generation.nodes=3", "cluster.rollout.nodes=1")
    (block,) = blocks(script(*words, "cluster.all.account=a"))
    assert {"--nodes=6", "--account=a"} <= set(block)
    with pytest.raises(ConfigError, match=r"cluster\.generation\.partition cannot differ; say it in cluster\.all"):
        script(*words, "cluster.generation.partition=gpu")


def test_a_text_with_spaces_or_quotes_stays_one_option() -> None:
    block = blocks(script("cluster.all.constraint=a100&(rack1|rack2)"))[0]
    assert "--constraint='a100&(rack1|rack2)'" in block


def test_a_path_with_spaces_stays_one_option_which_slurm_would_else_refuse() -> None:
    words = {"directory": Path("/home/me/my runs"), "log": "/home/me/my runs/%j.log"}
    assert {"--chdir='/home/me/my runs'", "--output='/home/me/my runs/%j.log'"} <= set(blocks(script(**words))[0])
    (satellite,) = blocks(render_satellite(satellite_job(config_of("cluster.shape=satellites"), **words), "true"))
    assert {"--chdir='/home/me/my runs'", "--output='/home/me/my runs/%j.log'"} <= set(satellite)


@pytest.mark.parametrize(
    ("words", "lead_s"),
    [
        ((), 300),  # nobody knows the limit
        (("cluster.all.time='2'",), 30),
        (("cluster.all.time='1:00:00'", "cluster.generation.time='8'"), 120),  # the shortest counts
        (("cluster.all.time=1-00",), 300),
        (("cluster.all.time='1'",), 20),  # a stop must still fit in
        (("cluster.all.time='2'", "cluster.signal_lead_s=70"), 70),
    ],
)
def test_A19_the_warning_leaves_short_jobs_the_time_to_work(words: tuple[str, ...], lead_s: int) -> None:
    assert f"--signal=B:USR1@{lead_s}" in blocks(script(*words))[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cluster.all.time='2'", "cluster.signal_lead_s=300"), "300 s before the end leaves nothing of .* 120 s"),
        (("cluster.all.time='1'", "limits.stop_s=60"), "leaves nothing of a time limit of 60 s"),
        (("cluster.signal_lead_s=5",), "too short for a stop"),
        (("cluster.generation.time=soon",), "time 'soon' is no time limit of Slurm"),
    ],
)
def test_a_warning_that_helps_nobody_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*words)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("1:02:03", 3723),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("1-2:30:15", 95415),
        ("", None),
        ("UNLIMITED", None),
    ],
)
def test_every_form_of_a_time_limit(text: str, seconds: int | None) -> None:
    """The six forms of sbatch(1)."""
    assert seconds_of(text) == seconds


def last_part(tmp_path: Path, text: str, *, signals: str, prelude: str = "", **commands: str) -> tuple[int, list[str]]:
    """Run a batch script whose launcher stops with a checkpoint, and the Slurm commands of which are stand-ins; its
    exit code and what was called, but for questions."""
    for name, body in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "$(basename "$0") $*" >>{tmp_path}/calls\n{body}\n')
        path.chmod(0o755)
    path = tmp_path / "script"
    path.write_text(text)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SIGNALS": signals}
    environment |= {"AREAL_HPC_ENV": prelude}
    done = subprocess.run(["bash", path, "word"], env=environment, capture_output=True, check=False, timeout=30)
    calls = tmp_path / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return done.returncode, [line for line in lines if not line.startswith("scontrol show job")]


STOPS = """bash -c 'trap : TERM; for one in $SIGNALS; do kill -$one $PPID; done; sleep 0.2; exit 75'"""
"""A launcher that stops with a checkpoint after its script got these signals."""
DEAF = """bash -c 'for one in $SIGNALS; do kill -$one $PPID; done; exec /bin/sleep 20'"""
"""One that is still coming up, so that the signal ends it."""
HEARS_LATE = """bash -c 'trap "" TERM; for one in $SIGNALS; do kill -$one $PPID; done; /bin/sleep 1
trap "exit 75" TERM; for one in {1..100}; do /bin/sleep 0.1; done; exit 1'"""
"""One that is still coming up in somebody's hands who takes the signal and does nothing."""
NAP = "case $1 in 0.2 | 1) /bin/sleep 0.2 ;; esac"
"""Waiting for the launcher takes time, and waiting for Slurm takes none."""
AWAY = 'if [ ! -e "$0.asked" ]; then touch "$0.asked"; echo "Unable to contact slurm controller" >&2; exit 1; fi\n'


def stopping(*words: str, room: str = "", launcher: str = STOPS) -> str:
    return render(job_of(config_of("cluster.shape=split", *words), log="%j.log", room=room), launcher)


def test_A34_a_warned_job_is_requeued_once_by_its_script_also_when_the_controller_is_away_for_a_moment(
    tmp_path: Path,
) -> None:
    code, calls = last_part(tmp_path, stopping(), signals="USR1", scontrol=AWAY, sleep=NAP)
    assert code == 75
    assert [call for call in calls if call not in ("sleep 0.2", "sleep 1")] == [
        "scontrol requeue 12", "sleep 5", "scontrol requeue 12", "sleep 60"
    ]  # fmt: skip


def test_a_warning_that_comes_before_the_run_can_hear_it_costs_nothing_but_this_start(tmp_path: Path) -> None:
    """A job that is pre-empted while Python loads has ended by itself before Slurm takes it back."""
    code, calls = last_part(tmp_path, stopping(launcher=DEAF), signals="USR1", scontrol="", sleep=NAP)
    assert (code, [call for call in calls if not call.startswith("sleep")]) == (143, ["scontrol requeue 12"])
    (tmp_path / "calls").unlink()
    chained = stopping("cluster.requeue=false", launcher=DEAF)
    code, calls = last_part(tmp_path, chained, signals="USR1", sbatch="echo 13", scontrol="", sleep=NAP)
    assert (code, len([call for call in calls if call.startswith("sbatch")])) == (0, 1)
    assert last_part(tmp_path / "2", stopping(launcher=DEAF), signals="TERM", scontrol="", sleep=NAP)[0] == 143


def test_a_warning_is_repeated_until_the_run_hears_it(tmp_path: Path) -> None:
    found = last_part(tmp_path, stopping(launcher=HEARS_LATE), signals="USR1", scontrol="", sleep=NAP)
    assert found[0] == 75
    assert "scontrol requeue 12" in found[1]


def test_a_refusal_is_not_asked_for_again(tmp_path: Path) -> None:
    refuses = 'echo "Requested operation is presently disabled" >&2; exit 1'
    assert last_part(tmp_path, stopping(), signals="USR1", scontrol=refuses) == (75, ["scontrol requeue 12"])


@pytest.mark.parametrize("signals", ["TERM", "USR1 TERM"])
def test_what_slurm_ends_itself_is_not_requeued_by_us(tmp_path: Path, signals: str) -> None:
    assert last_part(tmp_path, stopping(), signals=signals, scontrol="", sbatch="") == (75, [])


@pytest.mark.parametrize("signals", ["USR1", "USR1 TERM"])
def test_without_requeueing_the_next_job_of_a_chain_gets_what_this_one_had(tmp_path: Path, signals: str) -> None:
    room = tmp_path / "a room"
    (room / "12").mkdir(parents=True)
    (room / "12/12_submitted.pkl").write_text("what to run")
    text = stopping("cluster.requeue=false", room=str(room))
    sbatch = 'echo "sbatch: a word of the site" >&2; echo "13;cluster"'
    code, calls = last_part(tmp_path, text, signals=signals, sbatch=sbatch, scontrol="")
    depends = "sbatch --parsable --dependency=afterany:12 --export=ALL,AREAL_HPC_AFTER=12"
    assert (code, calls) == (0, [f"{depends} {tmp_path}/script word"])
    assert (room / "13/13_submitted.pkl").read_text() == "what to run"


REQUEUED = ["scontrol requeue 12"]
CHAINED = ["sbatch --parsable --dependency=afterany:12 --export=ALL,AREAL_HPC_AFTER=12 script word"]


@pytest.mark.parametrize(
    ("slurm_says", "where_it_requeues", "where_it_does_not"),
    [
        ("JobState=COMPLETING Reason=TimeLimit", REQUEUED, CHAINED),
        ("JobState=COMPLETING Reason=NodeDown", [], CHAINED),  # Slurm requeues it
        ("JobState=COMPLETING Reason=None PreemptTime=2026-11-30T07:44:22", [], CHAINED),  # and this
        ("JobState=COMPLETING Reason=None", [], []),  # somebody has cancelled it
    ],
)
@pytest.mark.parametrize("signals", ["TERM", "TERM TERM"])
def test_A40_no_signal_tells_why_a_job_ends_and_slurm_is_asked(
    tmp_path: Path, slurm_says: str, where_it_requeues: list[str], where_it_does_not: list[str], signals: str
) -> None:
    """What Slurm 22.05 says of a real job in its last seconds."""
    says = f'if [ "$1" = show ]; then echo "JobId=12 {slurm_says} StartTime=2026-11-30T07:44:17"; fi'
    for number, (word, calls) in enumerate([("true", where_it_requeues), ("false", where_it_does_not)]):
        room = tmp_path / str(number)
        text = stopping(f"cluster.requeue={word}")
        _, found = last_part(room, text, signals=signals, scontrol=says, sbatch="echo 13")
        assert [call.replace(f"{room}/", "") for call in found] == calls


def test_A2_the_next_job_has_the_account_of_this_one_since_it_has_its_script(tmp_path: Path) -> None:
    text = stopping("cluster.requeue=false", "cluster.all.account=e-ext-01", "cluster.all.qos=long")
    sbatch = 'grep -h "^#SBATCH --\\(account\\|qos\\)" "${@:4:1}" >"$0.asked"; echo 13'
    assert last_part(tmp_path, text, signals="USR1", sbatch=sbatch)[0] == 0
    asked = (tmp_path / "bin/sbatch.asked").read_text().splitlines()
    assert asked == ["#SBATCH --account=e-ext-01", "#SBATCH --qos=long"]


@pytest.mark.parametrize("option", ["--array=0-3", "-a", "-a0-3"])
def test_A35_an_array_of_one_run_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="--array makes many jobs of one run; remove it"):
        config_of(f"cluster.generation.raw=[{option}]")


def test_A43_a_job_whose_turn_never_comes_leaves_the_queue() -> None:
    first, second = blocks(script("cluster.dependency=afterok:12"))
    assert {"--dependency=afterok:12", "--kill-on-invalid-dep=yes"} <= set(first)
    assert "--kill-on-invalid-dep=yes" not in second


def test_a_cancelled_job_has_no_next_one(tmp_path: Path) -> None:
    assert last_part(tmp_path, stopping("cluster.requeue=false"), signals="TERM", sbatch="echo 13") == (75, [])


def test_what_python_needs_is_sourced_before_it_or_the_job_ends_at_once(tmp_path: Path) -> None:
    site = tmp_path / "site.sh"
    site.write_text("export FROM_SITE=here\n")
    text = typed("run", "cluster.shape=split")
    ran = 'echo "$FROM_SITE $*" >"$0.ran"'
    code, _ = last_part(tmp_path, text, signals="", python=ran, prelude=str(site))
    assert (code, (tmp_path / "bin/python.ran").read_text()) == (
        0,
        "here -u -m areal_hpc run word cluster.shape=split\n",
    )
    assert last_part(tmp_path, text, signals="", prelude="/no/such")[0] == 2


def test_a_chain_that_cannot_go_on_says_so_by_its_exit_code(tmp_path: Path) -> None:
    text = stopping("cluster.requeue=false")
    code, calls = last_part(tmp_path, text, signals="USR1", sbatch='echo "Invalid account" >&2; exit 1')
    assert (code, len(calls)) == (75, 1)
