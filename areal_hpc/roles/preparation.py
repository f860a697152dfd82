"""``python -m areal_hpc.roles.preparation``: the preflight of a run whose processes live in a container, inside of it.

    launcher, outside                                    one task of an srun step, inside
    -----------------                                    --------------------------------
    the configuration, as YAML                 ----->    preflight, and the model if it has a maker
    ConfigError with the same words            <-----    {"problem": "..."}

The launcher's own Python may have neither torch nor what the reward imports, the container none of Slurm's commands.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.cluster.containers import python_on_nodes
from areal_hpc.cluster.environment import allocation
from areal_hpc.cluster.steps import check_command
from areal_hpc.config.cluster import Runtime
from areal_hpc.config.describe import dump
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config
from areal_hpc.errors import AttemptFailed, ConfigError, UserError

log = logging.getLogger(__name__)
STARTS = 3


def prepare(config: Config) -> None:
    """See that the processes of a run will find what they need, where they will be.

    Raises:
        ConfigError, DataError: as ``preflight``; of a run in a container ConfigError for both.
        AttemptFailed: the container, or the step that was to start it, did not come up within ``limits.start_s``, three
            times: a node that has just been booted, or an image that many load at once, is no end of a run of weeks.
    """
    if config.cluster.container.runtime is Runtime.NONE:
        from areal_hpc.roles.wiring.preflight import preflight

        preflight(config)
        return
    words = [python_on_nodes(config.cluster), "-m", "areal_hpc.roles.preparation"]
    command = check_command(config, allocation(os.environ), words)
    for _ in range(STARTS - 1):
        try:
            return _ask(command, config)
        except AttemptFailed as error:
            log.warning("%s; once more", error)
    _ask(command, config)


def _ask(command: Sequence[str], config: Config) -> None:
    limit_s = config.limits.start_s
    try:
        done = subprocess.run(  # noqa: S603  no shell
            command, input=dump(config), capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise AttemptFailed(f"waited {limit_s:g} s (limits.start_s) for {' '.join(command)}") from error
    if done.returncode:
        raise AttemptFailed(f"{' '.join(command)}: ended with code {done.returncode}:\n{done.stderr}")
    if problem := json.loads(done.stdout.splitlines()[-1])["problem"]:
        raise ConfigError(problem)


def problem_of(config: Config) -> str:
    """What keeps a run with this configuration from being started here; empty if nothing does. Makes its model."""
    from areal_hpc.roles.wiring.models import make_model
    from areal_hpc.roles.wiring.preflight import check_made, preflight

    try:
        preflight(config)
        if not Path(config.model.path).is_dir():
            make_model(config)
            check_made(config)
    except UserError as error:
        return str(error)
    return ""


def main() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(sys.stdin.read())
        file.flush()
        config = load([Path(file.name)])
    print(json.dumps({"problem": problem_of(config)}))


if __name__ == "__main__":
    main()
