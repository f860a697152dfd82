"""What centres ask for, each on a real Slurm that is configured so. Container runtimes are stand-ins, since there
are no images here: they note how they were called, and then run the command as if it were inside."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import SlurmCluster, wait_for
from launched import REPOSITORY, arguments
from slurm_runs import (
    LONG,
    LONGEST_S,
    OVER,
    PATHS,
    STEPS,
    areal,
    assert_proven_in_two_attempts,
    directory_of,
    submit,
    typed,
    wait_for_step,
)
from tiny_models import make_model

from areal_hpc.fs import read_json
from areal_hpc.liveness.job import jobs_of
from areal_hpc.run_dir import RunDir

SHORT = ("trainer.total_steps=3", "cluster.all.cpus=4")
STRICT = (
    "JobRequeue=0",
    "SchedulerType=sched/builtin",  # which has no heterogeneous jobs
    "SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0",
    "AccountingStorageEnforce=associations",
    "PartitionName=science Nodes=ALL MaxTime=1-0 DefaultTime=10 State=UP AllowAccounts=science",
)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A centre that wants an account, gives whole nodes, and neither requeues nor has heterogeneous jobs."""
    with SlurmCluster(tmp_path_factory.mktemp("strict") / "c", num_nodes=2, gpus=0, settings=STRICT) as cluster:
        cluster.call("sacctmgr", "-i", "add", "account", "science")
        cluster.call("sacctmgr", "-i", "add", "user", "root", "account=science")
        make_model(cluster.dir / "model", "qwen3", 1, hidden_size=32, intermediate_size=48, initializer_range=0.06)
        yield cluster


@pytest.fixture
def desk(strict: SlurmCluster, request: pytest.FixtureRequest) -> Path:
    return directory_of(strict, request, re.sub(r"\W", "_", request.node.name))


def test_A1_a_centre_that_refuses_is_understood_before_and_after_one_submits(strict: SlurmCluster, desk: Path) -> None:
    words = [*arguments(desk, strict.dir / "model"), "cluster.shape=split", "cluster.all.partition=science"]
    for command in ("plan", "submit"):
        refused = areal(strict, desk, command, *words)
        assert refused.returncode, refused.stdout
        assert "Invalid account or account/partition combination" in refused.stdout + refused.stderr
    unknown = areal(strict, desk, "submit", *words, "cluster.all.account=science", "cluster.all.gres=gpu:1")
    assert unknown.returncode
    assert "Invalid generic resource (gres) specification" in unknown.stderr
    het = [*words, "cluster.all.account=science", "cluster.shape=het"]
    for command in ("plan", "submit"):
        refused = areal(strict, desk, command, *het)
        assert refused.returncode == 2, refused.stdout
        assert "no heterogeneous jobs (SchedulerType sched/builtin); set cluster.shape=split\n" in refused.stderr
    found = areal(strict, desk, "doctor", *het).stdout
    assert re.search(r"^heterogeneous jobs +wrong .*; set cluster\.shape=split$", found, re.MULTILINE), found
    assert re.search(r"^requeueing +warning .*; set cluster\.requeue=false", found, re.MULTILINE), found
    planned = areal(strict, desk, "plan", *words, "cluster.all.account=science", "cluster.all.gpus=2")
    assert planned.returncode == 0, planned.stdout + planned.stderr


def test_one_node_is_enough_and_what_a_groups_run_writes_there_is_the_groups(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    home.chmod(0o755)
    words = [*arguments(home, model), *SHORT, "cluster.all.gpus_per_node='2'"]
    refused = areal(slurm, home, "submit", *words, "cluster.all.partition=single")
    assert refused.returncode == 2
    assert (
        "(trainer, generation), 2 in all; there are 1; set cluster.shape=split and cluster.share_nodes=true"
        in refused.stderr
    )
    words += ["cluster.shape=split", "cluster.share_nodes=true", "cluster.all.partition=single", "run_group=users"]
    job, run, log = submit(slurm, home, *words)
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    assert [component["NumNodes"].partition("-")[0] for component in slurm.job(job)] == ["1"]  # 1-1 while it waits
    assert read_json(run.summary)["last_step"] == 3
    report = areal(slurm, home, "report", run.root).stdout
    assert re.search(r"GPU-hours +generator 0\.0\d+, trainer 0\.0\d+\n", report), report
    for path in (run.root, *run.root.rglob("*")):
        status = path.stat()
        own = path.parent == run.secrets or path.name == "signing.so"  # loaded into its owner's processes
        wanted = 0o2770 if path.is_dir() else 0o600 if own else 0o660
        assert (oct(status.st_mode & wanted), oct(status.st_mode & 0o007), status.st_gid) == (
            oct(wanted),
            "0o0",
            100,
        ), path
        assert not own or not status.st_mode & 0o077


@pytest.mark.long
def test_A40_without_requeueing_or_a_warning_the_next_job_goes_on_where_the_time_limit_has_cut_one_off(
    strict: SlurmCluster, desk: Path
) -> None:
    profile = REPOSITORY / "configs/site/no_het_no_requeue.yaml"
    site = ["cluster.all.account=science", "cluster.all.partition=science", "cluster.all.gpus_per_node=''"]
    steps = 3 * STEPS  # Slurm looks at time limits each 30 s
    # Nobody minds SIGURG.
    unwarned = ["cluster.all.raw=['--signal=B:URG@1']", "cluster.all.gpus=1", "cluster.all.exclusive=yes"]
    config, *words = arguments(desk, strict.dir / "model")
    job, run, log = submit(
        strict, desk, config, str(profile), *words, *LONG, f"trainer.total_steps={steps}", *site, *unwarned
    )
    wait_for_step(run, 6)
    strict.call("scontrol", "update", f"jobid={job}", "EndTime=now")
    assert strict.wait_for_state(job, "TIMEOUT") == "TIMEOUT"
    wait_for("the next job", lambda: len(jobs_of(run)) == 2)
    first, second = jobs_of(run)
    assert first == job
    assert f"job {second} goes on when this one has ended" in log.read_text(encoding="utf-8")
    assert strict.wait_for_state(second, *OVER, limit_s=LONGEST_S) == "COMPLETED"
    assert_proven_in_two_attempts(run, (run.slurm / f"{second}.log").read_text(encoding="utf-8"), steps)
    resumed = run.attempt(2).log("trainer", 0).read_text(encoding="utf-8")
    step = re.search(r"resumed from .*/checkpoints/step-(\d+)", resumed)
    assert step is not None
    assert 4 <= int(step[1]) < steps
    report = areal(strict, desk, "report", run.root).stdout
    assert re.search(rf"attempt 1 +job {first}, ", report), report
    assert re.search(rf"attempt 2 +job {second}, .*, finished\n", report), report


INSIDE = """\
#!/bin/bash
# {name} as a stand-in: notes how it was called; what is inside has a Python, the reward, and nothing of Slurm's.
printf '%s\\n' "$(basename "$0") $*" >>{room}/calls
while [ "$1" != python ]; do shift || exit 127; done  # there is no other program in the image
shift
export PYTHONPATH={path} PATH={room}/inside
exec {python} "$@"
"""
SRUN = """\
#!/bin/bash
# srun with pyxis as a stand-in: takes its options out, and puts the container where pyxis would.
options=() container=()
for word; do
  case "$word" in
    --container-*) container+=("${{word#--container-}}") ;;
    python) options+=({room}/bin/inside "${{container[@]}}" /image "$word") ;;
    *) options+=("$word") ;;
  esac
done
exec /usr/bin/srun "${{options[@]}}"
"""
CALLED = {
    "apptainer": "apptainer exec --nv --bind /scratch --cleanenv /image python -m areal_hpc.cluster.agent",
    "pyxis": "inside image=/image mounts=/scratch:/scratch /image python -m areal_hpc.cluster.agent",
    "shifter": "shifter --image=/image --volume=/scratch:/scratch --module=gpu python -m areal_hpc.cluster.agent",
}
ARGS = {"apptainer": "--cleanenv", "shifter": "--module=gpu"}


def stand_in(directory: Path, runtime: str) -> dict[str, str]:
    """The runtime on a PATH of its own; outside of it there is neither the reward nor torch."""
    room = directory / "site"
    (room / "bin").mkdir(parents=True)
    (room / "inside").mkdir()
    (room / "outside").mkdir()
    block = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
    (room / "outside/sitecustomize.py").write_text(block, encoding="utf-8")
    facts = {"name": runtime, "room": room, "path": PATHS["PYTHONPATH"], "python": sys.executable}
    programs = {"inside" if runtime == "pyxis" else runtime: INSIDE.format(**facts)}
    if runtime == "pyxis":
        programs["srun"] = SRUN.format(room=room)
    for name, text in programs.items():
        path = room / "bin" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    return {
        "PATH": f"{room}/bin:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{room}/outside:{REPOSITORY}",
    }


@pytest.mark.parametrize("runtime", CALLED)
def test_A34_a_run_lives_in_a_container_in_which_nothing_of_slurm_is_and_its_launcher_where_torch_is_not(
    slurm: SlurmCluster, home: Path, model: Path, runtime: str
) -> None:
    container = [f"cluster.container.{word}" for word in (f"runtime={runtime}", "image=/image", "mounts=[/scratch]")]
    if runtime in ARGS:
        container.append(f"cluster.container.args=['{ARGS[runtime]}']")
    words = [*arguments(home, model), *SHORT, *container, "cluster.shape=het", "cluster.all.gpus=1"]
    site = stand_in(home, runtime)
    job, run, log = submit(slurm, home, *words, env=site)
    state = slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S)
    assert state == "COMPLETED", log.read_text(encoding="utf-8")
    assert read_json(run.summary)["last_step"] == 3
    calls = (home / "site/calls").read_text(encoding="utf-8").splitlines()
    assert len([call for call in calls if call.startswith(f"{CALLED[runtime]} {run.root} 1")]) == 2
    assert len([call for call in calls if call.endswith("python -m areal_hpc.roles.preparation")]) == 1

    wrong, second, _ = submit(slurm, home, *words, "name=wrong", "rollout.reward=nowhere:nothing", env=site)
    assert slurm.wait_for_state(wrong, *OVER, limit_s=LONGEST_S) == "FAILED"
    said = (second.slurm / f"{wrong}.log").read_text(encoding="utf-8")
    assert "rollout.reward" in said
    assert second.all_attempts() == []


MODULE = """\
#%Module1.0
setenv FROM_THE_MODULE yes
"""
CONDA = """\
conda() { [ "$1 $2" = "activate areal" ] && export FROM_CONDA=yes; }
"""
SITE = """\
for one in modules venv conda; do source {directory}/$one.sh || return 1; done
export PYTHONPATH={path}
[ "$FROM_THE_MODULE $FROM_CONDA $VIRTUAL_ENV" = "yes yes {venv}" ]
"""


def test_an_evaluation_is_typed_with_modules_a_virtual_environment_and_conda_and_requeued_begins_again(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    (home / "modulefiles").mkdir()
    (home / "modulefiles/areal").write_text(MODULE, encoding="utf-8")
    (home / "conda/etc/profile.d").mkdir(parents=True)
    (home / "conda/etc/profile.d/conda.sh").write_text(CONDA, encoding="utf-8")
    site = home / "site.sh"
    facts = {"directory": REPOSITORY / "sbatch/env", "path": PATHS["PYTHONPATH"], "venv": sys.prefix}
    site.write_text(SITE.format(**facts), encoding="utf-8")
    env = {
        "AREAL_HPC_ENV": str(site),
        "AREAL_HPC_MODULES": "areal",
        "MODULEPATH": str(home / "modulefiles"),
        "AREAL_HPC_VENV": sys.prefix,
        "AREAL_HPC_CONDA": str(home / "conda"),
        "AREAL_HPC_CONDA_ENV": "areal",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": "",
    }
    words = [
        *arguments(home, model),
        "generation.replicas=2",
        "rollout.reward=tiny_task:held",
        "rollout.reward_timeout_s=600",
        "evaluation.num_prompts=8",
    ]
    (home / "hold").touch()
    job, log = typed(
        slurm, home, REPOSITORY / "sbatch/eval.sbatch", ["-N2"], *words, "--checkpoint", str(model), env=env
    )
    run = RunDir(home / f"run-eval-{model.name}")
    engines = [run.attempt(1).endpoint("generator", index) for index in range(2)]
    wait_for("its engines", lambda: all(path.exists() for path in engines))
    hosts = {read_json(path)["host"] for path in engines}
    assert len(hosts) == 2, hosts
    slurm.call("scontrol", "requeue", job)
    wait_for("its second start", lambda: len(run.all_attempts()) == 2, LONGEST_S)
    (home / "hold").unlink()
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    text = log.read_text(encoding="utf-8")
    assert re.search(r"^ +reward +\d", text, re.MULTILINE), text
    assert len(run.all_attempts()) == 2


def test_A28_a_run_that_is_submitted_needs_nothing_but_the_cluster(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    """The nodes have one network, the cluster's; no name of another is known there, and nothing goes anywhere else."""
    tried = "import socket; socket.create_connection(('192.0.2.1', 443), 5)"
    outside = slurm.run("srun", sys.executable, "-c", tried)
    assert "Network is unreachable" in outside.stderr
    profile = str(REPOSITORY / "configs/site/no_internet.yaml")
    config, *words = arguments(home, model)
    words = [profile, *words, *SHORT, "evaluation.every_steps=2"]
    job, log = typed(slurm, home, REPOSITORY / "sbatch/train.sbatch", [], config, *words)
    assert len(slurm.job(job)) == 2, "heterogeneous, as it is typed"
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    assert read_json(RunDir(home / "run").summary)["last_step"] == 3


SMALLER = {"pyxis": ["cluster.all.gpus_per_node='4'"], "shifter": ["cluster.all.cpus=16"]}
"""Of profiles for nodes that are larger than those of the tests."""


def test_every_profile_is_one_that_a_centre_which_is_configured_so_takes(slurm: SlurmCluster) -> None:
    """As far as Slurm tells of a script before it takes it; two profiles name images that are not there."""
    slurm.call("sacctmgr", "-i", "add", "qos", "regular")
    for profile in sorted((REPOSITORY / "configs/site").glob("*.yaml")):
        words = profile.read_text(encoding="utf-8").splitlines()[0].partition("areal-hpc submit ")[2].split()
        words += SMALLER.get(profile.stem, [])
        planned = areal(slurm, REPOSITORY, "plan", *words).stdout
        assert re.search(r"^sbatch +Job \d+ to start at", planned, re.MULTILINE), (profile.name, planned)


HANDED_ON = {
    "account": ("other", "Account", "other"),
    "qos": ("handed", "QOS", "handed"),
    "time": ("'7'", "TimeLimit", "00:07:00"),
    "reservation": ("handed", "Reservation", "handed"),
    "mem": ("100M", "MinMemoryNode", "100M"),
    "exclude": ("n3", "ExcNodeList", "n3"),
}
ALONE = {
    "partition": ("cpu", "Partition", "cpu"),
    "constraint": ("h100", "Features", "h100"),
    "gres": ("gpu:1", "TresPerNode", "gres:gpu:1"),
    "cpus": ("3", "CPUs/Task", "3"),
    "mem_per_cpu": ("70M", "MinMemoryCPU", "70M"),
}
"""Field to a value, and where and how Slurm shows it."""


def test_slurm_hands_some_fields_of_a_component_on_to_the_next_as_the_documentation_says(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    for words in (["qos", "handed"], ["account", "other"], ["user", "root", "account=other"]):
        slurm.call("sacctmgr", "-i", "add", *words)
    where = ["StartTime=now", "Duration=60", "Users=root", "Nodes=n1", "Flags=IGNORE_JOBS"]
    slurm.call("scontrol", "create", "reservation", "ReservationName=handed", *where)
    for name, (value, key, shown) in {**HANDED_ON, **ALONE}.items():
        words = [*arguments(home, model), "cluster.shape=het", f"cluster.trainer.{name}={value}", f"name={name}"]
        job, _, _ = submit(slurm, home, *words, "cluster.all.raw=['--hold']")
        trainer, generation = (component.get(key) for component in slurm.job(job))
        assert trainer == shown, name
        assert (generation == shown) == (name in HANDED_ON), (name, generation)
        slurm.call("scancel", job)
    slurm.call("scontrol", "delete", "ReservationName=handed")


MPI = {
    "pmix": "export MPI4PY_MPIABI=openmpi",
    "pmi2": f"export MPI4PY_MPIABI=mpich LD_LIBRARY_PATH={sys.prefix}/lib",
}
"""Slurm's kinds of PMI, and a real MPI library that speaks each: Debian's Open MPI knows no PMI-2, PyPI's MPICH no
PMIx."""


def mpi_run(
    slurm: SlurmCluster, home: Path, model: Path, pmi: str, library: str, *more: str
) -> tuple[str, RunDir, Path]:
    words = [*arguments(home, model), *SHORT, "cluster.shape=split", "cluster.generation.nodes=2"]
    return submit(slurm, home, *words, f"cluster.mpi={pmi}", f"cluster.setup=['{MPI[library]}']", *more)


@pytest.mark.parametrize("pmi", MPI)
def test_nodes_find_each_other_by_mpi(slurm: SlurmCluster, home: Path, model: Path, pmi: str) -> None:
    job, run, log = mpi_run(slurm, home, model, pmi, pmi, "generation.replicas=2")
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    assert read_json(run.summary)["last_step"] == 3
    hosts = [read_json(run.attempt(1).endpoint(*name))["host"] for name in [("trainer", 0), ("generator", 1)]]
    assert all(host.startswith("10.99.0.1") for host in hosts)
    assert len(set(hosts)) == 2


def test_a_library_that_does_not_speak_slurms_pmi_is_said_at_once(slurm: SlurmCluster, home: Path, model: Path) -> None:
    wrong, _, log = mpi_run(slurm, home, model, "none", "pmix", "limits.attempts=0")
    assert slurm.wait_for_state(wrong, *OVER, limit_s=LONGEST_S) == "FAILED"
    text = log.read_text(encoding="utf-8")
    assert "the step on n1,n2,n3 ended with code 1" in text
    # Open MPI's own word; others make worlds of one, see test_rendezvous.
    assert "before MPI_INIT completed" in text, text


def test_what_generates_nothing_has_one_component_and_no_node_for_engines(
    slurm: SlurmCluster, home: Path, model: Path
) -> None:
    rows = [{"prompt": f"{number}?", "response": "thank you"} for number in range(16)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "name": "run",
        "run_root": str(home),
        "model": {"path": str(model), "max_tokens": 128},
        "prompts": {"train": str(home / "rows.jsonl")},
        "algorithm": {"name": "sft", "groups_per_step": 4, "minibatches": 2},
        "trainer": {"total_steps": 4},
        "cluster": {"shape": "het", "all": {"cpus": 4}},
    }
    (home / "sft.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    job, run, log = submit(slurm, home, str(home / "sft.yaml"))
    assert [component["NumNodes"].partition("-")[0] for component in slurm.job(job)] == ["1"]  # 1-1 while it waits
    assert slurm.wait_for_state(job, *OVER, limit_s=LONGEST_S) == "COMPLETED", log.read_text(encoding="utf-8")
    assert read_json(run.summary)["last_step"] == 4
