"""Slurm's host lists in Python: ``n[01-03,07],login`` to its names, in the order in which Slurm counts nodes.

No scontrol is asked: it is missing in containers. Numbers keep their leading zeros, a name may have several brackets
(the last one counts fastest), and a bracket's content may be anything between its commas.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from areal_hpc.errors import UserError

RANGE = re.compile(r"(\d+)-(\d+)")
PART = re.compile(r"[^\[\]]+|\[[^\[\]]+\]")


def expand(text: str) -> list[str]:
    """The names in a host list; [] of an empty one.

    Raises:
        UserError: the brackets do not match, or a range runs backwards.
    """
    return [name for word in _words(text) for name in _expand_word(word, text)]


def _words(text: str) -> Iterator[str]:
    """The parts between commas that are not inside brackets, and line breaks."""
    depth, word = 0, ""
    for letter in text.strip() + ",":
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _malformed(text)
        if depth == 0 and (letter == "," or letter.isspace()):
            if word:
                yield word
            word = ""
        else:
            word += letter
    if depth:
        raise _malformed(text)


def _expand_word(word: str, text: str) -> Iterator[str]:
    parts = PART.findall(word)
    if "".join(parts) != word:
        raise _malformed(text)
    choices = [list(_inside(part[1:-1], text)) if part.startswith("[") else [part] for part in parts]
    return ("".join(name) for name in itertools.product(*choices))


def _inside(bracket: str, text: str) -> Iterator[str]:
    for item in bracket.split(","):
        if (found := RANGE.fullmatch(item)) is None:
            if not item or "-" in item:
                raise _malformed(text)
            yield item
            continue
        first, last = found[1], found[2]
        if int(first) > int(last):
            raise _malformed(text)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _malformed(text: str) -> UserError:
    return UserError(f"{text!r} is no host list of Slurm; write it as n[01-03,07],login")
