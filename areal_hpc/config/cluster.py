"""The section ``cluster``: where a run runs, and what it asks Slurm for. No knob has a site's value as its default.

Every field of `cluster.all` can be said again for one component, under `cluster.trainer`, `cluster.generation` or
`cluster.rollout`; what is empty there is taken from `cluster.all`. Of a heterogeneous job Slurm itself hands account,
qos, time, reservation, mem and exclude on from a component to those after it (trainer, generation, rollout) that say
nothing else; all other fields are the component's alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import StrEnum

from areal_hpc.errors import ConfigError

TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})")


class Shape(StrEnum):
    LOCAL = "local"
    HET = "het"
    SPLIT = "split"
    SATELLITES = "satellites"


class SignSockets(StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Runtime(StrEnum):
    NONE = "none"
    APPTAINER = "apptainer"
    PYXIS = "pyxis"
    SHIFTER = "shifter"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerConfig:
    """An image that the run's processes live in. The launcher stays outside, where Slurm's commands are: with the
    Python that submits, which needs neither torch nor what rewards import."""

    runtime: Runtime = Runtime.NONE
    """How this site starts containers: `apptainer`, `pyxis` (enroot, through srun) or `shifter`."""
    image: str = ""
    """What to start, as the runtime names it: a .sif or .sqsh file, or a name. cluster.python is looked for in it."""
    mounts: tuple[str, ...] = ()
    """Directories seen inside, as "/path" or "/outside:/inside": run_root, model and data, where the runtime does not
    show them by itself."""
    args: tuple[str, ...] = ()
    """Further options of the runtime as they are, such as "--module=gpu"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentConfig:
    """What one component asks for. A text is handed to sbatch as it is; empty asks for nothing."""

    nodes: int = 0
    """Nodes of the component; 0 is as in cluster.all, and for rollout: on the trainer's nodes."""
    cpus: int = 0
    """CPUs on each node (--cpus-per-task, one task a node); 0 is as in cluster.all, and there what Slurm gives."""
    gpus: int = 0
    """GPUs of a node that the run uses; 0 is what gres, gpus_per_node or gpus_per_task say. To be said where a site
    gives whole nodes and knows no such option."""
    account: str = ""
    """Account that pays (--account)."""
    partition: str = ""
    """Partition (--partition)."""
    qos: str = ""
    """Quality of service (--qos)."""
    time: str = ""
    """Time limit as Slurm reads it, such as 1-00:00:00, or 90 minutes (--time)."""
    constraint: str = ""
    """Node features (--constraint)."""
    reservation: str = ""
    """Reservation (--reservation)."""
    gres: str = ""
    """Generic resources of a node, such as "gpu:4" (--gres)."""
    gpus_per_node: str = ""
    """GPUs of a node, such as 4 or a100:4, where the site wants it so (--gpus-per-node)."""
    gpus_per_task: str = ""
    """The same, with one task a node (--gpus-per-task)."""
    mem: str = ""
    """Memory of a node, such as 64G; 0 is all of it (--mem)."""
    mem_per_cpu: str = ""
    """Memory for each CPU (--mem-per-cpu)."""
    mem_per_gpu: str = ""
    """Memory for each GPU (--mem-per-gpu)."""
    exclusive: str = ""
    """Whole nodes: "yes", or "user" or "mcs" (--exclusive)."""
    nodelist: str = ""
    """Nodes that must be among those given (--nodelist)."""
    exclude: str = ""
    """Nodes that must not (--exclude)."""
    switches: str = ""
    """Most leaf switches, such as "1@10:00" (--switches)."""
    licenses: str = ""
    """Licences (--licenses)."""
    network: str = ""
    """Network or switch setting (--network)."""
    raw: tuple[str, ...] = ()
    """Further sbatch options as they are, such as "--core-spec=0"; of a component: after those of cluster.all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    shape: Shape = Shape.HET
    """`het`: one heterogeneous Slurm job, a component for each role group. `split`: one plain Slurm job whose nodes are
    divided, for sites without heterogeneous jobs. `satellites`: a job of the trainer and the rollout workers, and small
    jobs of engines that join and leave it at any time. `local`: processes of one machine, as always where
    `areal-hpc run` is typed outside of a job."""
    share_nodes: bool = False
    """Put the engines on the trainer's nodes, on GPUs of their own, so that one node is enough. In the shape
    `satellites` they are there anyway."""
    satellites: int = 1
    """Jobs of engines that `submit` hands in, in the shape `satellites`; each asks for what cluster.generation says,
    and rests in the queue while the run is out for longer than limits.rejoin_s."""
    all: ComponentConfig = field(default_factory=lambda: ComponentConfig(nodes=1))
    """What every component asks for unless it says otherwise."""
    trainer: ComponentConfig = field(default_factory=ComponentConfig)
    """Component of the trainer, the evaluator and, unless they have their own, the rollout workers."""
    generation: ComponentConfig = field(default_factory=ComponentConfig)
    """Component of the engines; in the shape `satellites`, each satellite's job."""
    rollout: ComponentConfig = field(default_factory=ComponentConfig)
    """Component of the rollout workers, where cluster.rollout.nodes is above 0."""
    job_name: str = ""
    """Name of the Slurm job; empty is the run's."""
    comment: str = ""
    """Comment of the job (--comment)."""
    dependency: str = ""
    """What the job waits for, such as "afterok:123" (--dependency)."""
    mail_type: str = ""
    """When Slurm writes a mail (--mail-type)."""
    mail_user: str = ""
    """To whom (--mail-user)."""
    signal_lead_s: int = 0
    """Seconds before the time limit at which the run is told to stop; limits.stop_s must fit into it. 0 is a quarter
    of the time limit, at most 300."""
    requeue: bool = True
    """Requeue the job when it stopped at its time limit, was pre-empted or lost a node, or a node its devices. False,
    for sites that do not: at its time limit, pre-empted, or without devices that it was given, it submits the next job
    of a chain, which goes on, and so does each satellite; after a lost node `resume` does."""
    setup: tuple[str, ...] = ()
    """Shell lines before anything of ours runs, such as "module load cuda"; on every node."""
    prefix: str = ""
    """Command that every Python of the run is started through, such as "numactl --interleave=all"."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """The container of the processes on the nodes."""
    mpi: str = ""
    """PMI through which the nodes of a step find each other by MPI (srun --mpi=list), and prove that they reach each
    other before anything starts: "pmix" for Open MPI, "pmi2" for MPICH and its kin; needs mpi4py, which must find the
    library. Empty: by the address that Slurm tells."""
    python: str = ""
    """Python interpreter on the nodes; empty is the one that submits, or in a container `python`."""
    sign_sockets: SignSockets = SignSockets.AUTO
    """Have Linux sign the connections that torch, gloo, NCCL and the engines open by themselves with the run's secret,
    so that no other user of the machine or its network gets into them. `auto`: where the kernel can, and the run
    begins, or was submitted, beside a C compiler; `always`: or not at all. Costs bandwidth where NCCL goes over TCP
    (`never`, in a network that only you reach)."""


def seconds_of(limit: str) -> int | None:
    """A time limit as sbatch(1) writes it, in seconds; None of one that is not given or has no end.

    Forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.

    Raises:
        ConfigError: it is none of these.
    """
    if limit.upper() in ("", "UNLIMITED", "INFINITE"):
        return None
    if not (found := TIME.fullmatch(limit)):
        raise ConfigError(f'time {limit!r} is no time limit of Slurm; write minutes, "hours:minutes:0" or "days-hours"')
    days, rest = found[1], [int(part) for part in found[2].split(":")]
    places = rest if days or len(rest) == 3 else [0, *rest]
    hours, minutes, seconds = [*places, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def inherited(component: ComponentConfig, everywhere: ComponentConfig) -> ComponentConfig:
    """A component with what it leaves empty filled from ``cluster.all``; ``raw`` of both, in that order."""
    names = [field.name for field in fields(ComponentConfig) if field.name != "raw"]
    filled = {name: getattr(component, name) or getattr(everywhere, name) for name in names}
    return ComponentConfig(**filled, raw=everywhere.raw + component.raw)
