"""Paths in a configuration: relative ones are taken from where the command is typed, as in a shell.

    config = anchored(config, Path.cwd())

The directories of the YAML files play no part: a run has several layers, and an override lies in no file at all. From
there on every path is absolute, also in the run directory's ``config.yaml``: ``inspect``, ``export``, ``replay`` and
``--resume`` then mean the same files wherever they are typed.
"""

from __future__ import annotations

import re
from pathlib import Path

from areal_hpc.config.keys import value_of, with_value
from areal_hpc.config.schema import Config

TASK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""A task or function ``module:name``, where a data set or a reward may also be a path."""
PATHS = (
    "model.path",
    "prompts.train",
    "prompts.eval",
    "rollout.reward",
    "algorithm.kl.reference",
    "algorithm.critic.path",
    "algorithm.dpo.reference",
    "evaluation.checkpoint",
    "replay.run",
    "run_root",
)
"""Every key that holds a path of the machine that the command is typed on."""
FROM_HERE = "a relative path is looked for from where the command is typed"
"""What an error about a path adds."""


def anchored(config: Config, here: Path) -> Config:
    """The configuration with every path absolute.

    Args:
        here: the directory that relative paths begin in.
    """
    for name in PATHS:
        path = value_of(config, name)
        if path and not TASK.fullmatch(path):
            config = with_value(config, name, str(here / path))
    return config
