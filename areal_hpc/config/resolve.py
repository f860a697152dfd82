"""Whether the values of a configuration fit each other: everything that no single key can know.

    config = resolve(load(paths, overrides), stated(paths, overrides))

First the layout fills its sections and ``deterministic`` sets what it needs, then every number is held against its
range, then each cross-check has its say. A range that is broken ends the pass, so that the cross-checks may divide;
otherwise one error lists all problems.
"""

from __future__ import annotations

from collections.abc import Collection

from areal_hpc.config.checks import CHECKS
from areal_hpc.config.keys import keys, value_of, with_value
from areal_hpc.config.layout import parse_layout, settings
from areal_hpc.config.problems import raise_if_any
from areal_hpc.config.ranges import out_of_range
from areal_hpc.config.schema import Config

ONE_AT_A_TIME = ("generation.max_running", 1)
"""What ``deterministic`` sets: the rounding of a matrix product depends on how many rows it has."""


def resolve(config: Config, stated: Collection[str] = ()) -> Config:
    """The configuration with its layout applied, checked.

    Args:
        stated: keys that somebody wrote (``load.stated``). The layout fills a key at its default; with this, it is also
            noticed when somebody wrote the default and the layout says otherwise.

    Raises:
        ConfigError: lists every value that is out of range, or else every disagreement between values.
    """
    config = _with_layout(config, stated)
    if config.deterministic:
        config = with_value(config, *ONE_AT_A_TIME)
    raise_if_any(list(out_of_range(config)))
    raise_if_any([problem for check in CHECKS for problem in check(config)])
    return config


def _with_layout(config: Config, stated: Collection[str]) -> Config:
    if not config.layout:
        return config
    problems = []
    for name, wanted in settings(parse_layout(config.layout)).items():
        value = value_of(config, name)
        untouched = name not in stated and value == keys()[name].default
        if value != wanted and not untouched:
            problems.append(
                f"{name}: {value} disagrees with layout {config.layout}, which says {wanted}; change either"
            )
        config = with_value(config, name, wanted)
    raise_if_any(problems)
    return config
