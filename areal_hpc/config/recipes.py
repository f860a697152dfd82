"""What the name of an algorithm stands for: settings that define it, settings its authors use, knobs that it reads.

    recipe = RECIPES["rloo"]
    recipe.fixed        another value would be another algorithm: writing one is an error
    recipe.usual        taken for what nobody wrote; a ValueOf is what another key has
    recipe.reads        of the knobs that only some algorithms read; the others are errors

No name is needed for a combination: `grpo` fixes nothing, so that any of its settings may be changed. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any, NamedTuple

from areal_hpc.config.algorithm import (
    AlgorithmConfig,
    GaeLevel,
    KlEstimator,
    KlPlace,
    Level,
    Metric,
    ProximalMethod,
    RejectionAction,
    RejectionLevel,
)
from areal_hpc.errors import ConfigError

CLIPPING = ("clip_low", "clip_high", "dual_clip")
READ_BY_SOME = (*CLIPPING, "sapo_tau_positive", "sapo_tau_negative", "m2_threshold", "gae", "critic", "dpo")
"""Keys and sections of `algorithm` that only some algorithms read."""


class Data(Enum):
    """What an algorithm learns from."""

    ROLLOUTS = "what the policy samples in the run"
    RESPONSES = "answers that a data set holds"
    PAIRS = "a better and a worse answer to each prompt, from a data set"

    @property
    def is_offline(self) -> bool:
        """Whether nothing is generated: no engines, no episodes, no rewards."""
        return self is not Data.ROLLOUTS

    @property
    def together(self) -> int:
        """Sequences that the loss must see at once: it is of a pair, the better one first."""
        return 2 if self is Data.PAIRS else 1


class ValueOf(NamedTuple):
    """In place of a value: that of another key."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One algorithm. ``token_level``: its advantages differ within a trajectory (GAE, or returns without a critic)."""

    paper: str
    """Where it comes from, and what sets it apart from its neighbour."""
    token_level: bool = False
    outcome: bool = True
    """Whether rewards are learned from; without, they are only told."""
    critic: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = CLIPPING
    data: Data = Data.ROLLOUTS
    reference: bool = False
    """Whether a frozen model is part of its loss, whatever `algorithm.kl` says."""


def _reward_norm(mean: Level, std: Level, **more: Any) -> dict[str, Any]:
    return _section("algorithm.reward_norm", mean=mean, std=std, **more)


def _section(name: str, **values: Any) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in values.items()}


BATCH_ADVANTAGES = _section("algorithm.adv_norm", mean=Level.BATCH, std=Level.BATCH)

EVERY_GROUP = {"rollout.filter.zero_variance": False}
"""Where advantages are not relative to the group, equal rewards are as much to learn from as any."""

NO_PROXIMAL = {"algorithm.decoupled": False, "algorithm.proximal": ProximalMethod.BEHAVIOUR}

RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe(paper="arXiv:2402.03300: rewards relative to their group, by its deviation; no critic"),
    "dr_grpo": Recipe(
        paper="arXiv:2503.20783: GRPO without the deviation, which favours questions that are nearly solved or not, "
        "and with a constant in place of the number of tokens",
        fixed=_reward_norm(Level.GROUP, Level.NONE),
        usual={"algorithm.length_normaliser": ValueOf("rollout.sampling.max_new_tokens")},
    ),
    "rloo": Recipe(
        paper="arXiv:2402.14740: the baseline is the mean of the other samples, so that it is independent of this one",
        fixed=_reward_norm(Level.GROUP, Level.NONE, leave_one_out=True),
    ),
    "lite_ppo": Recipe(
        paper="arXiv:2508.08221: the group's mean, but the deviation of the whole batch, which is harder to make small",
        fixed=_reward_norm(Level.GROUP, Level.BATCH),
    ),
    "dapo": Recipe(
        paper="arXiv:2503.14476: GRPO with a higher upper clip, no groups without variance, a penalty on long answers",
        fixed={"rollout.filter.zero_variance": True},
        usual={"algorithm.clip_high": 0.28},
    ),
    "gspo": Recipe(
        paper="arXiv:2507.18071: one ratio for the whole sequence (geometric mean), since its reward is one as well",
        usual={"algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4},
    ),
    "cispo": Recipe(
        paper="arXiv:2506.13585: the clipped ratio is a constant weight, so that no token loses its gradient",
        usual={"algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0},
        reads=("clip_low", "clip_high"),
    ),
    "sapo": Recipe(
        paper="arXiv:2511.20347: a smooth gate around the behaviour policy in place of a clip around the proximal one",
        fixed=NO_PROXIMAL,
        reads=("sapo_tau_positive", "sapo_tau_negative"),
    ),
    "m2po": Recipe(
        paper="arXiv:2510.01161: leaves out the fewest tokens that bring the batch's mean square log-ratio to a bound",
        fixed={"algorithm.decoupled": True, "algorithm.proximal": ProximalMethod.RECOMPUTE},
        usual={"algorithm.m2_threshold": 0.04},
        reads=(*CLIPPING, "m2_threshold"),
    ),
    "icepop": Recipe(
        paper="arXiv:2510.18855: GRPO; a token whose ratio proximal / behaviour leaves a band carries no gradient",
        fixed=_section(
            "algorithm.rejection_sampling",
            metric=Metric.RATIO,
            level=RejectionLevel.TOKEN,
            action=RejectionAction.MASK,
        ),
        usual=_section("algorithm.rejection_sampling", lower=0.5, upper=5.0),
    ),
    "kpop": Recipe(
        paper="IcePop judged by the larger binary KL of a token, chosen or not, which bears rare tokens' large ratios",
        fixed=_section(
            "algorithm.rejection_sampling",
            metric=Metric.BINARY_KL,
            level=RejectionLevel.TOKEN,
            action=RejectionAction.MASK,
        ),
        usual=_section("algorithm.rejection_sampling", upper=2.0),
    ),
    "reinforce_pp": Recipe(
        paper="arXiv:2501.03262: returns with a k1 KL in each token's reward, normalised over the batch; no groups",
        token_level=True,
        fixed=BATCH_ADVANTAGES,
        usual=_reward_norm(Level.NONE, Level.NONE)
        | _section("algorithm.kl", coef=0.01, place=KlPlace.REWARD, estimator=KlEstimator.K1)
        | EVERY_GROUP,
        reads=(*CLIPPING, "gae"),
    ),
    "reinforce_pp_baseline": Recipe(
        paper="arXiv:2501.03262, section 3: the group's mean as baseline, batch normalisation, a k2 KL in the loss",
        fixed=_reward_norm(Level.GROUP, Level.NONE) | BATCH_ADVANTAGES,
        usual=_section("algorithm.kl", coef=0.01, place=KlPlace.LOSS, estimator=KlEstimator.K2),
    ),
    "ppo": Recipe(
        paper="arXiv:1707.06347 with GAE, arXiv:1506.02438: a critic tells which tokens did better than expected",
        token_level=True,
        critic=True,
        usual=_reward_norm(Level.NONE, Level.NONE) | BATCH_ADVANTAGES | {"algorithm.gae.lam": 0.95} | EVERY_GROUP,
        reads=(*CLIPPING, "gae", "critic"),
    ),
    "distillation": Recipe(
        paper="arXiv:2306.13649 (on-policy, reverse KL): a token's advantage is how much likelier the teacher finds it",
        token_level=True,
        outcome=False,
        fixed=_reward_norm(Level.NONE, Level.NONE)
        | _section("algorithm.adv_norm", mean=Level.NONE, std=Level.NONE)
        | _section("algorithm.kl", place=KlPlace.REWARD, estimator=KlEstimator.K1)
        | _section("algorithm.gae", level=GaeLevel.TOKEN, discount=1.0, lam=0.0, alpha=None)
        | EVERY_GROUP,
        usual={"algorithm.kl.coef": 1.0},
        reads=(*CLIPPING, "gae"),
    ),
    "sft": Recipe(
        paper="maximum likelihood of given answers, a mean over the tokens of the whole batch",
        fixed=NO_PROXIMAL,
        usual={"prompts.answer_key": "response"},
        reads=(),
        data=Data.RESPONSES,
    ),
    "dpo": Recipe(
        paper="arXiv:2305.18290: a policy is its own reward model, relative to a reference; ipo: arXiv:2310.12036",
        fixed=NO_PROXIMAL,
        usual={"prompts.answer_key": "chosen"},
        reads=("dpo",),
        data=Data.PAIRS,
        reference=True,
    ),
    "reward_model": Recipe(
        paper="Bradley-Terry, as in arXiv:2203.02155: the better answer of a pair is to have the higher score",
        fixed=NO_PROXIMAL,
        usual={"prompts.answer_key": "chosen"},
        reads=(),
        data=Data.PAIRS,
    ),
}


def is_offline(config: AlgorithmConfig) -> bool:
    """Whether the algorithm learns from a data set and nothing is generated; not where its name is unknown."""
    return config.name in RECIPES and RECIPES[config.name].data.is_offline


def reference_of(config: AlgorithmConfig) -> str | None:
    """Where the frozen reference model lies, "" for where the policy began; None where the algorithm has none."""
    if recipe_of(config.name).reference:
        return config.dpo.reference
    return config.kl.reference if config.kl.coef > 0 else None


def recipe_of(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none; names the nearest names.
    """
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, cutoff=0.4) or RECIPES
        raise ConfigError(f"algorithm.name: there is no {name!r}; use {' or '.join(near)}")
    return RECIPES[name]
