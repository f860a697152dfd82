"""The task of a run that learns from agents in daily use: positions, of which only they know what is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload


class Anything(Mapping[str, str]):
    """A row that has whatever column a configuration names, and tells of none."""

    def __getitem__(self, column: str) -> str:
        return "whatever an agent asks"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


class OpenEnded(Sequence[Anything]):
    """One row, so that each position of the run's endless stream is one episode, or one group of them."""

    def __init__(self, **_: Any) -> None:
        """Takes what other tasks take."""

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> Anything: ...

    @overload
    def __getitem__(self, index: slice) -> list[Anything]: ...

    def __getitem__(self, index: int | slice) -> Anything | list[Anything]:
        return [Anything()][index]
