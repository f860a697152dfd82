"""The commands ``serve`` and ``page``: a run that learns from an agent in daily use, and a run's page after its end.

areal-hpc serve CONFIG      as ``run``, but the service takes the place of prompts; stops and resumes as ``run`` does
areal-hpc page RUN          the same page that a serving run shows, from the files of any run
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from areal_hpc.config.schema import Config
    from areal_hpc.fs import RunDir

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SERVING = ("agent.online.enabled=true", "prompts.train=areal_hpc.tasks.open_ended:OpenEnded")
"""What makes a run serve, whatever its configuration says."""


def add_service_commands(
    commands: Commands,
    add_run_arguments: Callable[[argparse.ArgumentParser], None],
    launch: Callable[[argparse.Namespace, Config], int],
) -> None:
    """Add both commands.

    Args:
        launch: runs a configuration as ``run`` does.
    """
    serve = commands.add_parser("serve", help="serve an agent in daily use, and train the model on what it does")
    add_run_arguments(serve)
    serve.set_defaults(command=lambda options: launch(options, serving_config(options.config)))

    page = commands.add_parser("page", help="show a run in a web page: its sessions token by token, its learning curve")
    page.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run: run_root/name, as in runs/gsm8k")
    page.add_argument("--port", type=int, default=0, metavar="N", help="of loopback; any that is free if not given")
    page.set_defaults(command=_page)


def serving_config(words: Sequence[str]) -> Config:
    """The configuration that the words of a command line describe, made one that serves.

    Raises:
        ConfigError: as ``read_config``.
    """
    from areal_hpc.config.load import files_and_overrides
    from areal_hpc.config.resolve import read_config

    paths, overrides = files_and_overrides(words)
    with as_file(files("areal_hpc.config").joinpath("serve.yaml")) as lowest:
        return read_config([lowest, *paths], [*overrides, *SERVING])


def _page(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir

    try:
        asyncio.run(show_run(RunDir.open(options.run_dir), options.port, sys.stdout))
    except KeyboardInterrupt:  # how a person ends it
        print()
    return 0


async def show_run(run: RunDir, port: int, stream: TextIO) -> None:
    """Serve the page of a run until this is cancelled; says first where it is."""
    from areal_hpc.keys import read_key
    from areal_hpc.proxy.chronicle import Chronicle
    from areal_hpc.proxy.page import Board, show
    from areal_hpc.report.course import Course

    board = Board(name=run.root.name, chronicle=Chronicle(run.sessions), curve=Course(run).told)
    async with show(board, read_key(run.token), port=port) as url:
        print(f"page {url}/\ntoken in {run.token}\nCtrl-C ends it", file=stream, flush=True)
        await asyncio.Event().wait()
