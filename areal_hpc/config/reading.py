"""A configuration of which some values cannot be used, as a check sees it.

A check that reads such a value would judge a stand-in; it ends there, with what it has found so far. So one pass finds
every problem that does not hang on another, and none that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any, cast

from areal_hpc.config.schema import Config


class Unusable(Exception):
    """A check has read a value that cannot be used."""


class Reading:
    """A section, whose values raise Unusable if they are ``unusable``: dotted keys, or sections of them."""

    __slots__ = ("_prefix", "_section", "_unusable")

    def __init__(self, section: Any, prefix: str, unusable: Collection[str]) -> None:
        self._section, self._prefix, self._unusable = section, prefix, unusable

    def __getattr__(self, name: str) -> Any:
        value, key = getattr(self._section, name), self._prefix + name
        if key in self._unusable:
            raise Unusable(key)
        return Reading(value, key + ".", self._unusable) if is_dataclass(value) else value

    def __eq__(self, other: object) -> bool:
        """As the section is equal; to compare it is to read all that it holds."""
        if any(key.startswith(self._prefix) for key in self._unusable):
            raise Unusable(self._prefix)
        return bool(self._section == other)

    __hash__ = None  # type: ignore[assignment]


def problems_of(
    checks: Iterable[Callable[[Config], Iterator[str]]], config: Config, unusable: Collection[str]
) -> Iterator[str]:
    """What the checks find in ``config`` without the ``unusable`` values."""
    seen = cast("Config", Reading(config, "", unusable)) if unusable else config
    for check in checks:
        try:
            yield from check(seen)
        except Unusable:
            continue
