"""The commands that start a run of any kind, and the one that ends it: run, serve, resume, replay, eval, stop."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import add_config, add_resume, add_run_dir, local_unless_in_job, resolved
from areal_hpc.cli.slurm import submit

if TYPE_CHECKING:
    from areal_hpc.cli.arguments import Commands
    from areal_hpc.config.schema import Config


def add_commands(commands: Commands) -> None:
    run = commands.add_parser("run", help="train: start every process of a run on this machine and watch it")
    _add_run(run)
    run.set_defaults(command=_run)

    serve = commands.add_parser("serve", help="serve an agent in daily use, and train the model on what it does")
    _add_run(serve)
    serve.set_defaults(command=_serve)

    _add_resume(commands)

    stop = commands.add_parser("stop", help="ask a run to write a checkpoint and end, and wait until it has")
    add_run_dir(stop)
    stop.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    stop.set_defaults(command=_stop)

    _add_replay(commands)
    _add_eval(commands)


def _add_resume(commands: Commands) -> None:
    resume = commands.add_parser("resume", help="go on with a run as it ran last: in a Slurm job, or on this machine")
    add_run_dir(resume)
    resume.add_argument(
        "config",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides: what is to be different from now on, such as trainer.total_steps=400",
    )
    resume.add_argument("--takeover", action="store_true", help="even if an attempt seems to be running")
    resume.set_defaults(command=_resume)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_resume(parser)
    parser.add_argument(
        "--resume-from", type=int, metavar="STEP", help="as --resume, from exactly this step's checkpoint"
    )


def _add_replay(commands: Commands) -> None:
    replay = commands.add_parser("replay", help="train again on what a run has archived, and compare the weights")
    add_run_dir(replay)
    replay.add_argument(
        "config",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides: what is to be different this time, such as algorithm.clip_high=0.3",
    )
    replay.add_argument("--train-only", action="store_true", required=True, help="train, generate nothing")
    replay.add_argument("--from-step", type=int, default=0, metavar="S", help="begin with the checkpoint of step S")
    replay.add_argument("--to-step", type=int, default=0, metavar="T", help="the last step; all if not given")
    replay.add_argument("--out", type=Path, metavar="DIR", help="the new run directory; RUN-replay if not given")
    replay.set_defaults(command=_replay)


def _add_eval(commands: Commands) -> None:
    evaluation = commands.add_parser("eval", help="measure a checkpoint: mean reward and pass@k, on engines alone")
    add_config(evaluation)
    evaluation.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH|RUN", help="a Hugging Face directory, or a run"
    )
    evaluation.add_argument(
        "--step", type=int, metavar="N", help="of the run, this checkpoint; the newest if not given"
    )
    evaluation.add_argument("--out", type=Path, metavar="DIR", help="the new run directory; NAME-eval-... if not given")
    evaluation.set_defaults(command=_eval)


def _run(options: argparse.Namespace) -> int:
    return _launch(options, resolved([*options.config, *local_unless_in_job()]))


def _serve(options: argparse.Namespace) -> int:
    from areal_hpc.roles.service import serving_config

    return _launch(options, serving_config([*options.config, *local_unless_in_job()]))


def _resume(options: argparse.Namespace) -> int:
    from areal_hpc.roles.resuming import resumption
    from areal_hpc.run_dir import RunDir

    run = RunDir.open(options.run_dir, waiting=True)
    found = resumption(run, options.config)
    os.chdir(found.directory)
    if found.is_submitted:
        print(f"resume {run.root} as a Slurm job again, from {found.directory}", flush=True)
        return submit(found.config, ["--resume", *(["--takeover"] if options.takeover else [])])
    print(f"resume {run.root} on this machine again, from {found.directory}", flush=True)
    options.resume, options.resume_from = True, None
    return _launch(options, found.config)


def _launch(options: argparse.Namespace, config: Config) -> int:
    from areal_hpc.cluster.environment import allocation
    from areal_hpc.config.cluster import Shape
    from areal_hpc.report import LiveConsole
    from areal_hpc.roles.launcher import run_local
    from areal_hpc.telemetry import setup_logging

    setup_logging("launcher", 0)
    _import_from_here()
    continued = config.cluster.shape is not Shape.LOCAL and allocation(os.environ).continues
    return run_local(
        config,
        resume=options.resume or continued or options.resume_from is not None,
        resume_from=options.resume_from,
        takeover=options.takeover or continued,
        console=LiveConsole(config.trainer.total_steps, sys.stdout),
    )


def _import_from_here() -> None:
    """Have modules of rewards and tasks looked for where the command is typed, as the roles do."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def _stop(options: argparse.Namespace) -> int:
    from areal_hpc.liveness.job import stop_submitted
    from areal_hpc.run_dir import RunDir

    print(f"{options.run_dir}: {stop_submitted(RunDir.open(options.run_dir, waiting=True), options.timeout)}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from areal_hpc.roles.replay import replay_run
    from areal_hpc.run_dir import RunDir
    from areal_hpc.telemetry import setup_logging

    setup_logging("launcher", 0)
    source = RunDir.open(options.run_dir)
    out = options.out or source.root.with_name(f"{source.root.name}-replay")
    return replay_run(
        source,
        out.absolute(),
        from_step=options.from_step,
        to_step=options.to_step,
        overrides=[*options.config, *local_unless_in_job()],
        stream=sys.stdout,
    )


def _eval(options: argparse.Namespace) -> int:
    from areal_hpc.roles.evaluation import evaluate
    from areal_hpc.telemetry import setup_logging

    setup_logging("launcher", 0)
    _import_from_here()
    return evaluate(
        resolved([*options.config, *local_unless_in_job()]), options.checkpoint, options.step, options.out, sys.stdout
    )
