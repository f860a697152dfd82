"""The batch script: golden files that people use as they are, and every field on its way into it."""

from __future__ import annotations

import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cluster.hetjob import job_of, render
from areal_hpc.config.cluster import ComponentConfig
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
TYPED = 'python -u -m areal_hpc run "$@" cluster.shape={shape}'
GOLDEN = {"train": "het", "train_split": "split"}


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


@pytest.mark.parametrize(("name", "shape"), GOLDEN.items())
def test_the_scripts_that_people_type_are_what_is_rendered(name: str, shape: str) -> None:
    """To renew one after a change that is meant: paste what the assertion shows."""
    config = config_of(f"cluster.shape={shape}", "cluster.job_name=areal-hpc")
    golden = (REPOSITORY / f"sbatch/{name}.sbatch").read_text(encoding="utf-8")
    assert render(job_of(config, log="areal-hpc-%j.log"), TYPED.format(shape=shape)) == golden


@pytest.mark.parametrize("text", [script(), script("cluster.shape=split"), script("cluster.requeue=false")])
def test_the_script_is_one_that_bash_understands(text: str) -> None:
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


FIELDS = [field.name for field in fields(ComponentConfig) if field.name not in ("nodes", "cpus", "gpus", "raw")]


@pytest.mark.parametrize("name", FIELDS)
def test_A1_every_field_reaches_sbatch_for_all_components_or_for_one(name: str) -> None:
    option = f"--{name.replace('_', '-')}=some"
    assert all(option in block for block in blocks(script(f"cluster.all.{name}=some")))
    one = blocks(script(f"cluster.generation.{name}=some", "cluster.rollout.nodes=1"))
    assert [option in block for block in one] == [False, True, False]
    over = blocks(script(f"cluster.all.{name}=other", f"cluster.generation.{name}=some"))
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
