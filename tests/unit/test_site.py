"""What a site's Slurm says of itself; its commands are stand-ins here, and real ones in tests/slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal_hpc.cluster.components import components_of, divide, placements
from areal_hpc.cluster.hetjob import job_of, render
from areal_hpc.cluster.site import array_problem, het_problem, partitions, require_startable, settings
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.roles.planning import plan_run
from areal_hpc.roles.supervisor import roles_of

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
BACKFILL = {"SchedulerType": "sched/backfill"}


def config_of(*words: str) -> Config:
    return resolve(load([QUICKSTART], list(words)))


@pytest.mark.parametrize(
    ("words", "facts", "there", "says"),
    [
        (
            (),
            {"SchedulerType": "sched/builtin"},
            {},
            "no heterogeneous jobs (SchedulerType sched/builtin); ",
        ),
        ((), BACKFILL, {"*": {"n1"}}, "(trainer, generation), 2 in all; there are 1; set cluster.shape=split and"),
        (("cluster.rollout.nodes=2",), BACKFILL, {"*": {"a", "b", "c"}}, "rollout), 4 in all; there are 3"),
        (("cluster.generation.partition='gpu,new'",), BACKFILL, {"*": {"a"}, "gpu": {"a"}, "new": {"b"}}, ""),
        (("cluster.all.partition=gpu",), BACKFILL, {"*": {"a"}, "gpu": {"a"}}, "there are 1"),
        (("cluster.all.partition=hidden",), BACKFILL, {"*": {"a"}}, ""),
        (("cluster.all.raw=['--partition=gpu']",), BACKFILL, {"*": {"a"}}, ""),
        (("cluster.generation.raw=['-Mother']",), BACKFILL, {"*": {"a"}}, ""),
        ((), {}, {}, ""),
    ],
    ids=["none", "one", "three parts", "two partitions", "another", "unknown", "raw", "cluster", "silence"],
)
def test_a_heterogeneous_job_that_can_never_start_is_known(
    words: tuple[str, ...], facts: dict[str, str], there: dict[str, set[str]], says: str
) -> None:
    said = het_problem(config_of(*words), facts, there)
    assert says in said if says else said == ""


@pytest.mark.parametrize(("limit", "says"), [("10", "10 are more than"), ("11", ""), ("", "")])
def test_A43_an_array_that_is_too_large_is_known_before_the_runs_own_job_is_in_the_queue(limit: str, says: str) -> None:
    said = array_problem(config_of("cluster.shape=satellites", "cluster.satellites=10"), {"MaxArraySize": limit})
    assert said.startswith(says) if says else said == ""


@pytest.fixture
def one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of one node, on the PATH."""
    answers = {
        "scontrol": "printf 'As of now\\nSchedulerType = sched/backfill\\nMaxArraySize            = 5\\n'",
        "sinfo": "printf 'gpu*|n1\\nlong|n1\\n'",
        "sbatch": "echo 'sbatch: Job 7 to start at noon' >&2",
    }
    for name, body in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_on_one_node_the_default_is_refused_with_what_works_and_that_works(one_node: None) -> None:
    assert partitions() == {"gpu": {"n1"}, "*": {"n1"}, "long": {"n1"}}
    assert settings("A = b \nC   = d=e\n") == {"A": "b", "C": "d=e"}
    with pytest.raises(ConfigError, match=r"set cluster\.shape=split and cluster\.share_nodes=true"):
        plan_run(config_of())
    with pytest.raises(ConfigError, match=r"cluster\.satellites: 5 are more than an array of this site has"):
        plan_run(config_of("cluster.shape=satellites", "cluster.satellites=5"))
    shared = config_of("cluster.shape=split", "cluster.share_nodes=true", "cluster.all.gpus_per_node='2'")
    require_startable(shared)
    (component,) = components_of(shared)
    assert component.roles == ("trainer", "evaluator", "generator", "part", "rollout")
    placed = placements(shared, divide(shared, [("n1",)]), roles_of(shared))
    assert [placed[name, 0].devices for name in ("trainer", "generator", "rollout")] == [(0,), (1,), ()]
    text = render(job_of(shared, log="%j.log"), "true")
    assert ("--nodes=1\n" in text, "hetjob" in text) == (True, False)


def test_a_partition_of_the_environment_which_is_stronger_than_the_script_is_not_judged(
    one_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "large")
    require_startable(config_of())


def test_without_slurm_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_startable(config_of())
