"""The rules of weight groups, and of updates in buckets, that every engine keeps which we serve ourselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from areal_hpc.collective import interfaces
from areal_hpc.errors import WeightUpdateError
from areal_hpc.transfer import GroupAddress


@dataclass(slots=True)
class Session:
    """One weight update between ``begin`` and ``end``."""

    names: set[str] = field(default_factory=set)
    """Names of the tensors that have come."""
    version: str | None = None
    """What the weights are to be called; None of an update that leaves the name as it is."""
    flush_cache: bool = False

    def take(self, names: Iterable[str]) -> None:
        """Note what comes. Raises WeightUpdateError, and notes nothing, if some of it has come before."""
        coming = set(names)
        if twice := self.names & coming:
            raise WeightUpdateError(f"parameters {sorted(twice)[:3]} came twice in one update; send each once")
        self.names |= coming

    def note_options(self, version: str | None, *, flush_cache: bool) -> None:
        """Note what a bucket's request asks of the end of the update. The last version named counts; the cache is
        flushed if any bucket asks for it."""
        self.version = version or self.version
        self.flush_cache |= flush_cache


S = TypeVar("S", bound=Session)


def opened(session: S | None) -> S:
    """The session. Raises WeightUpdateError if there is none."""
    if session is None:
        raise WeightUpdateError(
            "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        )
    return session


def not_formed(group: GroupAddress, limit_s: float, error: BaseException) -> str:
    """What is said of a group whose members did not all come."""
    return (
        f"group {group.name!r} at {group.host}:{group.port} did not form within {limit_s:g} s, seen from "
        f"{interfaces(group.backend)}: {error}"
    )


def require_fresh(group: str, groups: Collection[str]) -> None:
    """Raises WeightUpdateError if a group of that name is among those that were joined."""
    if group in groups:
        raise WeightUpdateError(f"group {group!r} has already been created; use a fresh name")


def require_joined(group: str, groups: Collection[str]) -> None:
    """Raises WeightUpdateError unless it is."""
    if group not in groups:
        raise WeightUpdateError(f"group {group!r} does not exist; join it first")
