"""One sequence in the engine: what was asked of it, what has been sampled, and under which weights.

waiting --(a row is free)--> running --(stop, length, abort)--> finished
    ^                           |
    +-------- retracted --------+      keeps its tokens; the cache is computed again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from areal_hpc.dialogue.grammar import Matcher
from areal_hpc.dialogue.text import IncrementalText
from areal_hpc.errors import DataError
from areal_hpc.generation.embedded.sampler import mix
from areal_hpc.types import TokenLogprob

NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "regex": None,
    "ebnf": None,
    "logit_bias": None,
    "custom_params": None,
    "stop_regex": None,
}
"""SGLang's sampling fields that this engine lacks, with the value that asks for nothing; any other is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """SGLang's ``sampling_params``, checked. Raises DataError naming the field that is wrong."""

    n: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    json_schema: str = ""
    structural_tag: str = ""

    def __post_init__(self) -> None:
        for holds, rule in (
            (self.n >= 1, "n must be at least 1"),
            (self.max_new_tokens >= 1, "max_new_tokens must be at least 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens must be in [0, max_new_tokens]"),
            (0 <= self.temperature < float("inf"), "temperature must be at least 0 and finite"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
            (self.top_k == -1 or self.top_k >= 1, "top_k must be -1 (off) or at least 1"),
            (0 <= self.min_p <= 1, "min_p must be in [0, 1]"),
            (all(self.stop), "stop strings must not be empty"),
            (
                not (self.json_schema and self.structural_tag),
                "json_schema and structural_tag exclude each other",
            ),
            (self.sampling_seed is None or 0 <= self.sampling_seed < 2**64, "sampling_seed must fit 64 bits"),
        ):
            if not holds:
                raise DataError(f"sampling_params: {rule}")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SamplingParams:
        known = {f.name for f in fields(cls)}
        refused = [k for k, v in given.items() if k not in known and not (k in NEUTRAL and v in (None, NEUTRAL[k]))]
        if refused:
            raise DataError(f"sampling_params {sorted(refused)} are not supported here; leave them out")
        values = {key: value for key, value in given.items() if key in known and value is not None}
        if isinstance(values.get("stop"), str):
            values["stop"] = [values["stop"]]
        for key, value in values.items():
            _check_kind(key, value)
        values["stop"] = tuple(values.get("stop", ()))
        values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
        return cls(**values)


NUMBERS = ("temperature", "top_p", "min_p")
FLAGS = ("ignore_eos", "skip_special_tokens", "no_stop_trim")
TEXTS = ("json_schema", "structural_tag")
LISTS = {"stop": str, "stop_token_ids": int}


def _check_kind(key: str, value: Any) -> None:
    if key in LISTS:
        fits = isinstance(value, list) and all(isinstance(item, LISTS[key]) for item in value)
        kind = f"a list of {LISTS[key].__name__}"
    elif key in FLAGS:
        fits, kind = isinstance(value, bool), "true or false"
    elif key in TEXTS:
        fits, kind = isinstance(value, str), "a text"
    elif key in NUMBERS:
        fits, kind = isinstance(value, int | float), "a number"
    else:
        fits, kind = isinstance(value, int), "an integer"
    if not fits:
        raise DataError(f"sampling_params: {key} must be {kind}")


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One prompt and its answer. Changed by the engine's thread only; complete once ``done`` is resolved.

    Lists are append-only while it runs, so another thread may read a beginning of them.
    """

    request_id: str
    parent_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    version: str
    """Name of the weights that sample it: the engine's when it was made, then as of ``begin_version``."""
    logprob_start: int | None = None
    """First prompt position whose log-prob is asked for; None is none."""
    num_top: int = 0
    priority: int = 0
    """Of two that wait the one of the lower number runs first."""
    listener: Callable[[int], None] | None = None
    """Called in the engine's thread with the number of tokens, while it has not finished."""
    tracker: IncrementalText | None = None
    """Follows the text where there are stop strings."""
    matcher: Matcher | None = None
    """Follows the answer where a grammar forces it."""

    row: int = -1
    prefix: tuple[int, ...] = ()
    """All tokens it had when it was given its row."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    starts: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, first token index) of each stretch of tokens."""
    num_cached: int = 0
    num_retractions: int = 0
    searched: int = 0
    """Length of the text that has been searched for stop strings."""
    finish_reason: dict[str, Any] | None = None
    born: float = field(default_factory=time.monotonic)
    finished: float = 0.0
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()  # a waiter that is cancelled cannot cancel the sequence with it

    @property
    def history(self) -> tuple[int, ...]:
        """All tokens so far: what the cache must hold, but for the last."""
        return (*self.prompt, *self.token_ids)

    def begin_version(self, version: str) -> None:
        """Tokens from here on are sampled by weights ``version``."""
        self.version = version
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, len(self.token_ids)))

    def spans(self, num_tokens: int) -> list[dict[str, Any]]:
        """SGLang's ``weight_versions`` over the first ``num_tokens`` tokens: [start, end) of each version."""
        starts = list(self.starts)  # the engine may add to it meanwhile
        ends = [start for _, start in starts[1:]] + [num_tokens] * bool(starts)
        return [
            {"version": version, "start": start, "end": min(end, num_tokens)}
            for (version, start), end in zip(starts, ends, strict=True)
            if start < min(end, num_tokens)
        ]

    def finish(self, kind: str, **details: Any) -> None:
        self.finish_reason = {"type": kind, **details}
        self.finished = time.monotonic()

    def resolve(self, error: BaseException | None = None) -> None:
        """Wake who waits for this sequence; the first call counts."""
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample ``index`` of a request; sample 0 keeps the request's own, so n does not change it."""
    if index == 0:
        return seed
    return int(mix(np.array([seed], dtype=np.uint64), np.array([index], dtype=np.uint64))[0])
