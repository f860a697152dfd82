"""A configuration's problems are collected and raised as one error, so that one attempt shows them all."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

from areal_hpc.errors import ConfigError

MAX_SHOWN = 20


def raise_if_any(problems: Sequence[str]) -> None:
    """Nothing if there are no problems.

    Raises:
        ConfigError: there are; the message lists them, the first ``MAX_SHOWN`` in full.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise ConfigError(problems[0])
    lines = [f"the configuration has {len(problems)} problems:", *(f"  - {text}" for text in problems[:MAX_SHOWN])]
    if len(problems) > MAX_SHOWN:
        lines.append(f"  - and {len(problems) - MAX_SHOWN} more; mend these first")
    raise ConfigError("\n".join(lines))


def did_you_mean(name: str, known: Collection[str], siblings: Collection[str] = ()) -> str:
    """`; did you mean ...?` with up to three keys near to the dotted ``name``, or nothing.

    First comes a right name under a wrong section (`trainer.lr` for `trainer.optimizer.lr`), then a near name in the
    same section, and only without these what looks alike among all.

    Args:
        known: every dotted key.
        siblings: the names that the section of ``name`` has.
    """
    prefix, _, last = name.rpartition(".")
    near = [key for key in known if key.rpartition(".")[2] == last]
    near += [f"{prefix}.{field}".lstrip(".") for field in difflib.get_close_matches(last, siblings)]
    near = near or difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""
