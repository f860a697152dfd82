"""The carriers: what travels between the rooms, from a prompt to a training batch.

    Prompt -> Completion (one per request) -> Trajectory (one per episode) -> TrajectoryGroup (one per prompt)
           -> GroupRef (where a sealed group lies) -> Batch (packed, what a trainer rank holds)
           -> TrainedStep (what a step was made of) -> ArchivedStep (with its tokens, for people and tools)

Conventions that every room keeps: index ``t`` of token ids, loss mask, log-probs and **versions** refers to the same
token; log-probs are natural logarithms of the sampling distribution at the sampling temperature; a token that was not
sampled in this run has log-prob 0.0, version -1 and mask 0 (1 in an answer that a data set gives). The stop reason is
carried, never inferred from a length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_hpc.routing import ExpertRecord, check_record

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Message = Mapping[str, Any]
"""One chat message in the OpenAI shape: at least ``role`` and ``content``."""

TokenLogprob = tuple[float, int]
"""(log-prob, token id)"""

NOT_SAMPLED = -1
"""Version of a token that no policy of this run sampled: prompts, tool output, chat history."""

MAX_SEED = 1 << 31
"""Sampling seeds, of episodes and of their turns, stay below this."""


class StopReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model ended it: end-of-turn token or a stop string."""
    LENGTH = "length"
    """The token budget was used up."""
    ABORT = "abort"
    """Somebody else ended it; the tokens so far are valid, the answer is not complete."""

    def is_complete(self) -> bool:
        """Whether the answer may be scored and trained on."""
        return self is not StopReason.ABORT


class WeightVersion(NamedTuple):
    """Which weights: the attempt (fencing epoch) that made them and the optimizer steps behind them."""

    epoch: int
    step: int

    def no_newer_than(self, step: int | None) -> WeightVersion:
        """These weights, or the same attempt's of ``step`` if that is older."""
        return self if step is None or step >= self.step else WeightVersion(self.epoch, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task. ``position`` is its place in the run's endless stream and its identity for exactly-once."""

    position: int
    id: str
    messages: tuple[Message, ...]
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine samples. Log-probs that come back are those of the distribution this describes.

    Two things differ between engines. SGLang tells log-probs of a narrowed distribution only where ``top_k`` bounds it,
    so a request with ``top_p`` or ``min_p`` and no ``top_k``, or a larger one, is sent with
    ``generation.answers.NARROWED_TOP_K``. And beside other limits vLLM applies ``top_p`` to what these leave, while
    the other engines apply it to the whole distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    """Go on past the end of a turn. SGLang then heeds no ``stop_token_ids`` either."""
    seed: int | None = None
    """SGLang heeds it only if its server was started with ``enable_deterministic_inference``."""
    json_schema: str = ""
    """JSON schema, as JSON, that the answer is forced to follow; empty is any text. Log-probs are those of what it
    leaves (``dialogue.grammar``)."""
    structural_tag: str = ""
    """Texts that begin something of a fixed form in an answer, such as a tool call, and that form, as SGLang's JSON;
    empty is any text. Log-probs are as with a schema; at most one of the two is set."""

    @property
    def is_forced(self) -> bool:
        """Whether a grammar narrows what may be sampled."""
        return bool(self.json_schema or self.structural_tag)

    @property
    def is_narrowed(self) -> bool:
        """Whether some tokens are not sampled though the model gives them a probability."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request to an engine. ``request_id`` is unique in the run; ``session`` keeps turns on one engine.

    ``on_tokens``, where given, is told the sampled ids as they come, each once and in order, in the caller's event
    loop; what it was told is a beginning of the completion, and may lack the end of it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    session: str = ""
    num_top: int = 0
    """How many of the likeliest tokens are told at each place of the answer."""
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False, repr=False)
    experts_from: int = 0  # the first of token_ids whose experts are to be told, where engines are asked for any


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled, whichever engine it was.

    Raises:
        ValueError: counts differ, or a log-prob is not finite (a broken engine; the sample is failed).
    """

    token_ids: Int32Array  # [T]
    logprobs: Float32Array  # [T]
    versions: Int32Array  # [T], the weight step that sampled each token
    stop: StopReason
    text: str = ""
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """[T] of up to ``num_top`` each, the likeliest first; empty where none were asked for."""
    experts: ExpertRecord | None = None  # [R, L, K], of the last R tokens of request and answer: from experts_from on

    def __post_init__(self) -> None:
        if not self.token_ids.shape == self.logprobs.shape == self.versions.shape:
            shapes = f"{self.token_ids.shape}, {self.logprobs.shape}, {self.versions.shape}"
            raise ValueError(f"a completion needs one log-prob and one version per token, got shapes {shapes}")
        if not np.isfinite(self.logprobs).all():
            raise ValueError("a completion has a log-prob that is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode as training data.

    Raises:
        ValueError: counts differ, a log-prob or the reward is not finite.
    """

    token_ids: Int32Array  # [T], prompt and everything after it
    loss_mask: BoolArray  # [T], True where this run sampled the token
    logprobs: Float32Array  # [T], the behaviour policy's; 0.0 where not sampled
    versions: Int32Array  # [T], NOT_SAMPLED where not sampled
    reward: float
    stop: StopReason
    episode: int = 0  # which episode of its group; the branches of one episode share it
    experts: ExpertRecord | None = None  # [T, L, K]

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if not shape == self.loss_mask.shape == self.logprobs.shape == self.versions.shape:
            raise ValueError(f"a trajectory's arrays must all have shape {shape}")
        check_record(self.experts, self.token_ids.size)
        if not math.isfinite(self.reward) or not np.isfinite(self.logprobs).all():
            raise ValueError("a trajectory has a log-prob or a reward that is not finite")

    @property
    def num_generated(self) -> int:
        """How many tokens this run sampled."""
        return int(np.count_nonzero(self.loss_mask))


def episode_means(values: Sequence[float], episodes: Sequence[int]) -> NDArray[np.float64]:
    """The value of each episode [E], by its number: the mean over its branches, which share one in ``episodes`` [N]."""
    _, episode_of, num_branches = np.unique(np.asarray(episodes), return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.bincount(episode_of, np.asarray(values, dtype=np.float64)) / num_branches
    return means


class Baseline(NamedTuple):
    """What the reward of an episode without siblings is compared with: the rewards of episodes before it."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """All episodes of one prompt; advantages are relative to the group. Sizes may differ between groups."""

    position: int
    prompt_id: str
    trajectories: tuple[Trajectory, ...]
    baseline: Baseline | None = None  # of a lone episode of an agent in daily use, which has no group

    @property
    def rewards(self) -> NDArray[np.float64]:
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)

    @property
    def num_tokens(self) -> int:
        return sum(int(t.token_ids.size) for t in self.trajectories)


class Drop(StrEnum):
    """Why a prompt's episode ended without being trained on."""

    FILTERED = "filtered"
    """A group filter refused it (no signal, too long); the prompt counts as consumed."""
    FAILED = "failed"
    """Its episodes failed for good; the prompt counts as consumed."""
    STALE = "stale"
    """Sampled by weights older than the bound; the prompt is issued again."""
    NEWER = "newer"
    """Sampled by weights that a rollback took back; the prompt is issued again."""
    CORRUPT = "corrupt"
    """Its stored bytes are damaged; the prompt is issued again."""
    ABANDONED = "abandoned"
    """Its worker ended before the episode did; the prompt is issued again."""

    def reissues(self) -> bool:
        """Whether the prompt comes back, or is consumed by this drop."""
        return self not in (Drop.FILTERED, Drop.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The right to have one group outstanding. Reserved before the episode, given back by the trainer's release."""

    chain: str
    number: int
    position: int
    version: WeightVersion  # the newest published weights when it was reserved, or older ones that its episode has used


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A ticket that ended without training. ``consumed``: its prompt will not come again because of this drop."""

    chain: str
    ticket: int
    position: int
    reason: Drop
    consumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """Where a sealed group lies, with what a plan needs to know of it without reading its bytes."""

    chain: str
    segment: int
    offset: int
    seq: int
    ticket: int
    position: int
    prompt_id: str
    version: WeightVersion
    rewards: tuple[float, ...]  # one entry for each trajectory, here and below
    lengths: tuple[int, ...]  # tokens, prompt included
    generated: tuple[int, ...]  # tokens that this run sampled
    truncated: tuple[bool, ...]  # cut by the token budget
    episodes: tuple[int, ...]  # branches of one episode share a number
    baseline: Baseline | None = None  # the group's
    handle: tuple[Any, ...] = ()  # how its bytes are found and checked: plain data, for its keeper alone

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def record(self) -> dict[str, Any]:
        """Plain data that JSON keeps."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GroupRef:
        """The reference that ``record`` was made from, also after JSON has turned tuples into lists."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        baseline = None if record.get("baseline") is None else Baseline(*record["baseline"])
        return cls(**{**values, "version": WeightVersion(*record["version"]), "baseline": baseline})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """What one optimizer step is made of, as far as it is known without the tokens."""

    version: WeightVersion  # the weights that the step makes
    refs: tuple[GroupRef, ...]  # as claimed, in this order
    readable: tuple[bool, ...]  # one entry for each group; False where its bytes were damaged and it was left out
    advantages: Float32Array  # [N], of each trajectory; where tokens have their own (GAE), the shaped reward
    proximal: Mapping[int, Float32Array] = field(default_factory=dict)
    """Trajectory (0 to N - 1) -> the proximal policy's log-probs [T], where the algorithm computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedStep:
    """A step with its tokens; ``groups`` has an entry for each group that was readable, by its place in ``refs``."""

    step: TrainedStep
    groups: Mapping[int, TrajectoryGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed sequences of one trainer rank: flat arrays with boundaries, no padding.

    Raises:
        AssertionError: the arrays do not fit the boundaries (our own mistake, not the user's).
    """

    token_ids: Int32Array  # [T]
    loss_mask: BoolArray  # [T]
    behaviour: Float32Array  # [T], log-probs of the policy that sampled
    versions: Int32Array  # [T]
    advantages: Float32Array  # [T]
    boundaries: Int32Array  # [S + 1], sequence s is [boundaries[s], boundaries[s + 1])
    truncated: BoolArray | None = None  # [S], cut by the token budget: the carried stop reason; None where not needed
    # What the models say at the start of the step; None where the algorithm does not need it. All [T]:
    proximal: Float32Array | None = None  # log-probs by the weights at the start of the step
    reference: Float32Array | None = None  # log-probs by the frozen reference model
    values: Float32Array | None = None  # the critic's, of the state before each token
    returns: Float32Array | None = None  # what the critic is to learn
    eligible: BoolArray | None = None  # trainable tokens that the algorithm does not leave out
    experts: ExpertRecord | None = None  # [T, L, K], what the policy's routers are to choose

    def __post_init__(self) -> None:
        for name, array in self._per_token().items():
            assert array is None or array.shape[: 1 if name == "experts" else None] == (self.boundaries[-1],), name
        assert self.truncated is None or self.truncated.shape == (self.num_sequences,)

    def _per_token(self) -> dict[str, NDArray[Any] | None]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("boundaries", "truncated")}

    @property
    def lengths(self) -> Int32Array:
        return np.diff(self.boundaries).astype(np.int32)

    @property
    def num_sequences(self) -> int:
        return int(self.boundaries.size - 1)

    @property
    def num_trainable(self) -> int:
        return int(self.loss_mask.sum())

    def select(self, sequences: Sequence[int]) -> Batch:
        """The same tokens of the named sequences, in the order given."""
        spans = [np.arange(self.boundaries[s], self.boundaries[s + 1]) for s in sequences]
        index = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        chosen = {name: None if array is None else array[index] for name, array in self._per_token().items()}
        return replace(
            self,
            boundaries=np.cumsum([0, *(len(s) for s in spans)], dtype=np.int32),
            truncated=None if self.truncated is None else self.truncated[list(sequences)],
            **chosen,  # type: ignore[arg-type]
        )

    def per_sequence(self, values: Float32Array) -> list[Float32Array]:
        """``values`` [T] of the batch's tokens, one array for each sequence."""
        return [values[start:end] for start, end in pairwise(self.boundaries.tolist())]

    def with_proximal(self, proximal: Float32Array) -> Batch:
        """The same batch with the proximal policy's log-probs [T]."""
        return replace(self, proximal=proximal)
