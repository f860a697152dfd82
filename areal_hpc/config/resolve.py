"""Whether the values of a configuration fit each other: everything that no single key can know.

    config = read_config(paths, overrides)

First the layout fills its sections, the algorithm's recipe what it sets, ``deterministic`` what it needs. Then every
number is held against its range, and each cross-check has its say, unless it reads a value that has proved unusable by
then: of another type, out of range, or written under a name that is none. One error lists all problems.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.config.checks import checks_of
from areal_hpc.config.cluster import Shape
from areal_hpc.config.keys import keys, value_of, with_value
from areal_hpc.config.layout import parse_layout, settings
from areal_hpc.config.load import drafted, places, read
from areal_hpc.config.problems import placed, raise_if_any
from areal_hpc.config.ranges import out_of_range
from areal_hpc.config.reading import problems_of
from areal_hpc.config.recipes import RECIPES, ValueOf, is_offline
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

FILLED_BY_LAYOUT = {"generation", "trainer"}
ONE_AT_A_TIME = ("generation.max_running", 1)
"""What ``deterministic`` sets: the rounding of a matrix product depends on how many rows it has."""
ONE_KIND_OF_CPU = ("cluster.shape", Shape.LOCAL)
"""What it sets unless somebody wrote otherwise, which is refused then: nodes of a cluster may round differently."""


def read_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration that the files and then the overrides describe, complete and checked.

    Raises:
        ConfigError: lists all that is wrong with it, with file and line; or every layer that cannot be read.
    """
    tree = read(paths, overrides)
    draft, written = drafted(Config, tree), places(tree)
    resolving = _Resolving(draft.section, written, set(draft.unusable))
    resolving.run()
    raise_if_any([*draft.problems, *(placed(problem, written) for problem in resolving.problems)])
    return resolving.config


def resolve(config: Config, stated: Collection[str] = ()) -> Config:
    """The configuration with its layout applied, checked.

    Args:
        stated: keys that somebody wrote (``load.places``). Layout and recipe fill keys at their defaults; with this, it
            is also noticed when somebody wrote the default and they say otherwise.

    Raises:
        ConfigError: lists every value that is out of range and every disagreement between values.
    """
    resolving = _Resolving(config, stated)
    resolving.run()
    raise_if_any(resolving.problems)
    return resolving.config


@dataclass(slots=True)
class _Resolving:
    """A configuration on its way, and what was found wrong with it so far."""

    config: Config
    stated: Collection[str]
    unusable: set[str] = field(default_factory=set)
    """Keys and sections whose values stand in for what nobody knows."""
    problems: list[str] = field(default_factory=list)

    def run(self) -> None:
        self._apply_layout()
        self._apply_recipe()
        if self.config.deterministic is True:  # it may be anything that somebody wrote
            self._apply_deterministic()
        for name, problem in out_of_range(self.config):
            if name not in self.unusable:
                self.problems.append(problem)
                self.unusable.add(name)
        self.problems += problems_of(checks_of(self.config), self.config, self.unusable)

    def _apply_layout(self) -> None:
        layout = self.config.layout
        if "layout" in self.unusable:
            self.unusable |= FILLED_BY_LAYOUT
        elif layout:
            try:
                self._fill(settings(parse_layout(layout)), f"layout {layout}")
            except ConfigError as error:
                self.problems.append(f"layout: {error}")
                self.unusable |= FILLED_BY_LAYOUT

    def _apply_recipe(self) -> None:
        """What the algorithm's name fixes, and for what nobody wrote, what is usual with it."""
        if self.unusable & {"algorithm", "algorithm.name"}:
            self.unusable.add("algorithm")
            self.config = with_value(self.config, "algorithm.name", keys()["algorithm.name"].default)
            return
        recipe = RECIPES.get(self.config.algorithm.name)
        if recipe is None:
            return  # a check names it beside all other problems
        self._fill(recipe.fixed, f"algorithm.name {self.config.algorithm.name} ({recipe.paper})")
        for name, usual in recipe.usual.items():
            if self._untouched(name):
                value = value_of(self.config, usual.key) if isinstance(usual, ValueOf) else usual
                self.config = with_value(self.config, name, value)

    def _apply_deterministic(self) -> None:
        if not is_offline(self.config.algorithm):
            self.config = with_value(self.config, *ONE_AT_A_TIME)
        if self._untouched("cluster.shape"):
            self.config = with_value(self.config, *ONE_KIND_OF_CPU)

    def _fill(self, wanted: Mapping[str, Any], by: str) -> None:
        """Set the ``wanted`` values, which nobody may have written otherwise."""
        for name, value in wanted.items():
            found = value_of(self.config, name)
            if found != value and not self._untouched(name) and name not in self.unusable:
                self.problems.append(f"{name}: {found} disagrees with {by}, which says {value}; change either")
                self.unusable.add(name)
            self.config = with_value(self.config, name, value)

    def _untouched(self, name: str) -> bool:
        return name not in self.stated and value_of(self.config, name) == keys()[name].default
