"""What the tasks that come with the library share: rows made from items, and some of these held out for good."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar, overload

from areal_hpc.errors import DataError

Item = TypeVar("Item")
Row = Mapping[str, str]
NUM_HELD_OUT = 256
HOLD_OUT_SEED = 1234


class MadeRows(Sequence[Row], ABC, Generic[Item]):
    """The rows of one split, each made when it is asked for, in an order drawn by ``seed``.

    The same items are held out for evaluation whatever the seed, so that two runs are comparable.

    Raises:
        DataError: ``split`` is neither "train" nor "eval".
    """

    def __init__(self, items: Iterable[Item], split: str, seed: int) -> None:
        all_items = list(items)
        random.Random(HOLD_OUT_SEED).shuffle(all_items)
        splits = {"train": all_items[NUM_HELD_OUT:], "eval": all_items[:NUM_HELD_OUT]}
        if split not in splits:
            raise DataError(f"split {split!r} of the task {type(self).__name__} does not exist; use 'train' or 'eval'")
        self._items = splits[split]
        random.Random(seed).shuffle(self._items)

    @abstractmethod
    def row(self, item: Item) -> Row:
        """The row of an item: at least ``prompt``, ``answer`` and ``id``."""

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(item) for item in self._items[index]]
        return self.row(self._items[index])
