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
    """Width L of the penalty zone before max_new_tokens (DAPO); 0 is off."""
    factor: float = 1.0
    """Penalty at the full length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    name: str = "grpo"
    """Name in `algorithms/table.py`."""
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
    decoupled: bool = True
    """Separate the behaviour policy from the proximal one and weight by their ratio (decoupled PPO)."""
    proximal: ProximalMethod = ProximalMethod.RECOMPUTE
    """Where the proximal log-probs come from: one more forward, interpolation by version, or the current ones."""
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
