"""The section `algorithm` of a configuration; the string under a field is its help text. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """Over which samples a mean or a deviation is taken."""

    NONE = "none"
    GROUP = "group"
    BATCH = "batch"


class Metric(StrEnum):
    """How far the proximal policy is from the behaviour policy on a token; d = log-prob proximal - behaviour."""

    RATIO = "ratio"
    KL_K1 = "kl_k1"
    KL_K2 = "kl_k2"
    KL_K3 = "kl_k3"
    BINARY_KL = "binary_kl"


class RejectionLevel(StrEnum):
    TOKEN = "token"  # noqa: S105
    SEQUENCE = "sequence"


class RejectionAction(StrEnum):
    MASK = "mask"
    CLAMP = "clamp"


class Aggregation(StrEnum):
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"


class ProximalMethod(StrEnum):
    RECOMPUTE = "recompute"
    LOGLINEAR = "loglinear"
    REUSE = "reuse"
    BEHAVIOUR = "behaviour"


class KlEstimator(StrEnum):
    """Of KL(policy || reference) on a token that the policy sampled; d = log-prob policy - reference."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class KlPlace(StrEnum):
    REWARD = "reward"
    LOSS = "loss"


class PreferenceLoss(StrEnum):
    """What is asked of a pair's margin: to be large, or to be a certain number."""

    SIGMOID = "sigmoid"
    IPO = "ipo"


class GaeLevel(StrEnum):
    TOKEN = "token"  # noqa: S105
    TURN = "turn"


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    mean: Level = Level.GROUP
    """Mean to subtract: over the group, the batch, or none."""
    std: Level = Level.GROUP
    """Deviation to divide by: over the group, the batch, or none."""
    leave_one_out: bool = False
    """Leave the sample itself out of the mean (RLOO)."""
    unbiased: bool = True
    """Divide by n - 1 in the deviation instead of n."""
    eps: float = 1e-5
    """Added to the deviation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectionConfig:
    metric: Metric = Metric.RATIO
    """What is measured between proximal and behaviour policy."""
    level: RejectionLevel = RejectionLevel.TOKEN
    """Judge each token, or whole sequences."""
    action: RejectionAction = RejectionAction.MASK
    """Outside the band: drop from the loss, or clamp the weight (ratio only)."""
    agg: Aggregation = Aggregation.MEAN
    """How tokens make one number of a sequence; for level `sequence` only."""
    lower: float | None = None
    """Keep where the metric is at least this; null is no lower bound."""
    upper: float | None = 5.0
    """Keep where the metric is at most this; null is no upper bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongConfig:
    tokens: int = 0
    """Width L of the penalty zone before max_new_tokens (DAPO); 0 is off. What counts is all that a trajectory's turns
    sampled together, also where each of them may be as long as max_new_tokens."""
    factor: float = 1.0
    """Penalty at the full length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConfig:
    coef: float = 0.0
    """Weight of KL(policy || reference); 0 is off, and then no reference model is loaded."""
    place: KlPlace = KlPlace.LOSS
    """In the loss (KL of the current policy), or in each token's reward (KL of the policy that sampled it)."""
    estimator: KlEstimator = KlEstimator.K3
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, each within +-10, with d = log-prob policy - reference."""
    reference: str = ""
    """Checkpoint directory of the frozen reference model; empty is `model.path`. Costs one more copy of the model."""
    target: float | None = None
    """Adapt `coef` after each step so that the KL stays near this, in nats per token; null keeps it."""
    horizon: int = 10
    """Steps in which an adapted `coef` can grow or shrink by a fifth; for `target` only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    path: str = ""
    """Checkpoint directory that the critic starts from; empty is `model.path`. Costs a second model and optimizer."""
    lr_scale: float = 10.0
    """The critic's learning rate as a multiple of the policy's."""
    value_clip: float = 0.5
    """How far a new value may be from the one at the start of the step before its loss stops falling."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GaeConfig:
    level: GaeLevel = GaeLevel.TOKEN
    """Step of the recurrence: a token, or a turn (what is sampled between two texts of others)."""
    discount: float = 1.0
    """Gamma: what a reward one step later is worth."""
    lam: float = 1.0
    """Lambda: 1 trusts returns, 0 trusts the critic. Without a critic it discounts once more."""
    alpha: float | None = None
    """Lambda by length instead: max(0, 1 - 1 / (alpha * steps of the trajectory)) (VAPO); null is off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig:
    beta: float = 0.1
    """How strongly the policy is held near the reference; small is loosely."""
    loss: PreferenceLoss = PreferenceLoss.SIGMOID
    """`sigmoid` widens margins for ever (DPO); `ipo` wants each to be 1 / (2 beta), which noisy preferences bear."""
    reference: str = ""
    """Checkpoint directory of the frozen reference model; empty is `model.path`. Costs one more copy of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    name: str = "grpo"
    """Name in `config/recipes.py`; it sets what defines the algorithm, and defaults of what you leave out."""
    loss: str = ""
    """A loss of your own, as a dotted path `module:function`, in place of the one that `name` has."""
    groups_per_step: int = 16
    """Prompts (groups) in one optimizer step's batch."""
    minibatches: int = 1
    """Optimizer updates that one batch is split into."""
    clip_low: float = 0.2
    """The ratio current / proximal is clipped below at 1 - this."""
    clip_high: float = 0.2
    """The ratio current / proximal is clipped above at 1 + this."""
    dual_clip: float | None = None
    """Bound c > 1 on the loss of negative advantages, c |A|; null is off."""
    length_normaliser: int = 0
    """Divide the loss by this many tokens for each trajectory, not by the minibatch's trainable tokens, so that a token
    weighs the same in every step (Dr. GRPO); 0 is off."""
    sapo_tau_positive: float = 1.0
    """SAPO's temperature where the advantage is positive."""
    sapo_tau_negative: float = 1.05
    """SAPO's temperature where the advantage is negative; a higher one lets go sooner."""
    m2_threshold: float | None = None
    """Leave out tokens until the mean square of log-prob behaviour - proximal is below this (M2PO); null is off."""
    decoupled: bool = True
    """Separate the behaviour policy from the proximal one and weight by their ratio (decoupled PPO)."""
    proximal: ProximalMethod = ProximalMethod.RECOMPUTE
    """Proximal log-probs: one more forward, interpolation by version, the current ones, or the behaviour policy's."""
    rejection_sampling: RejectionConfig = field(default_factory=RejectionConfig)
    """Which off-policy tokens are left out or clamped; needs `decoupled`."""
    reward_scale: float = 1.0
    """Rewards become (reward + reward_bias) * reward_scale, then are clipped."""
    reward_bias: float = 0.0
    """See `reward_scale`."""
    reward_clip: float = 20.0
    """Bound on a scaled reward's absolute value."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Soft penalty on answers close to the length limit."""
    reward_norm: NormConfig = field(default_factory=NormConfig)
    """How rewards become advantages."""
    adv_norm: NormConfig = field(default_factory=lambda: NormConfig(mean=Level.NONE, std=Level.NONE))
    """A second normalisation, of advantages over trainable tokens; group levels make no sense here."""
    gae: GaeConfig = field(default_factory=GaeConfig)
    """How token rewards become advantages, where these live on tokens."""
    kl: KlConfig = field(default_factory=KlConfig)
    """How the policy is held near a reference."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value model, where the algorithm has one."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    """What preferences are held against."""
