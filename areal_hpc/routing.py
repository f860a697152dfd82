"""Which experts of a mixture computed which token: records that engines make and trainers replay.

An engine and a trainer with the same weights compute with different kernels. Now and then the two choose different
experts for a token, and its log-prob jumps; where the trainer takes the engine's choice it does not (Ma et al. 2025,
arXiv 2510.11370).

A record [T, L, K] holds the K experts that each of L layers chose for each of T tokens, in any order, as uint8 or
uint16. A token that was no input of the model while the record was made, such as the last one of an answer, has
``no_expert`` throughout: whoever replays the record routes that token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ExpertRecord = NDArray[np.uint8] | NDArray[np.uint16]


class Routing(NamedTuple):
    """Shape of a model's records."""

    num_layers: int
    num_per_token: int
    num_experts: int

    def __str__(self) -> str:
        return f"{self.num_layers} layers with {self.num_per_token} of {self.num_experts} experts a token"

    def unrecorded(self, num_tokens: int) -> ExpertRecord:
        """A record of tokens of which nothing is known."""
        dtype: Any = np.uint8 if self.num_experts <= np.iinfo(np.uint8).max else np.uint16
        return np.full((num_tokens, self.num_layers, self.num_per_token), no_expert(dtype), dtype=dtype)

    def misfit(self, record: ExpertRecord) -> str:
        """Why this model cannot replay the record, as far as can be seen; empty where it may."""
        _, num_layers, num_per_token = record.shape
        if (num_layers, num_per_token) != (self.num_layers, self.num_per_token):
            return f"{num_layers} layers with {num_per_token} experts a token"
        highest = int(record.max(initial=0, where=record != no_expert(record.dtype)))
        return f"more than {highest} experts" if highest >= self.num_experts else ""

    def whole(self, parts: Sequence[ExpertRecord], num_tokens: int) -> ExpertRecord:
        """One record of so many tokens: the parts, one after the other, and nothing of the tokens behind them."""
        known = sum(len(part) for part in parts)
        return np.concatenate([*parts, self.unrecorded(num_tokens - known)])


def no_expert(dtype: np.typing.DTypeLike) -> int:
    """What stands for no expert in records of this type: its largest number."""
    return int(np.iinfo(np.dtype(dtype)).max)


def check_record(record: ExpertRecord | None, num_tokens: int) -> None:
    """Check that ``record``, if there is one, has the shape and type of a record.

    Raises:
        ValueError: it is not a record of so many tokens.
    """
    if record is not None and (record.ndim, len(record), record.dtype.kind) != (3, num_tokens, "u"):
        raise ValueError(f"a record of experts of {num_tokens} tokens cannot be {record.dtype} {record.shape}")


def joined(records: Sequence[ExpertRecord | None], lengths: Sequence[int]) -> ExpertRecord | None:
    """Records of sequences of these lengths, one after the other; None where no sequence has one."""
    known = next((record for record in records if record is not None), None)
    if known is None:
        return None
    none = no_expert(known.dtype)
    return np.concatenate(
        [
            np.full((length, *known.shape[1:]), none, dtype=known.dtype) if record is None else record
            for record, length in zip(records, lengths, strict=True)
        ]
    )


def overlaid(records: Sequence[tuple[int, ExpertRecord]], num_tokens: int) -> ExpertRecord | None:
    """The record of a sequence, of records of stretches of it; where they overlap the later one counts.

    Args:
        records: where each stretch ends, and its record.
    """
    if not records:
        return None
    whole = joined([None, records[0][1][:0]], [num_tokens, 0])
    assert whole is not None
    for end, record in records:
        whole[end - len(record) : end] = record
    return whole


def replayed(record: ExpertRecord) -> NDArray[np.int32]:
    """The record as a router wants it: -1 where no expert stands."""
    return np.where(record == no_expert(record.dtype), -1, record.astype(np.int32)).astype(np.int32)
