"""The arguments of ``areal-hpc join``; what it does is in ``joining``, which is loaded only then."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_join(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Put the command among the others."""
    join = commands.add_parser("join", help="serve a run that goes on elsewhere with engines of this machine")
    join.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run: run_root/name, as in runs/gsm8k")
    join.add_argument(
        "--engines", type=int, metavar="N", help="how many; as many as there are devices for if not given, else one"
    )
    join.add_argument(
        "--wait", type=float, metavar="SECONDS", help="for the run to start or to go on; limits.rejoin_s if not given"
    )
    join.add_argument("--after", type=int, default=0, metavar="EPOCH", help="only attempts that come after this one")
    join.set_defaults(command=_join)


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
    )
