"""Who sits where: the environment of a job as data, nodes to components, processes to nodes and GPUs, steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.cluster.components import (
    Placement,
    components_of,
    divide,
    engine_of_part,
    nodes_of_engine,
    num_parts,
    placements,
)
from areal_hpc.cluster.environment import Allocation, allocation
from areal_hpc.cluster.plan import plan_lines
from areal_hpc.cluster.steps import check_command, step_commands
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.roles.supervisor import roles_of

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"

HET = {
    "SLURM_JOB_ID": "17",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "n4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n4",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
}
"""Of a real job whose leader's node sorts last."""


def config_of(*words: str) -> Config:
    return resolve(load([QUICKSTART], ["cluster.shape=het", *words]))


def test_A46_the_first_node_is_the_leaders_and_not_the_first_by_name() -> None:
    job = allocation(HET)
    assert job == Allocation(job_id="17", restarts=0, components=(("n4",), ("n1", "n2")))
    config = config_of("cluster.generation.nodes=2")
    placed = placements(config, divide(config, job.components), roles_of(config))
    assert placed["trainer", 0] == Placement(node="n4")


def test_a_plain_job_is_one_component_and_requeues_are_counted() -> None:
    environment = {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_RESTART_COUNT": "2"}
    assert allocation(environment) == Allocation(job_id="3", restarts=2, components=(("n1", "n2", "n3"),))


def test_outside_of_a_job_one_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"areal-hpc submit.*cluster\.shape=local"):
        allocation({"HOME": "/root"})


def test_a_plain_jobs_nodes_are_divided_in_order() -> None:
    config = config_of("cluster.shape=split", "cluster.generation.nodes=2", "cluster.rollout.nodes=1")
    nodes = divide(config, [("n1", "n2", "n3", "n4")])
    assert nodes == {"trainer": ("n1",), "generation": ("n2", "n3"), "rollout": ("n4",)}


@pytest.mark.parametrize(
    ("words", "components"),
    [
        ((), {"trainer": ("trainer", "evaluator", "rollout"), "generation": ("generator", "part")}),
        (
            ("cluster.rollout.nodes=1",),
            {"trainer": ("trainer", "evaluator"), "generation": ("generator", "part"), "rollout": ("rollout",)},
        ),
        (("evaluation.checkpoint=m", "model.path=m"), {"generation": ("generator", "part", "evaluator")}),
        (("replay.run=r", "evaluation.every_steps=0"), {"trainer": ("trainer", "evaluator")}),
    ],
)
def test_no_component_is_asked_for_that_would_have_nothing_to_do(
    words: tuple[str, ...], components: dict[str, tuple[str, ...]]
) -> None:
    config = config_of(*words)
    assert {one.name: one.roles for one in components_of(config)} == components
    assert all(any(role in one.roles for one in components_of(config)) for role, n in roles_of(config).items() if n)


@pytest.mark.parametrize("allocated", [[("n1",)], [("n1",), ("n2", "n3")], [("n1",), ("n2",), ("n3",)]])
def test_a_job_of_other_nodes_is_refused(allocated: list[tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match="the configuration asks for trainer 1, generation 1"):
        divide(config_of(), allocated)


def test_A25_missing_gpus_are_an_error_at_once_that_says_how_many() -> None:
    config = config_of("cluster.generation.gres=gpu:4", "generation.replicas=5")
    with pytest.raises(ConfigError, match=r"cluster\.generation: 5 GPUs are needed on g1, and 4 are asked for"):
        placements(config, {"trainer": ["t1"], "generation": ["g1"]}, roles_of(config))


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ((), 0),
        (("gres=gpu:4",), 4),
        (("gres=gpu:a100:2",), 2),
        (("gres='shard:4,gpu:h100:8'",), 8),
        (("gres=gpu",), 1),
        (("gres=lustre:1",), 0),
        (("gpus_per_node='4'",), 4),
        (("gpus_per_node='a100:3'",), 3),
        (("gpus_per_task=h100:2",), 2),
        (("gpus=6",), 6),
    ],
)
def test_gpus_are_known_however_a_site_has_them_asked_for(words: tuple[str, ...], gpus: int) -> None:
    config = config_of(*(f"cluster.generation.{word}" for word in words))
    assert [component.gpus for component in components_of(config)] == [0, gpus]


@given(st.integers(1, 40), st.integers(1, 9))
def test_seats_are_even_in_blocks_and_share_no_gpu(replicas: int, nodes: int) -> None:
    config = config_of(f"generation.replicas={replicas}", f"cluster.generation.nodes={nodes}", "cluster.all.gpus=40")
    where = {"trainer": ["t1"], "generation": [f"g{number}" for number in range(nodes)]}
    placed = placements(config, where, roles_of(config))
    mine = [placed["generator", index] for index in range(replicas)]
    counts = Counter(seat.node for seat in mine)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [seat.node for seat in mine] == sorted((seat.node for seat in mine), key=where["generation"].index)
    assert len({(seat.node, device) for seat in mine for device in seat.devices}) == replicas
    for node, count in counts.items():
        assert [device for seat in mine if seat.node == node for device in seat.devices] == list(range(count))


SPANNING = ("generation.backend=sglang", "cluster.generation.gpus=4")


@given(replicas=st.integers(1, 5), span=st.integers(2, 5), gpus=st.integers(1, 8), spare=st.integers(0, 3))
def test_an_engine_larger_than_a_node_has_whole_nodes_to_itself(
    replicas: int, span: int, gpus: int, spare: int
) -> None:
    config = config_of(
        *SPANNING,
        f"cluster.generation.gpus={gpus}",
        f"generation.tensor_parallel={span * gpus}",
        f"generation.replicas={replicas}",
        f"cluster.generation.nodes={span * replicas + spare}",
    )
    where = {"trainer": ["t1"], "generation": [f"g{number}" for number in range(span * replicas + spare)]}
    placed = placements(config, where, roles_of(config))
    all_of_it = tuple(range(gpus))
    for engine in range(replicas):
        parts = [part for part in range(num_parts(config)) if engine_of_part(config, part)[0] == engine]
        mine = [placed["generator", engine], *(placed["part", part] for part in parts)]
        first = engine * span
        assert mine == [Placement(node=f"g{first + rank}", devices=all_of_it) for rank in range(span)]
        assert [engine_of_part(config, part)[1] for part in parts] == list(range(1, span))


def test_the_plan_shows_which_nodes_an_engine_spans() -> None:
    words = ("generation.tensor_parallel=8", "generation.replicas=2", "cluster.generation.nodes=4")
    config = config_of(*SPANNING, *words)
    lines = list(plan_lines(config, roles_of(config)))
    here = [line.split(maxsplit=1) for line in lines if "generation-node" in line]
    assert here == [
        ["generation-node-0", "generator-0 on GPU 0,1,2,3"],
        ["generation-node-1", "part-0 on GPU 0,1,2,3"],
        ["generation-node-2", "generator-1 on GPU 0,1,2,3"],
        ["generation-node-3", "part-1 on GPU 0,1,2,3"],
    ]
    said = "2, each on 8 devices of 2 nodes, its generator on the first and a part on each other"
    assert lines[-1].split(maxsplit=1) == ["engines", said]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (
            (*SPANNING, "generation.tensor_parallel=8", "generation.replicas=2", "cluster.generation.nodes=7"),
            "nobody would be on generation-node-4, generation-node-5, generation-node-6; lower "
            "cluster.generation.nodes to 4, or raise generation.replicas by 1",
        ),
        (
            (*SPANNING, "generation.tensor_parallel=8", "cluster.generation.nodes=3"),
            "nobody would be on generation-node-2; lower cluster.generation.nodes to 2",
        ),
        (
            ("generation.replicas=1", "cluster.generation.nodes=2"),
            "nobody would be on generation-node-1; lower cluster.generation.nodes to 1, or raise generation.replicas "
            "by 1",
        ),
        (
            ("trainer.ranks=1", "cluster.trainer.nodes=2", "cluster.rollout.nodes=1"),
            "nobody would be on trainer-node-1; lower cluster.trainer.nodes to 1",
        ),
    ],
)
def test_the_plan_names_nodes_that_would_stand_idle(words: tuple[str, ...], advice: str) -> None:
    config = config_of(*words)
    said = [line for line in plan_lines(config, roles_of(config)) if line.startswith("advice")]
    assert said == [f"advice       {advice}"]


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("1:30", "1:30 (1 min 30 s)"),
        ("90", "90 (1 h 30 min)"),
        ("1-06:00:00", "1-06:00:00 (1 d 6 h)"),
        ("UNLIMITED", "UNLIMITED"),
    ],
)
def test_the_plan_says_how_long_a_time_limit_is(limit: str, told: str) -> None:
    """sbatch(1), --time; many take 1:30 for an hour and a half."""
    config = config_of(f"cluster.all.time='{limit}'")
    assert f"trainer      nodes=1, time={told}" in list(plan_lines(config, roles_of(config)))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("generation.tensor_parallel=6",), r"more than the 4 GPUs of a node, and they do not divide its 6 ranks"),
        (
            ("generation.tensor_parallel=4", "generation.pipeline_parallel=3", "weights.transport=disk"),
            "",
        ),
        (
            ("generation.tensor_parallel=6", "generation.pipeline_parallel=2", "weights.transport=disk"),
            r"so 3 of them, on which 2 stages cannot be spread evenly",
        ),
        (("generation.tensor_parallel=8", "generation.replicas=2"), r"2 engines .* of 2 nodes each need 4, and there"),
    ],
)
def test_A25_an_engine_that_nodes_cannot_hold_is_an_error_that_names_the_quantity(
    words: tuple[str, ...], says: str
) -> None:
    config = config_of("cluster.generation.nodes=3", *SPANNING, *words)
    if not says:
        assert sum("GPU" in line for line in plan_lines(config, roles_of(config))) == 3
        return
    with pytest.raises(ConfigError, match=says):
        list(plan_lines(config, roles_of(config)))


def test_A25_on_the_trainers_nodes_no_engine_spans_several() -> None:
    words = ("generation.backend=sglang", "generation.tensor_parallel=8", "cluster.all.gpus=4")
    config = config_of(*words, "cluster.share_nodes=true")
    with pytest.raises(
        ConfigError, match=r"cluster\.trainer: an engine of 8 ranks .* on the trainer's nodes none spans"
    ):
        roles_of(config)


def test_on_one_machine_no_engine_spans_nodes() -> None:
    config = config_of(*SPANNING, "cluster.shape=local", "generation.tensor_parallel=8")
    assert (nodes_of_engine(config), "part" in roles_of(config)) == (1, False)


AGENT = ["python", "-m", "areal_hpc.cluster.agent", "/run", "1"]


def test_a_heterogeneous_job_has_a_step_for_each_component() -> None:
    config = config_of("cluster.all.cpus=8", "cluster.generation.nodes=2")
    job = allocation(HET)
    (first, where), (second, there) = step_commands(config, job, divide(config, job.components), AGENT)
    assert (list(where), list(there)) == (["n4"], ["n1", "n2"])
    assert {"--het-group=0", "--nodes=1", "--ntasks=1", "--cpu-bind=none"} <= set(first)
    assert {"--het-group=1", "--nodes=2", "--ntasks=2", "--cpu-bind=none"} <= set(second)
    assert list(first[-5:]) == AGENT


def test_a_plain_job_has_one_step_on_all_nodes() -> None:
    config = config_of("cluster.shape=split", "cluster.generation.nodes=2")
    job = Allocation(job_id="1", restarts=0, components=(("n1", "n2", "n3"),))
    ((command, nodes),) = step_commands(config, job, divide(config, job.components), AGENT)
    assert list(nodes) == ["n1", "n2", "n3"]
    assert "--nodes=3" in command
    assert not [word for word in command if word.startswith("--het-group")]


def test_what_a_site_needs_comes_before_the_agent() -> None:
    config = config_of("cluster.prefix=apptainer exec 'my image.sif'", "cluster.setup=[module load cuda]")
    job = allocation(HET | {"SLURM_JOB_NODELIST_HET_GROUP_1": "n1"})
    (command, _), _ = step_commands(config, job, divide(config, job.components), AGENT)
    words = list(command[command.index("bash") :])
    assert words == ["bash", "-c", 'module load cuda\nexec "$@"', "bash", "apptainer", "exec", "my image.sif", *AGENT]


@pytest.mark.parametrize(
    ("runtime", "gpus", "srun", "before"),
    [
        ("apptainer", 2, "", "apptainer exec --nv --bind /scratch --bind /home/me:/me --an-option /images/run.sif"),
        ("apptainer", 0, "", "apptainer exec --bind /scratch --bind /home/me:/me --an-option /images/run.sif"),
        (
            "pyxis",
            2,
            "--container-image=/images/run.sif --container-mounts=/scratch:/scratch,/home/me:/me --an-option",
            "",
        ),
        (
            "shifter",
            2,
            "",
            "shifter --image=/images/run.sif --volume=/scratch:/scratch --volume=/home/me:/me --an-option",
        ),
    ],
)
def test_A41_a_container_is_started_as_its_runtime_wants_it_and_by_no_name_that_a_later_job_would_find(
    runtime: str, gpus: int, srun: str, before: str
) -> None:
    """The forms of apptainer-exec(1), the README of pyxis, and shifter(1)."""
    words = ["image=/images/run.sif", "mounts=[/scratch, '/home/me:/me']", "args=['--an-option']", f"runtime={runtime}"]
    config = config_of(
        *(f"cluster.container.{word}" for word in words), f"cluster.all.gpus={gpus}", "cluster.prefix=nice"
    )
    job = allocation(HET | {"SLURM_JOB_NODELIST_HET_GROUP_1": "n1"})
    _, (command, _) = step_commands(config, job, divide(config, job.components), AGENT)
    wrapped = [*srun.split(), "nice", *before.split()]
    assert list(command[command.index("--het-group=1") + 1 :]) == [*wrapped, *AGENT]
    look = list(check_command(config, job, ["look"]))
    assert look[:3] == ["srun", "--nodes=1", "--ntasks=1"]
    assert look[look.index("--het-group=0") + 1 :] == [*wrapped, "look"]


def test_A23_the_plan_names_every_process_and_what_is_asked_for() -> None:
    config = config_of("generation.replicas=3", "cluster.generation.gres=gpu:4", "cluster.all.account=abc")
    text = "\n".join(plan_lines(config, roles_of(config)))
    for role, count in roles_of(config).items():
        assert all(f"{role}-{index}" in text for index in range(count))
    assert "generator-2 on GPU 2" in text
    assert text.count("account=abc") == 2
