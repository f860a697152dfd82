"""The commands about what a run did and made: ledger, inspect, export."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import add_run_dir, print_lines
from areal_hpc.errors import ConfigError
from areal_hpc.exits import EXIT_DONE, EXIT_FAILED

if TYPE_CHECKING:
    from areal_hpc.cli.arguments import Commands


def add_commands(commands: Commands) -> None:
    ledger = commands.add_parser("ledger", help="prove from a run's files that every prompt was consumed exactly once")
    add_run_dir(ledger)
    ledger.add_argument("--json", action="store_true", help="print the findings as one JSON document")
    ledger.set_defaults(command=_ledger)

    inspect = commands.add_parser("inspect", help="what a run was trained on: its archived steps, or one of them")
    add_run_dir(inspect)
    inspect.add_argument("--step", type=int, help="show the episodes of this step")
    inspect.add_argument("--group", type=int, metavar="G", help="of the step, only this group")
    inspect.add_argument("--episode", type=int, metavar="E", help="of each group, only this episode")
    inspect.add_argument("--model", type=Path, metavar="DIR", help="where the tokenizer is, if it has moved")
    inspect.add_argument("--color", action="store_true", help="colour tokens by version also where this is no terminal")
    inspect.set_defaults(command=_inspect)

    export = commands.add_parser("export", help="write a checkpoint's weights as a Hugging Face directory")
    add_run_dir(export)
    export.add_argument(
        "--step", type=int, metavar="N", help="optimizer step of the checkpoint; the newest if not given"
    )
    export.add_argument("--merged", action="store_true", help="adapters as part of the model's own weights")
    export.add_argument("directory", type=Path, metavar="DIR")
    export.set_defaults(command=_export)


def _ledger(options: argparse.Namespace) -> int:
    """Exit code 0: proven; 1: violated, with the steps, positions and prompts that break it."""
    import json

    from areal_hpc.report import ledger_lines, prove_run
    from areal_hpc.run_dir import RunDir

    run = RunDir.open(options.run_dir)
    proof = prove_run(run)
    print_lines([json.dumps(proof.facts(), indent=1)] if options.json else ledger_lines(run, proof))
    return EXIT_DONE if proof.proven else EXIT_FAILED


def _inspect(options: argparse.Namespace) -> int:
    from areal_hpc.report.inspect import show_step, step_table
    from areal_hpc.run_dir import RunDir

    run = RunDir.open(options.run_dir)
    if options.step is None and (options.group, options.episode) != (None, None):
        raise ConfigError("--group and --episode are of a step; add --step")
    colour = options.color or sys.stdout.isatty()
    wanted = {"group": options.group, "episode": options.episode, "model": options.model, "colour": colour}
    print_lines(step_table(run) if options.step is None else show_step(run, options.step, **wanted))
    return 0


def _export(options: argparse.Namespace) -> int:
    from areal_hpc.roles.export import export
    from areal_hpc.run_dir import RunDir

    version, use = export(RunDir.open(options.run_dir), options.step, options.directory, merged=options.merged)
    print(f"{options.directory}: the weights of step {version.step}; {use}")
    return 0
