"""A configuration's problems are collected and raised as one error, so that one attempt shows them all."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from areal_hpc.errors import ConfigError

MAX_SHOWN = 20
DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
"""A key in a text."""


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
    """`; did you mean ...?` with up to three keys near to the dotted ``name``, or nothing; see ``near_keys``."""
    near = near_keys(name, known, siblings)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def near_keys(name: str, known: Collection[str], siblings: Collection[str] = ()) -> list[str]:
    """Up to three keys near to the dotted ``name``.

    First comes a right name under a wrong section (`trainer.lr` for `trainer.optimizer.lr`), then a near name in the
    same section, and only without these what looks alike among all.

    Args:
        known: every dotted key.
        siblings: the names that the section of ``name`` has.
    """
    prefix, _, last = name.rpartition(".")
    near = [key for key in known if key.rpartition(".")[2] == last]
    near += [f"{prefix}.{field}".lstrip(".") for field in difflib.get_close_matches(last, siblings)]
    return (near or difflib.get_close_matches(name, known))[:3]


def placed(problem: str, places: Mapping[str, str]) -> str:
    """A problem that begins with its key, and where what it speaks of was written, as far as somebody wrote it.

    Args:
        places: by dotted key.
    """
    subject = problem.partition(":")[0]
    named = dict.fromkeys([subject, *DOTTED.findall(problem)])
    told = {key: places[key] for key in named if key in places}
    if list(told) == [subject]:
        return f"{problem} ({told[subject]})"
    return f"{problem} ({'; '.join(f'{key}: {where}' for key, where in told.items())})" if told else problem
