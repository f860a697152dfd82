"""The commands that look at a run, whoever runs it and wherever: status, logs, why, report, page."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import add_run_dir, print_lines
from areal_hpc.errors import ConfigError

if TYPE_CHECKING:
    from areal_hpc.cli.arguments import Commands


def add_commands(commands: Commands) -> None:
    status = commands.add_parser("status", help="how a run is doing, from its files, and what Slurm says of its job")
    add_run_dir(status)
    status.set_defaults(command=_status)

    _add_logs(commands)

    why = commands.add_parser("why", help="who waits for whom right now, or waited when the run ended")
    add_run_dir(why)
    why.set_defaults(command=_why)

    report = commands.add_parser("report", help="what a run came to, what it cost, and how each attempt ended")
    add_run_dir(report)
    report.set_defaults(command=_report)

    page = commands.add_parser("page", help="show a run in a web page: its sessions token by token, its learning curve")
    add_run_dir(page)
    page.add_argument("--port", type=int, default=0, metavar="N", help="of loopback; any that is free if not given")
    page.set_defaults(command=_page)


def _add_logs(commands: Commands) -> None:
    logs = commands.add_parser("logs", help="what the processes of a run's newest attempt have said")
    add_run_dir(logs)
    logs.add_argument("--role", default="", help="only of this role, such as trainer; launcher is the batch script")
    logs.add_argument("--rank", type=int, metavar="N", help="of the role, only this process")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="last lines of each file; 0 is all")
    logs.add_argument("-f", "--follow", action="store_true", help="go on as they grow, until the run ends")
    logs.set_defaults(command=_logs)


def _status(options: argparse.Namespace) -> int:
    from areal_hpc.report import status_lines
    from areal_hpc.run_dir import RunDir

    print_lines(status_lines(RunDir.open(options.run_dir, waiting=True)))
    return 0


def _logs(options: argparse.Namespace) -> int:
    from areal_hpc.report.logs import show_logs
    from areal_hpc.run_dir import RunDir

    if options.rank is not None and not options.role:
        raise ConfigError("--rank is of a role; add --role")
    run = RunDir.open(options.run_dir, waiting=True)
    lines = show_logs(run, options.role, options.rank, lines=options.lines, follow=options.follow)
    print_lines(lines, flush=options.follow)
    return 0


def _why(options: argparse.Namespace) -> int:
    from areal_hpc.report import why_lines
    from areal_hpc.run_dir import RunDir

    print_lines(why_lines(RunDir.open(options.run_dir, waiting=True)))
    return 0


def _report(options: argparse.Namespace) -> int:
    from areal_hpc.report import report_run
    from areal_hpc.run_dir import RunDir

    report_run(RunDir.open(options.run_dir), ask=True)
    return 0


def _page(options: argparse.Namespace) -> int:
    import asyncio

    from areal_hpc.roles.service import show_run
    from areal_hpc.run_dir import RunDir

    try:
        asyncio.run(show_run(RunDir.open(options.run_dir), options.port, sys.stdout))
    except KeyboardInterrupt:  # how a person ends it
        print()
    return 0
