"""The command line: ``areal-hpc run | serve | plan | submit | config | keys | export | eval | status | stop | ...``.

Arguments are read here and nothing else; the work is done by functions that tests call. Imports are late, so that help
and ``config`` start at once on a login node.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc import __version__
from areal_hpc.errors import ArealError, ConfigError, Stalled, UserError
from areal_hpc.exits import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STALLED, EXIT_USER_ERROR, exit_lines
from areal_hpc.roles import join_command, service

if TYPE_CHECKING:
    from areal_hpc.config.schema import Config

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


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
    except (ArealError, OSError) as error:  # a full disk, a directory that may not be written
        print(f"areal-hpc: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:  # before there is a run that could stop in order
        print("areal-hpc: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command. argparse alone would refuse ``run FILE --resume KEY=VALUE``."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    if more and (not hasattr(options, "config") or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        options.config += more
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

    run = commands.add_parser("run", help="train: start every process of a run on this machine and watch it")
    _add_run_arguments(run)
    run.set_defaults(command=lambda options: _launch(options, _resolved(options.config)))
    service.add_service_commands(commands, _add_run_arguments, _launch)

    _add_slurm_commands(commands)

    config = commands.add_parser("config", help="show the resolved configuration")
    _add_config_arguments(config)
    config.add_argument("--diff", action="store_true", help="show only what differs from the defaults")
    config.set_defaults(command=_config)

    keys = commands.add_parser("keys", help="list every configuration key with its type, default and meaning")
    keys.set_defaults(command=_keys)

    export = commands.add_parser("export", help="write a checkpoint's weights as a Hugging Face directory")
    _add_run_dir(export)
    export.add_argument("--step", type=int, metavar="N", help="optimizer step of the checkpoint; default: newest")
    export.add_argument("--merged", action="store_true", help="adapters as part of the model's own weights")
    export.add_argument("directory", type=Path, metavar="DIR")
    export.set_defaults(command=_export)

    _add_watching(commands)

    stop = commands.add_parser("stop", help="ask a run to write a checkpoint and end, and wait until it has")
    _add_run_dir(stop)
    stop.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS")
    stop.set_defaults(command=_stop)

    ledger = commands.add_parser("ledger", help="prove from a run's files that every prompt was consumed exactly once")
    _add_run_dir(ledger)
    ledger.add_argument("--json", action="store_true", help="print the findings as one JSON document")
    ledger.set_defaults(command=_ledger)

    _add_inspect(commands)
    _add_replay(commands)
    _add_eval(commands)
    return parser


def _add_run_arguments(run: argparse.ArgumentParser) -> None:
    _add_config_arguments(run)
    run.add_argument("--resume", action="store_true", help="continue the run that the run directory holds")
    run.add_argument("--resume-from", type=int, metavar="STEP", help="as --resume, from exactly this step's checkpoint")
    run.add_argument("--takeover", action="store_true", help="with --resume: even if an attempt seems to be running")


def _add_watching(commands: Commands) -> None:
    status = commands.add_parser("status", help="how a run is doing, from its files, and what Slurm says of its job")
    _add_run_dir(status)
    status.set_defaults(command=_status)

    _add_logs(commands)

    report = commands.add_parser("report", help="what a run came to, what it cost, and how each attempt ended")
    _add_run_dir(report)
    report.set_defaults(command=_report)

    why = commands.add_parser("why", help="who waits for whom right now, or waited when the run ended")
    _add_run_dir(why)
    why.set_defaults(command=_why)


def _add_inspect(commands: Commands) -> None:
    inspect = commands.add_parser("inspect", help="what a run was trained on: its archived steps, or one of them")
    _add_run_dir(inspect)
    inspect.add_argument("--step", type=int, help="show the episodes of this step")
    inspect.add_argument("--group", type=int, metavar="G", help="of the step, only this group")
    inspect.add_argument("--episode", type=int, metavar="E", help="of each group, only this episode")
    inspect.add_argument("--model", type=Path, metavar="DIR", help="where the tokenizer is, if it has moved")
    inspect.add_argument("--color", action="store_true", help="colour tokens by version also where this is no terminal")
    inspect.set_defaults(command=_inspect)


def _add_logs(commands: Commands) -> None:
    logs = commands.add_parser("logs", help="what the processes of a run's newest attempt have said")
    _add_run_dir(logs)
    logs.add_argument("--role", default="", help="only of this role, such as trainer; launcher is the batch script")
    logs.add_argument("--rank", type=int, metavar="N", help="of the role, only this process")
    logs.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="last lines of each file; 0 is all")
    logs.add_argument("-f", "--follow", action="store_true", help="go on as they grow, until the run ends")
    logs.set_defaults(command=_logs)


def _add_replay(commands: Commands) -> None:
    replay = commands.add_parser("replay", help="train again on what a run has archived, and compare the weights")
    _add_run_dir(replay)
    replay.add_argument(
        "config",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides: what is to be different this time, such as algorithm.clip_high=0.3",
    )
    replay.add_argument("--train-only", action="store_true", required=True, help="train, generate nothing")
    replay.add_argument("--from-step", type=int, default=0, metavar="S", help="begin with the checkpoint of step S")
    replay.add_argument("--to-step", type=int, default=0, metavar="T", help="the last step; all if not given")
    replay.add_argument("--out", type=Path, metavar="DIR", help="the new run directory; RUN-replay if not given")
    replay.set_defaults(command=_replay)


def _add_eval(commands: Commands) -> None:
    evaluation = commands.add_parser("eval", help="measure a checkpoint: mean reward and pass@k, on engines alone")
    _add_config_arguments(evaluation)
    evaluation.add_argument(
        "--checkpoint", type=Path, required=True, metavar="PATH|RUN", help="a Hugging Face directory, or a run"
    )
    evaluation.add_argument(
        "--step", type=int, metavar="N", help="of the run, this checkpoint; the newest if not given"
    )
    evaluation.add_argument("--out", type=Path, metavar="DIR", help="the new run directory; NAME-eval-... if not given")
    evaluation.set_defaults(command=_eval)


def _add_slurm_commands(commands: Commands) -> None:
    plan = commands.add_parser("plan", help="what a run will ask Slurm for, who will sit where, and what is missing")
    _add_config_arguments(plan)
    plan.set_defaults(command=_plan)

    doctor = commands.add_parser(
        "doctor", help="check whether this place can carry a run; in a Slurm job: all of its nodes"
    )
    _add_config_arguments(doctor)
    doctor.set_defaults(command=_doctor)

    submit = commands.add_parser("submit", help="hand a run to Slurm and return at once")
    _add_config_arguments(submit)
    submit.add_argument("--resume", action="store_true", help="continue the run that the run directory holds")
    submit.add_argument("--takeover", action="store_true", help="with --resume: even if an attempt seems to be running")
    submit.set_defaults(command=_submit)
    join_command.add_join(commands)


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="YAML files, of which later ones win over earlier ones, and overrides, which win over all files: "
        "name=second for another run directory, trainer.total_steps=40, ...; `areal-hpc keys` lists them",
    )


def _add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="directory of a run: run_root/name, as in runs/gsm8k")


def _resolved(words: Sequence[str]) -> Config:
    from areal_hpc.config.load import files_and_overrides
    from areal_hpc.config.resolve import read_config

    return read_config(*files_and_overrides(words))


def _launch(options: argparse.Namespace, config: Config) -> int:
    from areal_hpc.cluster.environment import allocation
    from areal_hpc.config.cluster import Shape
    from areal_hpc.report import LiveConsole
    from areal_hpc.roles.launcher import run_local
    from areal_hpc.telemetry import setup_logging

    setup_logging("launcher", 0)
    _find_beside()
    continued = config.cluster.shape is not Shape.LOCAL and allocation(os.environ).continues
    return run_local(
        config,
        resume=options.resume or continued or options.resume_from is not None,
        resume_from=options.resume_from,
        takeover=options.takeover or continued,
        console=LiveConsole(config.trainer.total_steps, sys.stdout),
    )


def _find_beside() -> None:
    """Rewards and tasks may lie beside the configuration: the roles look there, too."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)


def _plan(options: argparse.Namespace) -> int:
    from areal_hpc.roles.planning import plan_run

    lines, possible = plan_run(_resolved(options.config))
    print("\n".join(lines))
    return 0 if possible else EXIT_USER_ERROR


def _doctor(options: argparse.Namespace) -> int:
    """Exit code 1: something is wrong, with what to do about it."""
    from areal_hpc.roles.doctor import examine_site, report_lines

    findings = list(examine_site(_resolved(options.config)))
    print("\n".join(report_lines(findings)))
    return EXIT_FAILED if any(one.verdict == "wrong" for one in findings) else 0


def _submit(options: argparse.Namespace) -> int:
    from areal_hpc.roles.submission import submit_run

    more = [f"--{name}" for name in ("resume", "takeover") if getattr(options, name)]
    print("\n".join(submit_run(_resolved(options.config), main, more).lines()))
    return 0


def _config(options: argparse.Namespace) -> int:
    from areal_hpc.config.describe import dump, render_diff

    config = _resolved(options.config)
    print(render_diff(config) if options.diff else dump(config), end="")
    return 0


def _keys(_: argparse.Namespace) -> int:
    from areal_hpc.config.describe import render_reference

    print(render_reference(), end="")
    return 0


def _export(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.roles.export import export

    version, use = export(RunDir.open(options.run_dir), options.step, options.directory, merged=options.merged)
    print(f"{options.directory}: the weights of step {version.step}; {use}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.report import status_lines

    print("\n".join(status_lines(RunDir.open(options.run_dir, waiting=True))))
    return 0


def _logs(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.report.logs import show_logs

    if options.rank is not None and not options.role:
        raise ConfigError("--rank is of a role; add --role")
    run = RunDir.open(options.run_dir, waiting=True)
    lines = show_logs(run, options.role, options.rank, lines=options.lines, follow=options.follow)
    _print_lines(lines, flush=options.follow)
    return 0


def _report(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.report import report_run

    report_run(RunDir.open(options.run_dir), ask=True)
    return 0


def _why(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.report import why_lines

    print("\n".join(why_lines(RunDir.open(options.run_dir, waiting=True))))
    return 0


def _stop(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.roles.job import stop_submitted

    print(f"{options.run_dir}: {stop_submitted(RunDir.open(options.run_dir, waiting=True), options.timeout)}")
    return 0


def _ledger(options: argparse.Namespace) -> int:
    """Exit code 0: proven; 1: violated, with the steps, positions and prompts that break it."""
    import json

    from areal_hpc.fs import RunDir
    from areal_hpc.report import ledger_lines, prove_run

    run = RunDir.open(options.run_dir)
    proof = prove_run(run)
    print(json.dumps(proof.facts(), indent=1) if options.json else "\n".join(ledger_lines(run, proof)))
    return EXIT_DONE if proof.proven else EXIT_FAILED


def _inspect(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.report.inspect import show_step, step_table

    run = RunDir.open(options.run_dir)
    if options.step is None and (options.group, options.episode) != (None, None):
        raise ConfigError("--group and --episode are of a step; add --step")
    colour = options.color or sys.stdout.isatty()
    wanted = {"group": options.group, "episode": options.episode, "model": options.model, "colour": colour}
    _print_lines(step_table(run) if options.step is None else show_step(run, options.step, **wanted))
    return 0


def _print_lines(lines: Iterable[str], *, flush: bool = False) -> None:
    """Print until the end, or until the reader has seen enough, as in ``areal-hpc inspect ... | head``."""
    try:
        for line in lines:
            print(line, flush=flush)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed at the exit


def _replay(options: argparse.Namespace) -> int:
    from areal_hpc.fs import RunDir
    from areal_hpc.roles.replay import replay_run
    from areal_hpc.telemetry import setup_logging

    setup_logging("launcher", 0)
    source = RunDir.open(options.run_dir)
    out = options.out or source.root.with_name(f"{source.root.name}-replay")
    return replay_run(
        source,
        out.absolute(),
        from_step=options.from_step,
        to_step=options.to_step,
        overrides=options.config,
        stream=sys.stdout,
    )


def _eval(options: argparse.Namespace) -> int:
    from areal_hpc.roles.evaluation import evaluate
    from areal_hpc.telemetry import setup_logging

    setup_logging("launcher", 0)
    _find_beside()
    return evaluate(_resolved(options.config), options.checkpoint, options.step, options.out, sys.stdout)
