"""What an engine of SGLang's API can do, by its own account, and what follows for running requests in an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

FIRST_VERSION_WITH_SPANS = (0, 5, 19)
"""The first SGLang whose answers say which weights sampled which tokens."""
FIRST_VERSION_THAT_RETRACTS = (0, 5, 21)
"""The first SGLang whose cache can be flushed while retracted requests wait; an older one refuses, or dies of it."""

FIRST_VERSION_THAT_TELLS_ITS_SUPPORT = (0, 5, 21)
"""The first SGLang that is known to tell, if asked, which tokens it could have sampled, and their log-probs."""


SGLANG_QUEUE_S = 300.0
"""Seconds from one priority number to the next on SGLang. It keeps statistics of every number that it has ever seen and
writes all of them each time, so there must be few: 288 a day cost little."""


class Narrowed(StrEnum):
    """When an engine reports log-probs of the distribution that is left by top-k, top-p and min-p, renormalised."""

    ALWAYS = "always"
    ASKED = "asked"
    """If the request asks for them, and has a top-k that bounds them."""
    NEVER = "never"
    """It reports those of the full distribution, which is not the one that tokens are sampled from."""


class PauseMode(StrEnum):
    """What becomes of running requests, by SGLang's names for it."""

    RETRACT = "retract"
    """They wait and are computed anew. Only this forgets all that old weights have computed: SGLang shares prefixes
    between requests, and while any runs its cache cannot be flushed, so that new requests would go on from old keys
    and values under a new version's name."""
    IN_PLACE = "in_place"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do beyond the oldest API, read once from its ``/server_info``."""

    spans: bool
    """It reports version spans, so that updates need not interrupt."""
    retracts: bool
    """It takes running requests back, and lets its cache be flushed meanwhile."""
    checksums: bool
    """It compares the CRC-32C of each tensor it receives."""
    deltas: bool
    """It takes what has changed of a tensor."""
    stages: bool
    """It receives new weights into a second buffer while it samples on, and pauses only to put them into place."""
    manifests: bool
    """It is SGLang with this package's plugin in its workers, which reads checksums and deltas of a bucket from the
    request's load format (``manifest.py``)."""
    queue_s: float | None
    """Its queue is ordered by priority numbers, lower ones first, which requests get by time: the seconds from one
    number to the next. None where the order is that in which requests came."""
    narrowed: Narrowed
    quarantined: bool
    """An update of it failed half-way; only servers of our own say so."""

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> Capabilities:
        """From the answer of ``/server_info``: ``version`` is SGLang's; a top-level ``areal_hpc`` is there only on
        servers of our own; in ``internal_states`` it comes from our plugin in SGLang's workers."""
        numbers = [int(part) for part in str(info.get("version", "")).split(".")[:3] if part.isdecimal()]
        ours = info.get("areal_hpc") or {}
        workers = [state.get("areal_hpc") or {} for state in info.get("internal_states") or ()]
        inside = workers[0] if workers else {}
        return cls(
            spans=tuple(numbers) >= FIRST_VERSION_WITH_SPANS or bool(ours),
            retracts=tuple(numbers) >= FIRST_VERSION_THAT_RETRACTS or bool(ours.get("retracts")),
            checksums=bool(ours.get("checksums")),
            deltas=bool(ours.get("deltas") or inside.get("deltas")),
            stages=bool(ours.get("stages") or inside),
            manifests=bool(inside),
            queue_s=_queue_s(info, is_ours=bool(ours.get("priorities"))),
            narrowed=_narrowed(tuple(numbers), is_ours=bool(ours)),
            quarantined=bool(info.get("quarantined")),
        )

    def pause_mode(self) -> PauseMode:
        if self.retracts:
            return PauseMode.RETRACT
        return PauseMode.IN_PLACE if self.spans else PauseMode.ABORT


def _queue_s(info: Mapping[str, Any], *, is_ours: bool) -> float | None:
    if is_ours:
        return 0.001
    ordered = info.get("enable_priority_scheduling") and info.get("schedule_low_priority_values_first")
    return SGLANG_QUEUE_S if ordered else None


def _narrowed(version: tuple[int, ...], *, is_ours: bool) -> Narrowed:
    if is_ours:
        return Narrowed.ALWAYS
    return Narrowed.ASKED if version >= FIRST_VERSION_THAT_TELLS_ITS_SUPPORT else Narrowed.NEVER
