"""The commands of a cluster: plan, submit, join, doctor."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import add_config, add_resume, add_run_dir, print_lines, resolved
from areal_hpc.exits import EXIT_FAILED, EXIT_USER_ERROR

if TYPE_CHECKING:
    from areal_hpc.cli.arguments import Commands
    from areal_hpc.config.schema import Config


def add_commands(commands: Commands) -> None:
    plan = commands.add_parser("plan", help="what a run will ask Slurm for, who will sit where, and what is missing")
    add_config(plan)
    plan.set_defaults(command=_plan)

    submit = commands.add_parser("submit", help="hand a run to Slurm and return at once")
    add_config(submit)
    add_resume(submit)
    submit.set_defaults(command=_submit)

    _add_join(commands)

    doctor = commands.add_parser(
        "doctor", help="check whether this place can carry a run; in a Slurm job: all of its nodes"
    )
    add_config(doctor)
    doctor.set_defaults(command=_doctor)


def _add_join(commands: Commands) -> None:
    join = commands.add_parser("join", help="serve a run that goes on elsewhere with engines of this machine")
    add_run_dir(join)
    join.add_argument(
        "--engines", type=int, metavar="N", help="how many; as many as there are devices for if not given, else one"
    )
    join.add_argument(
        "--wait", type=float, metavar="SECONDS", help="for the run to start or to go on; limits.rejoin_s if not given"
    )
    join.add_argument("--after", type=int, default=0, metavar="EPOCH", help="only attempts that come after this one")
    join.add_argument(
        "--rest",
        action="store_true",
        help="in a satellite's script: exit with 69, for the job to be held, if none comes",
    )
    join.set_defaults(command=_join)


def _plan(options: argparse.Namespace) -> int:
    from areal_hpc.roles.planning import plan_run

    lines, possible = plan_run(resolved(options.config))
    print_lines(lines)
    return 0 if possible else EXIT_USER_ERROR


def _submit(options: argparse.Namespace) -> int:
    run_options = [f"--{name}" for name in ("resume", "takeover") if getattr(options, name)]
    return submit(resolved(options.config), run_options)


def submit(config: Config, run_options: Sequence[str]) -> int:
    """Have Slurm run ``config`` with these options of ``areal-hpc run``, and print where the job is."""
    from areal_hpc.cli import main
    from areal_hpc.roles.submission import submit_run

    print_lines(submit_run(config, main, run_options).lines())
    return 0


def _join(options: argparse.Namespace) -> int:
    from areal_hpc.roles.joining import join_run
    from areal_hpc.telemetry import setup_logging

    setup_logging("satellite", 0)
    return join_run(
        options.run_dir,
        num_engines=options.engines,
        after=options.after,
        wait_s=options.wait,
        environment=os.environ,
        may_rest=options.rest,
    )


def _doctor(options: argparse.Namespace) -> int:
    """Exit code 1: something is wrong, with what to do about it."""
    from areal_hpc.roles.doctor import examine_site, report_lines

    findings = list(examine_site(resolved(options.config)))
    print_lines(report_lines(findings))
    return EXIT_FAILED if any(one.verdict == "wrong" for one in findings) else 0
