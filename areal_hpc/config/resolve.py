"""What follows from a configuration, and whether its values fit each other: everything that no single key can know.

    resolved = resolve(load(paths, overrides), stated(paths, overrides))

First the layout fills its sections, then every number is held against its range, then each cross-check has its say. A
range that is broken ends the pass, so that the cross-checks may divide; otherwise one error lists all problems.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from areal_hpc.config.checks import CHECKS, model_ranks, ring_capacity
from areal_hpc.config.keys import keys, value_of, with_value
from areal_hpc.config.layout import parse_layout, settings
from areal_hpc.config.problems import raise_if_any
from areal_hpc.config.ranges import out_of_range
from areal_hpc.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration that fits together, with its layout applied, and the values that follow from it."""

    config: Config
    ring_capacity: int
    """Groups that may be outstanding: (max_staleness + 1) * groups_per_step. This bounds staleness."""
    data_parallel: int
    """Copies of the model among the trainer's ranks."""
    engine_ranks: int
    """Devices of all engines together."""
    max_prompt_tokens: int
    """Longest prompt that leaves room for the longest answer."""


def resolve(config: Config, stated: Collection[str] = ()) -> Resolved:
    """The configuration with its layout applied, checked, with what follows from it.

    Args:
        stated: keys that somebody wrote (``load.stated``). The layout fills a key at its default; with this, it is also
            noticed when somebody wrote the default and the layout says otherwise.

    Raises:
        ConfigError: lists every value that is out of range, or else every disagreement between values.
    """
    config = _with_layout(config, stated)
    raise_if_any(list(out_of_range(config)))
    raise_if_any([problem for check in CHECKS for problem in check(config)])
    generation = config.generation
    return Resolved(
        config=config,
        ring_capacity=ring_capacity(config),
        data_parallel=config.trainer.ranks // model_ranks(config),
        engine_ranks=generation.replicas * generation.tensor_parallel * generation.pipeline_parallel,
        max_prompt_tokens=config.model.max_tokens - config.rollout.sampling.max_new_tokens,
    )


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
