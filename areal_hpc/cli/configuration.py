"""The commands about configurations: config, keys."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import add_config, print_lines, resolved

if TYPE_CHECKING:
    from areal_hpc.cli.arguments import Commands


def add_commands(commands: Commands) -> None:
    config = commands.add_parser("config", help="show the resolved configuration")
    add_config(config)
    config.add_argument("--diff", action="store_true", help="show only what differs from the defaults")
    config.set_defaults(command=_config)

    keys = commands.add_parser("keys", help="list every configuration key with its type, default and meaning")
    keys.set_defaults(command=_keys)


def _config(options: argparse.Namespace) -> int:
    from areal_hpc.config.describe import dump, render_diff

    config = resolved(options.config)
    print_lines((render_diff(config) if options.diff else dump(config)).removesuffix("\n").split("\n"))
    return 0


def _keys(_: argparse.Namespace) -> int:
    from areal_hpc.config.describe import render_reference

    print_lines(render_reference().removesuffix("\n").split("\n"))
    return 0
