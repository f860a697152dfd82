"""A set of non-negative integers that is nearly all of ``range(low)``: what has been consumed of a stream.

Kept as a low watermark and the few numbers above it, so that a million consumed prompts cost a handful of bytes in a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Watermark:
    """``low``: every number below is in the set; ``above``: the others, all greater than ``low``."""

    __slots__ = ("above", "low")

    def __init__(self, low: int = 0, above: Iterable[int] = ()) -> None:
        self.low = low
        self.above = set(above)
        self._settle()

    def _settle(self) -> None:
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def __contains__(self, number: int) -> bool:
        return number < self.low or number in self.above

    def __len__(self) -> int:
        return self.low + len(self.above)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Watermark) and (self.low, self.above) == (other.low, other.above)

    def __hash__(self) -> int:
        raise TypeError("a Watermark changes; it cannot be hashed")

    def __iter__(self) -> Iterator[int]:
        yield from range(self.low)
        yield from sorted(self.above)

    def add(self, number: int) -> bool:
        """Put ``number`` in; whether it was new."""
        if number in self:
            return False
        self.above.add(number)
        self._settle()
        return True

    def copy(self) -> Watermark:
        return Watermark(self.low, self.above)

    def state_dict(self) -> dict[str, Any]:
        return {"low": self.low, "above": sorted(self.above)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Watermark:
        return cls(int(state["low"]), (int(n) for n in state["above"]))
