"""The batch script of satellites: a golden file, how they come again, and what submit and plan say of them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_hetjob import PRELUDE

from areal_hpc.cluster.components import components_of, placements, satellite_of
from areal_hpc.cluster.hetjob import job_of
from areal_hpc.cluster.plan import plan_lines
from areal_hpc.cluster.satellites import array_options, join_command, render_satellite, satellite_job
from areal_hpc.config.derived import QUEUE_S, collective_s, signal_lead_s
from areal_hpc.config.keys import with_value
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.roles.supervisor import roles_of
from areal_hpc.roles.wiring.agents import request_s

REPOSITORY = Path(__file__).parents[2]


def config_of(*words: str) -> Config:
    return resolve(load([REPOSITORY / "configs/quickstart.yaml"], ["cluster.shape=satellites", *words]))


def script(*words: str, command: str = "true", room: str = "") -> str:
    return render_satellite(satellite_job(config_of(*words), log="%A_%a.log", room=room), command)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_script_that_people_type_is_what_is_rendered() -> None:
    """To renew it after a change that is meant: paste what the assertion shows."""
    config = config_of("cluster.job_name=areal-hpc")
    job = replace(satellite_job(config, log="areal-hpc-%A_%a.log"), setup=(PRELUDE,))
    golden = (REPOSITORY / "sbatch/satellites.sbatch").read_text(encoding="utf-8")
    assert render_satellite(job, join_command(config, "python", '"$@"')) == golden


@pytest.mark.parametrize("words", [(), ("cluster.requeue=false",), ("cluster.setup=['module load cuda']",)])
def test_the_script_is_one_that_bash_understands(words: tuple[str, ...]) -> None:
    command = join_command(config_of(*words), "python", '"$@"')
    text = script(*words, command=command, room="/room of it")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_satellite_asks_for_what_the_engines_do_and_the_runs_job_for_the_rest() -> None:
    words = ("cluster.generation.gres=gpu:2", "cluster.generation.partition=spare", "cluster.trainer.partition=main")
    asked = options(script(*words, "cluster.generation.time='30'", "limits.stop_s=15.5"))
    assert {"--gres=gpu:2", "--partition=spare", "--time=30", "--signal=TERM@26", "--requeue", "--nodes=1"} <= set(
        asked
    )
    assert asked[0] == "--job-name=quickstart-satellite"
    (component,) = job_of(config_of(*words), log="%j.log").components
    assert (component.partition, component.gres) == ("main", "")


def test_the_time_limit_of_satellites_is_not_the_runs() -> None:
    assert signal_lead_s(config_of("cluster.generation.time='8'", "cluster.trainer.time=1-00")) == 300
    with pytest.raises(
        ConfigError, match=r"cluster\.generation\.time: a warning 70 s before the end .* nothing of 60 s"
    ):
        config_of("cluster.generation.time='1'", "limits.stop_s=60")


def test_the_run_may_have_engines_of_its_own_and_a_component_of_workers() -> None:
    names = {one.name: one.roles for one in components_of(config_of("cluster.rollout.nodes=1"))}
    assert names == {"trainer": ("trainer", "evaluator", "generator", "part"), "rollout": ("rollout",)}
    config = config_of("generation.replicas=2", "cluster.all.gpus=4")
    placed = placements(config, {"trainer": ["n1"]}, roles_of(config))
    assert [placed["generator", index].devices for index in range(2)] == [(1,), (2,)]
    with pytest.raises(ConfigError, match=r"5 GPUs are needed on n1, .*lower trainer\.ranks or generation\.replicas"):
        placements(
            config_of("generation.replicas=4", "cluster.all.gpus=4"),
            {"trainer": ["n1"]},
            {"trainer": 1, "generator": 4},
        )
    assert satellite_of(config).gpus == 4


def test_none_starts_before_the_trainers_job_and_none_waits_for_one_that_never_starts() -> None:
    said = array_options(config_of("cluster.satellites=3"), "12")
    assert list(said) == ["--array=1-3", "--dependency=after:12", "--kill-on-invalid-dep=yes"]


def test_a_plan_shows_both(tmp_path: Path) -> None:
    config = config_of("cluster.satellites=3", "cluster.generation.gres=gpu:4", "generation.replicas=0")
    lines = list(plan_lines(config, roles_of(config)))
    assert lines[0] == "shape        satellites: 1 nodes in 1 components"
    assert "satellites   3 jobs that come and go, each: nodes=1, gres=gpu:4" in lines
    assert "  every node           4 engines on 1 GPUs each" in lines
    with pytest.raises(ConfigError, match="an engine needs 8 GPUs of one node, and a satellite has 4; ask for more"):
        list(plan_lines(config_of("cluster.generation.gres=gpu:4", "layout=sglang:d1t8+fsdp:d1"), {"trainer": 1}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("generation.replicas=0", "cluster.shape=het"),
            "generation.replicas: 0 leaves generation to satellites, which",
        ),
        (("generation.replicas=0", "cluster.shape=local", "deterministic=true"), "0 leaves generation to satellites"),
        (("generation.replicas=-1",), r"-1 is not in \[0, inf\)"),
        (("cluster.satellites=0",), r"0 is not in \[1, inf\)"),
        (("cluster.generation.raw=[--array=0-3]",), "--array makes many jobs of one run"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*words)


STAND_IN = """\
#!/bin/bash
[ $1 = 1 ] || [ $1 = show ] || echo "{name} $*" >>{calls}
{does}
"""


def ending(
    tmp_path: Path, *words: str, code: int = 75, signals: str = "", said: str = "", **environment: str
) -> tuple[int, list[str]]:
    """Run a script whose engines leave with ``code``, and the Slurm commands of which are stand-ins; its exit code and
    what was called.

    Args:
        signals: that the script gets before.
        said: by ``scontrol show job`` of itself.
    """
    shows = "".join(f'[ "$*" = "show job -o {job}" ] && echo "JobId=12 {said}"\n' for job in ("12", "12_3"))
    does = {"scontrol": f"{shows}true", "sbatch": "echo 77", "scancel": "true", "sleep": "/bin/sleep 0.2"}
    for name, body in does.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(STAND_IN.format(name=name, calls=tmp_path / "calls", does=body))
        path.chmod(0o755)
    body = f"""bash -c 'trap : TERM; for one in {signals}; do kill -$one $PPID; done; /bin/sleep 0.2; exit {code}'"""
    path = tmp_path / "script"
    path.write_text(script(*words, command=body, room=str(tmp_path)))
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "12", **environment}
    done = subprocess.run(["bash", path, "RUN"], env=variables, capture_output=True, check=False, timeout=30)
    calls = tmp_path / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


ARRAY = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


def test_at_its_time_limit_a_satellite_comes_again_and_no_other_with_it(tmp_path: Path) -> None:
    """The last task of an array has the array's own number: to requeue that would take all of its tasks back."""
    assert ending(tmp_path, **ARRAY) == (75, ["scontrol requeue 12_3", "sleep 60"])


def test_a_single_one_comes_again_by_its_own_number(tmp_path: Path) -> None:
    assert ending(tmp_path) == (75, ["scontrol requeue 12", "sleep 60"])


def test_where_a_site_does_not_requeue_a_new_one_comes(tmp_path: Path) -> None:
    again = f"sbatch --parsable --array=3 {tmp_path}/script RUN"
    assert ending(tmp_path, "cluster.requeue=false", **ARRAY) == (0, [again])
    assert (tmp_path / "task-3").read_text() == "77\n", "where the run's status and stop look for it"


PRE_EMPTED = "Reason=None PreemptEligibleTime=2026-11-30T05:00:00 PreemptTime=2026-11-30T05:00:01"
NOT_SO = "Reason=None PreemptEligibleTime=2026-11-30T05:00:00 PreemptTime=None"


@pytest.mark.parametrize("said", [PRE_EMPTED, "Reason=NodeDown", "Reason=TimeLimit"])
def test_where_a_site_does_not_requeue_what_is_cut_off_has_one_successor(tmp_path: Path, said: str) -> None:
    again = f"sbatch --parsable --array=3 {tmp_path}/script RUN"
    asked = ending(tmp_path, "cluster.requeue=false", signals="TERM TERM", said=said, **ARRAY)
    assert asked == (75, [again])
    assert (tmp_path / "task-3").read_text() == "77\n"


def test_what_was_cut_off_at_its_time_limit_is_requeued_and_what_was_pre_empted_by_slurm_itself(tmp_path: Path) -> None:
    assert ending(tmp_path, signals="TERM", said="Reason=TimeLimit", **ARRAY) == (75, ["scontrol requeue 12_3"])
    (tmp_path / "calls").unlink()
    assert ending(tmp_path, signals="TERM", said=PRE_EMPTED, **ARRAY) == (75, [])


def test_one_whose_run_is_out_is_held_until_the_run_lets_it_go(tmp_path: Path) -> None:
    assert ending(tmp_path, code=69, **ARRAY) == (69, ["scontrol requeuehold 12_3", "sleep 60"])


@pytest.mark.parametrize(("array", "successor"), [(ARRAY, "77_3"), ({}, "77")])
def test_where_a_site_does_not_requeue_a_new_one_rests_in_its_place(
    tmp_path: Path, array: dict[str, str], successor: str
) -> None:
    me = "12_3" if array else "12"
    (tmp_path / f"resting-{me}").write_text('{"after": 0}')
    option = ["--array=3"] if array else []
    again = " ".join(["sbatch --parsable", *option, f"--hold {tmp_path}/script RUN"])
    assert ending(tmp_path, "cluster.requeue=false", code=69, **array) == (0, [again])
    assert [path.name for path in tmp_path.glob("resting-*")] == [f"resting-{successor}"]


def test_a_new_one_whose_run_has_ended_meanwhile_does_not_rest_for_it(tmp_path: Path) -> None:
    """The run's launcher has taken the name away of whoever rests for it, and nobody else knows of the new job."""
    again = f"sbatch --parsable --array=3 --hold {tmp_path}/script RUN"
    assert ending(tmp_path, "cluster.requeue=false", code=69, **ARRAY) == (0, [again, "scancel 77"])
    assert list(tmp_path.glob("resting-*")) == []


def test_one_that_was_told_to_leave_before_it_could_hear_comes_again_too(tmp_path: Path) -> None:
    assert ending(tmp_path, code=143, **ARRAY) == (143, ["scontrol requeue 12_3", "sleep 60"])


@pytest.mark.parametrize("words", [(), ("cluster.requeue=false",)])
@pytest.mark.parametrize(("code", "signals"), [(75, "TERM"), (69, "TERM"), (0, ""), (1, "")])
def test_what_a_person_cancels_and_what_has_nothing_more_to_do_does_not_come_again(
    tmp_path: Path, code: int, signals: str, words: tuple[str, ...]
) -> None:
    assert ending(tmp_path, *words, code=code, signals=signals, said=NOT_SO) == (code, [])


@pytest.mark.parametrize(
    ("words", "longest_s"),
    [
        (("limits.starve_s=700",), QUEUE_S + 700),
        (("generation.replicas=0",), QUEUE_S + 1800),
        (("cluster.shape=local", "limits.checkpoint_s=5000"), 5000),
    ],
)
def test_trainer_ranks_wait_for_rank_0_as_long_as_it_may_wait_for_a_satellite(
    words: tuple[str, ...], longest_s: float
) -> None:
    """In a collective; else a job that is long in the queue would end a run that may wait for it."""
    config = config_of("generation.replicas=1", "limits.checkpoint_s=600", *words)
    assert collective_s(config) == longest_s + config.limits.start_s


def test_an_agents_request_is_not_given_up_while_its_episode_waits_for_a_satellite() -> None:
    assert request_s(config_of("rollout.timeout_s=60")) == QUEUE_S + 60
    assert request_s(config_of("rollout.timeout_s=60", "cluster.shape=local")) == 60
    evaluation = with_value(config_of("rollout.timeout_s=60"), "evaluation.checkpoint", "RUN")
    assert request_s(evaluation) == 60, "its engines are its own, whatever the run's shape is"
