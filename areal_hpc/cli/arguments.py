"""What several commands take: a configuration, a run, and how a run is started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_hpc.config.schema import Config

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="YAML files, of which later ones win over earlier ones, and overrides, which win over all files: "
        "name=second for another run directory, trainer.total_steps=40, ...; `areal-hpc keys` lists them",
    )


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run: run_root/name, as in runs/gsm8k")


def add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="continue the run that the run directory holds")
    parser.add_argument("--takeover", action="store_true", help="with --resume: even if an attempt seems to be running")


def resolved(words: Sequence[str]) -> Config:
    """The configuration that the words of a command line describe.

    Raises:
        ConfigError: as ``read_config``.
    """
    from areal_hpc.config.load import files_and_overrides
    from areal_hpc.config.resolve import read_config

    return read_config(*files_and_overrides(words))


def local_unless_in_job() -> list[str]:
    """The override for a command that starts processes itself: outside of a Slurm job they are processes of this
    machine, whatever the shape of a job would be."""
    from areal_hpc.cluster.environment import in_job

    return [] if in_job(os.environ) else ["cluster.shape=local"]


def print_lines(lines: Iterable[str], *, flush: bool = False) -> None:
    """Print until the end, or until the reader has seen enough, as in ``areal-hpc inspect ... | head``."""
    try:
        for line in lines:
            print(line, flush=flush)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the exit
