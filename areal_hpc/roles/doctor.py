"""``areal-hpc doctor``: can this place carry the run? Each finding says what was found, and what to do if it is wrong.

On a login node or laptop: Slurm, the file system of ``run_root``, clock, network, devices, files. Inside a Slurm job
(``salloc``, then the same command) also every node of the job, since clocks and networks are wrong between two of them.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from areal_hpc.cluster.containers import python_on_nodes, wrapping
from areal_hpc.cluster.environment import in_job
from areal_hpc.cluster.owner import Machine, namesakes
from areal_hpc.cluster.probe import clock_ahead_s
from areal_hpc.cluster.site import het_problem, partitions, settings
from areal_hpc.config.cluster import Shape, SignSockets
from areal_hpc.config.schema import Config
from areal_hpc.errors import RunDirError
from areal_hpc.mount import examine
from areal_hpc.roles.provisions import missing
from areal_hpc.signing import provide

Verdict = Literal["ok", "warning", "wrong"]
PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun")
MOST_SKEW_S = 2.0
"""Clocks further apart make the times in logs and records of different nodes misleading; nothing decides by them."""
ENOUGH_FILES = 1024
ASK_S = 30.0
STEP_S = 120.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def examine_site(config: Config, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Everything that can be checked from here, as it is found."""
    root = Path(config.run_root).absolute()
    directory = next(place for place in (root, *root.parents) if place.is_dir())
    if config.cluster.shape is not Shape.LOCAL:
        yield from _scheduler(config)
    file_system = list(_file_system(config, directory))
    yield from file_system
    if file_system[0].verdict != "wrong":
        yield _signatures(config, directory)
    yield from _limits(environment)
    yield from _devices()
    lacks = list(missing(config))
    yield from (
        Finding(name="files", verdict="wrong", found=one.partition("; ")[0], advice=one.partition("; ")[2])
        for one in lacks
    )
    if not lacks:
        yield Finding(name="files", verdict="ok", found="model and data are there; nothing will be fetched")
    if in_job(environment):
        yield from _nodes(config, directory)


def report_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """The table, and what it comes to."""
    width = max(len(one.name) for one in findings)
    for one in findings:
        yield f"{one.name:<{width}}  {one.verdict:<7}  {one.found}" + (f"; {one.advice}" if one.advice else "")
    wrong = sum(one.verdict == "wrong" for one in findings)
    yield f"{wrong} of {len(findings)} are wrong" if wrong else "nothing is wrong"


def _scheduler(config: Config) -> Iterator[Finding]:
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if len(absent) == len(PROGRAMS):
        found = "there is none on this machine: `areal-hpc run` trains here"
        yield Finding(name="scheduler", verdict="ok", found=found, advice="for a cluster, type this on its login node")
        return
    if absent:
        advice = "ask your site's support where they are"
        yield Finding(name="scheduler", verdict="wrong", found=f"there is no {', '.join(absent)} here", advice=advice)
        return
    asked = _call(["scontrol", "show", "config"])
    if asked.returncode:
        said = asked.stderr.strip() or f"scontrol ended with code {asked.returncode}"
        yield Finding(name="scheduler", verdict="wrong", found=said, advice="ask again when Slurm answers")
        return
    facts = settings(asked.stdout)
    yield Finding(name="scheduler", verdict="ok", found=f"Slurm {facts.get('SLURM_VERSION', '?')} answers")
    yield from _rules(config, facts)
    yield from _controllers_clock(asked.stdout)


def _rules(config: Config, facts: Mapping[str, str]) -> Iterator[Finding]:
    """What the site's settings mean for the run."""
    if config.cluster.shape is Shape.HET and (problem := het_problem(config, facts, partitions())):
        found, _, advice = problem.partition("; ")
        yield Finding(name="heterogeneous jobs", verdict="wrong", found=found, advice=advice)
    if config.cluster.requeue and facts.get("JobRequeue") == "0":
        yield Finding(
            name="requeueing",
            verdict="warning",
            found="this site does not requeue jobs by default (JobRequeue=0), and may refuse it",
            advice="set cluster.requeue=false: the run then goes on as a chain of jobs",
        )
    if facts.get("AccountingStorageType", "").endswith("none"):
        yield Finding(
            name="accounts",
            verdict="warning",
            found="this site keeps none",
            advice="`status` knows of a job that left the queue only what the run's files tell",
        )
    yield from _partitions(config)


def _partitions(config: Config) -> Iterator[Finding]:
    """Whether the partitions that the run names are there."""
    cluster = config.cluster
    named = {one.partition for one in (cluster.all, cluster.trainer, cluster.generation, cluster.rollout)} - {""}
    if not named:
        return
    asked = _call(["sinfo", "--noheader", "--format", "%R|%a"])
    if asked.returncode:
        said = asked.stderr.strip() or f"sinfo ended with code {asked.returncode}"
        yield Finding(name="partition", verdict="warning", found=said, advice="ask again when Slurm answers")
        return
    known = {line.split("|")[0]: line.split("|")[1] for line in asked.stdout.split()}
    for name in sorted(part for text in named for part in text.split(",")):
        if name not in known:
            there = ", ".join(sorted(known))
            yield Finding(name="partition", verdict="wrong", found=f"there is no {name}", advice=f"there are: {there}")
        elif known[name] != "up":
            yield Finding(name="partition", verdict="warning", found=f"{name} is {known[name]}")


def _controllers_clock(said: str) -> Iterator[Finding]:
    """scontrol's first line carries the controller's time, to the second."""
    found = re.search(r"Configuration data as of (\S+)", said)
    if found is None:
        return
    ahead = time.time() - datetime.fromisoformat(found[1]).timestamp()
    yield _clock("clock", ahead if abs(ahead) > MOST_SKEW_S else 0.0, "Slurm's controller")


def _clock(name: str, ahead_s: float, than: str) -> Finding:
    if abs(ahead_s) <= MOST_SKEW_S:
        return Finding(name=name, verdict="ok", found=f"within {MOST_SKEW_S:g} s of {than}")
    side = "ahead of" if ahead_s > 0 else "behind"
    advice = "tell your site's support; times in logs will not fit together"
    return Finding(name=name, verdict="warning", found=f"{abs(ahead_s):.1f} s {side} {than}", advice=advice)


def _file_system(config: Config, directory: Path) -> Iterator[Finding]:
    try:
        mount = examine(directory, config.buffer.min_free_mb)
    except RunDirError as error:
        found, _, advice = str(error).partition("; ")
        yield Finding(name="file system", verdict="wrong", found=found, advice=advice)
        return
    room = f"{mount.free_bytes / (1 << 30):.0f} GiB free"
    yield Finding(name="file system", verdict="ok", found=f"{directory} ({mount.kind or 'unknown'}), {room}")
    yield _clock("clock", clock_ahead_s(directory), f"the server of {directory}")


def _limits(environment: Mapping[str, str]) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < ENOUGH_FILES:
        advice = f"ask your site's support for {ENOUGH_FILES}"
        yield Finding(name="open files", verdict="warning", found=f"at most {files}", advice=advice)
    with _listener("127.0.0.1") as port:
        yield Finding(name="ports", verdict="ok", found=f"the kernel gives free ones, such as {port}")
    proxies = [name for name in PROXIES if environment.get(name) or environment.get(name.upper())]
    if proxies:
        yield Finding(
            name="proxy", verdict="ok", found=f"{', '.join(proxies)} is set; the run's own traffic ignores it"
        )


def _signatures(config: Config, directory: Path) -> Finding:
    """Whether connections between ranks can ask for the run's secret: with this machine's kernel and compiler, from a
    library in ``directory``."""
    choice = config.cluster.sign_sockets
    if choice is SignSockets.NEVER:
        return Finding(name="signatures", verdict="ok", found="connections between ranks ask for no secret, as you say")
    with tempfile.TemporaryDirectory(prefix=".areal-hpc-", dir=directory) as scratch:
        problem = provide(Path(scratch) / "signing.so", SignSockets.AUTO)
    if not problem:
        return Finding(name="signatures", verdict="ok", found="connections between ranks ask for the run's secret")
    verdict: Verdict = "wrong" if choice is SignSockets.ALWAYS else "warning"
    advice = "without, whoever reaches the run's network can get into them; ask for whole nodes there"
    return Finding(name="signatures", verdict=verdict, found=problem, advice=advice)


def _devices() -> Iterator[Finding]:
    try:
        from areal_hpc.accelerator import CPU, detect

        found = detect()
    except ImportError as error:
        advice = "install an extra of this package: cpu, cuda or npu"
        yield Finding(name="devices", verdict="wrong", found=str(error), advice=advice)
        return
    cpus = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} CPUs usable"
    if found is CPU:
        yield Finding(name="devices", verdict="ok", found=f"no accelerator on this machine, {cpus}")
        return
    import torch

    yield Finding(
        name="devices", verdict="ok", found=f"{torch.accelerator.device_count()} of kind {found.name}, {cpus}"
    )


def _nodes(config: Config, directory: Path) -> Iterator[Finding]:
    """One probe on every node of the job; each connects to a port here."""
    around, python = wrapping(config.cluster.container, gpus=0), python_on_nodes(config.cluster)
    with _listener("") as port:  # under which address srun's host is known, only a step is told
        words = ["srun", "--ntasks-per-node=1", "--overlap", "--mpi=none", *around.srun, *around.words, python]
        asked = _call([*words, "-m", "areal_hpc.cluster.probe", str(directory), str(port)], STEP_S)
    if asked.returncode:
        yield Finding(name="nodes", verdict="wrong", found=f"a step failed: {asked.stderr.strip()}", advice="see srun")
    nodes = [json.loads(line) for line in sorted(asked.stdout.splitlines()) if line.startswith("{")]
    for node in nodes:
        name = f"node {node['node']}"
        if node["unreachable"]:
            advice = "nodes must reach each other; ask your site's support which network to use"
            yield Finding(name=name, verdict="wrong", found=f"{node['host']}: {node['unreachable']}", advice=advice)
        else:
            devices = f", devices {node['devices']}" if node["devices"] else ""
            yield Finding(name=name, verdict="ok", found=f"reaches {node['host']}, {node['cpus']} CPUs{devices}")
        yield _clock(name, node["clock_ahead_s"], f"the server of {directory}")
    if problem := namesakes({node["node"]: Machine(*node["machine"]) for node in nodes}):
        found, _, advice = problem.partition("; ")
        yield Finding(name="hostnames", verdict="wrong", found=found, advice=advice)


@contextmanager
def _listener(host: str) -> Iterator[int]:
    """A port on ``host`` that takes connections, and drops them, for the time of the block."""
    with socket.create_server((host, 0)) as server:

        def take() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:  # closed: the block is over
                    return

        threading.Thread(target=take, name="doctor", daemon=True).start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread, and the port, as they are


def _call(command: Sequence[str], limit_s: float = ASK_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} does not answer: {error}")
