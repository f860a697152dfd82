"""What ``serve`` and ``page`` are: a run that learns from an agent in daily use, and a run's page after its end.

areal-hpc serve CONFIG      as ``run``, but the service takes the place of prompts; stops and resumes as ``run`` does
areal-hpc page RUN          the same page that a serving run shows, from the files of any run
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from areal_hpc.config.schema import Config
    from areal_hpc.run_dir import RunDir

SERVING = ("agent.online.enabled=true", "prompts.train=areal_hpc.tasks.open_ended:OpenEnded")
"""What makes a run serve, whatever its configuration says."""


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
