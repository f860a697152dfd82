"""Whether the values of a configuration fit each other: everything that no single key can know.

    config = resolve(load(paths, overrides), stated(paths, overrides))

First the layout fills its sections, the algorithm's recipe what it sets, ``deterministic`` what it needs. Then every
number is held against its range, then each cross-check has its say. A range that is broken ends the pass, so that the
cross-checks may divide; otherwise one error lists all problems.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from areal_hpc.config.checks import problems_of
from areal_hpc.config.keys import keys, value_of, with_value
from areal_hpc.config.layout import parse_layout, settings
from areal_hpc.config.problems import raise_if_any
from areal_hpc.config.ranges import out_of_range
from areal_hpc.config.recipes import RECIPES, is_offline
from areal_hpc.config.schema import Config

ONE_AT_A_TIME = ("generation.max_running", 1)
"""What ``deterministic`` sets: the rounding of a matrix product depends on how many rows it has."""


def resolve(config: Config, stated: Collection[str] = ()) -> Config:
    """The configuration with its layout applied, checked.

    Args:
        stated: keys that somebody wrote (``load.stated``). Layout and recipe fill keys at their defaults; with this, it
            is also noticed when somebody wrote the default and they say otherwise.

    Raises:
        ConfigError: lists every value that is out of range, or else every disagreement between values.
    """
    config = _with_layout(config, stated)
    config = _with_recipe(config, stated)
    if config.deterministic and not is_offline(config.algorithm):
        config = with_value(config, *ONE_AT_A_TIME)
    raise_if_any(list(out_of_range(config)))
    raise_if_any(list(problems_of(config)))
    return config


def _with_layout(config: Config, stated: Collection[str]) -> Config:
    if not config.layout:
        return config
    return _filled(config, settings(parse_layout(config.layout)), stated, f"layout {config.layout}")


def _with_recipe(config: Config, stated: Collection[str]) -> Config:
    """What the algorithm's name fixes, and for what nobody wrote, what is usual with it."""
    recipe = RECIPES.get(config.algorithm.name)
    if recipe is None:
        return config  # a check names it beside all other problems
    config = _filled(config, recipe.fixed, stated, f"algorithm.name {config.algorithm.name} ({recipe.paper})")
    for name, usual in recipe.usual.items():
        if _untouched(config, name, stated):
            config = with_value(config, name, usual)
    return config


def _filled(config: Config, wanted: Mapping[str, Any], stated: Collection[str], by: str) -> Config:
    """The configuration with the ``wanted`` values, which nobody may have written otherwise."""
    problems = []
    for name, value in wanted.items():
        found = value_of(config, name)
        if found != value and not _untouched(config, name, stated):
            problems.append(f"{name}: {found} disagrees with {by}, which says {value}; change either")
        config = with_value(config, name, value)
    raise_if_any(problems)
    return config


def _untouched(config: Config, name: str, stated: Collection[str]) -> bool:
    return name not in stated and value_of(config, name) == keys()[name].default
