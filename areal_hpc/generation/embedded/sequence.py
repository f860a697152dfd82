"""One sequence in the engine: what was asked of it, what has been sampled, and under which weights.

waiting --(a row is free)--> running --(stop, length, abort)--> finished
    ^                           |
    +-------- retracted --------+      keeps its tokens; the cache is computed again
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from areal_hpc.dialogue.grammar import Matcher
from areal_hpc.dialogue.text import IncrementalText
from areal_hpc.generation.embedded.sampler import mix
from areal_hpc.generation.served.request import SamplingParams
from areal_hpc.types import TokenLogprob


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
    """Of two waiting sequences the one with the lower number runs first."""
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
