"""What only some sources of data read: a key that does nothing in a run is refused, as any other mistake."""

from __future__ import annotations

from collections.abc import Iterator

from areal_hpc.config.keys import keys, value_of
from areal_hpc.config.recipes import Data, is_offline, recipe_of
from areal_hpc.config.schema import Config

UNREAD = (
    "algorithm.",
    "archive.",
    "buffer.",
    "evaluation.checkpoint",
    "evaluation.pass_reward",
    "evaluation.samples",
    "evaluation.step",
    "evaluation.temperature",
    "generation.",
    "layout",
    "replay.",
    "rollout.",
    "weights.",
)
"""Where nothing is generated, nobody reads these,"""
READ = ("algorithm.name", "algorithm.groups_per_step", "algorithm.minibatches", "buffer.min_free_mb")
"""but these, and what is the algorithm's own."""


def check_offline(config: Config) -> Iterator[str]:
    """Keys that an offline algorithm does not read."""
    if not is_offline(config.algorithm):
        return
    recipe = recipe_of(config.algorithm.name)
    own = tuple(f"algorithm.{name}" for name in recipe.reads)
    why = f"does nothing with algorithm.name = {config.algorithm.name}, which generates nothing"
    for name, key in keys().items():
        unread = name.startswith(UNREAD) and not name.startswith((*READ, *own)) and name not in recipe.fixed
        if unread and value_of(config, name) != key.default:
            yield f"{name}: {value_of(config, name)} {why}; remove it"


def check_pairs(config: Config) -> Iterator[str]:
    """The column of worse answers, and whether a pair fits into a micro-batch."""
    if recipe_of(config.algorithm.name).data is not Data.PAIRS:
        if config.prompts.rejected_key != keys()["prompts.rejected_key"].default:
            yield (
                f"prompts.rejected_key: {config.prompts.rejected_key} does nothing with algorithm.name = "
                f"{config.algorithm.name}; remove it"
            )
        return
    longest, budget = 2 * config.model.max_tokens, config.trainer.tokens_per_microbatch
    if longest > budget:
        yield (
            f"trainer.tokens_per_microbatch: a pair of model.max_tokens {config.model.max_tokens} each exceeds a "
            f"micro-batch of {budget} tokens; raise it, or lower model.max_tokens"
        )


def check_conversations(config: Config) -> Iterator[str]:
    """An answer's column may be left out only where every assistant turn is one."""
    if not config.prompts.answer_key and recipe_of(config.algorithm.name).data is not Data.RESPONSES:
        yield (
            "prompts.answer_key: empty is for algorithm.name = sft on whole conversations; name the column of answers"
        )
