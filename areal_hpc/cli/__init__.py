"""The command line, a file for each group of commands.

    training.py        run, serve, resume, stop, replay, eval
    slurm.py           plan, submit, join, doctor
    watching.py        status, logs, why, report, page
    evidence.py        ledger, inspect, export
    configuration.py   config, keys
    arguments.py       what several of them take

Arguments are read here and nothing else; the work is done by functions that tests call. Imports are late, so that help
and ``config`` start at once on a login node.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_hpc import __version__
from areal_hpc.cli import configuration, evidence, slurm, training, watching
from areal_hpc.errors import ArealError, Stalled, UserError
from areal_hpc.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STALLED, EXIT_USER_ERROR, exit_lines
from areal_hpc.privacy import owner_of

GROUPS = (training, slurm, watching, evidence, configuration)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command to its exit code, one of ``exits.MEANINGS``; a user's mistake is one line on stderr."""
    options = _parse(arguments)
    try:
        code: int = options.command(options)
    except UserError as error:
        print(f"areal-hpc: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except Stalled as error:
        print(f"areal-hpc: {error}", file=sys.stderr)
        return EXIT_STALLED
    except PermissionError as error:
        print(f"areal-hpc: {_denied(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (ArealError, OSError) as error:  # a full disk, a directory that may not be written
        print(f"areal-hpc: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:  # before there is a run that could stop in order
        print("areal-hpc: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _denied(error: PermissionError) -> str:
    """What to do about a path that one may not use, such as one in the home of whoever began a group's run."""
    if error.filename is None or isinstance(error.filename, int):  # a descriptor's
        return f"{error}; your user may not do that here"
    path = Path(os.fsdecode(error.filename)).absolute()
    last = path if os.access(path, os.F_OK) else path.parent
    closed = next((one for one in reversed(path.parents) if not os.access(one, os.X_OK)), last)
    return (
        f"{path}: permission denied; ask {owner_of(closed)}, who owns {closed}, to let you use it, or give the key "
        "that names it a path of your own"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command. argparse alone would refuse ``run FILE --resume KEY=VALUE``."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and (not hasattr(options, "config") or any(word.startswith("-") for word in unknown)):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if unknown:
        options.config += unknown
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc",
        description="Fully asynchronous reinforcement learning of language models on supercomputers.",
        epilog="\n".join(["exit codes:", *exit_lines()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_commands(commands)
    return parser
