"""A micro-batch as Megatron's packed kernels take it: sequences end to end, and of each the part of one context rank.

Context parallelism cuts every sequence into twice as many chunks as there are ranks; rank r holds chunks r and
2 C - 1 - r, one early and one late, so that causal attention costs all ranks the same. Sequences are padded at their
ends to whole chunks, the last one also to what tensor-parallel ranks can share. No token sees what comes after it, so
padding changes nothing. Pure, numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_hpc.routing import ExpertRecord, no_expert
from areal_hpc.types import Batch

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """What one rank of a context group computes of a micro-batch; C is the number of those ranks."""

    token_ids: IntArray  # [P / C], this rank's tokens of the P padded ones
    positions: IntArray  # [P / C], of each in its sequence
    boundaries: NDArray[np.int32]  # [S + 1], of the padded sequences, on all ranks together
    rows: IntArray  # [N], places in token_ids of the states that predict trainable tokens
    targets: IntArray  # [N], those tokens
    slots: IntArray  # [N], where they stand in the micro-batch
    token_rows: IntArray  # [M], places in token_ids of the tokens that are no padding
    token_slots: IntArray  # [M], where they stand in the micro-batch
    experts: ExpertRecord | None = None  # [P / C, L, K], of this rank's tokens; of padding there are none


def pack_for_rank(batch: Batch, *, context_rank: int = 0, context_size: int = 1, multiple: int = 1) -> Packed:
    """This context rank's part of the whole sequences of ``batch``.

    Args:
        multiple: of which every rank's number of tokens is one; the tensor-parallel ranks that share them.
    """
    unit = 1 if context_size == 1 else 2 * context_size
    lengths = batch.lengths.astype(np.int64)
    padded = -(-lengths // unit) * unit
    padded[-1] += -padded.sum() % (unit * multiple)
    boundaries = np.concatenate([[0], padded.cumsum()])
    sequence = np.repeat(np.arange(lengths.size), lengths)
    place = boundaries[sequence] + np.arange(sequence.size) - batch.boundaries[sequence]  # [T], of each token
    token_ids = np.zeros(boundaries[-1], dtype=np.int64)
    token_ids[place] = batch.token_ids
    mine = _places_of_rank(boundaries, context_rank, context_size)
    row_of = np.full(boundaries[-1], -1)
    row_of[mine] = np.arange(mine.size)
    rows_of_tokens = row_of[place]  # [T], -1 where another rank has the token
    slots = np.flatnonzero(batch.loss_mask)
    rows = row_of[place[slots] - 1]
    return Packed(
        token_ids=token_ids[mine],
        positions=(np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], padded))[mine],
        boundaries=boundaries.astype(np.int32),
        rows=rows[rows >= 0],
        targets=batch.token_ids[slots[rows >= 0]].astype(np.int64),
        slots=slots[rows >= 0],
        token_rows=rows_of_tokens[rows_of_tokens >= 0],
        token_slots=np.flatnonzero(rows_of_tokens >= 0),
        experts=None if batch.experts is None else _spread(batch.experts, place, boundaries[-1])[mine],
    )


def _spread(experts: ExpertRecord, place: IntArray, num_places: int) -> ExpertRecord:
    """The experts of each token [T, L, K] at its place; no expert elsewhere."""
    spread = np.full((num_places, *experts.shape[1:]), no_expert(experts.dtype), dtype=experts.dtype)
    spread[place] = experts
    return spread


def nothing(tokens: int, context_size: int = 1) -> Packed:
    """A sequence of so many tokens on this rank without one to train on: for ranks that only take part."""
    none = np.zeros(0, dtype=np.int64)
    boundaries = np.array([0, tokens * context_size], dtype=np.int32)
    return Packed(
        token_ids=np.zeros(tokens, dtype=np.int64),
        positions=np.zeros(tokens, dtype=np.int64),
        boundaries=boundaries,
        rows=none,
        targets=none,
        slots=none,
        token_rows=none,
        token_slots=none,
    )


def _places_of_rank(boundaries: IntArray, rank: int, size: int) -> IntArray:
    """Places of this rank's tokens among the padded ones, in the order in which the rank holds them."""
    if size == 1:
        return np.arange(boundaries[-1])
    chunks = np.diff(boundaries) // (2 * size)
    return np.concatenate(
        [
            start + chunk * part + np.arange(chunk)
            for start, chunk in zip(boundaries[:-1], chunks, strict=True)
            for part in (rank, 2 * size - 1 - rank)
        ]
    )
