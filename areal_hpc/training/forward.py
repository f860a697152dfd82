"""One forward pass of packed sequences through a decoder, for the policy, the reference model and the critic alike.

    for part, where in parts(batch, tokens_per_microbatch):         where: the part's tokens in the batch
        run = forward(decoder, part, device)
        run.before(part.loss_mask)                                  hidden states that predict the trainable tokens
        run.after()                                                 hidden states after each sequence's last token

Rows are padded on the right; padding changes nothing, since no token attends to what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_hpc.training.batching import microbatches, spread
from areal_hpc.types import Batch, BoolArray
from areal_hpc.waits import advance

IntArray = NDArray[np.int64]


def parts(
    batch: Batch, tokens_per_microbatch: int, *, together: int = 1, padded: bool = True
) -> Iterator[tuple[Batch, IntArray]]:
    """Parts of the batch and where their tokens stand in it; sequences without a trainable token are left out.

    Args:
        together: so many sequences in a row are in one part, in their order; each of them has a trainable token.
        padded: rows of one width, which is what ``forward`` computes; a backend that packs sequences does without.
    """
    mask, starts = batch.loss_mask, batch.boundaries[:-1]
    assert not mask[starts[batch.lengths > 0]].any(), "no model predicts the first token of a sequence"
    trains = trained_sequences(batch)
    assert together == 1 or trains.size == batch.num_sequences, "a member of a pair has no trainable token"
    widths = batch.lengths[trains].reshape(-1, together).max(axis=1, initial=0)
    for units in microbatches(widths, tokens_per_microbatch // together, padded=padded):
        sequences = [int(trains[i]) for i in spread(units, together)]
        where = np.concatenate([np.arange(starts[s], batch.boundaries[s + 1]) for s in sequences])
        yield batch.select(sequences), where
        advance("micro-batches")


def trained_sequences(batch: Batch) -> IntArray:
    """Sequences that have a trainable token, in order."""
    return np.unique(sequence_of_token(batch)[batch.loss_mask])


def sequence_of_token(batch: Batch) -> IntArray:
    """[T]"""
    return np.repeat(np.arange(batch.num_sequences), batch.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a decoder made of some sequences."""

    hidden: Tensor  # [S, W, H]
    token_ids: Tensor  # int64 [S, W]
    rows: IntArray  # [T], the row and column of each token
    columns: IntArray  # [T]
    lengths: IntArray  # [S]

    def before(self, mask: BoolArray) -> Tensor:
        """Hidden states [N, H] of the state before each token of the mask [T]: what predicts it."""
        rows, columns = _on(self.hidden.device, self.rows[mask], self.columns[mask] - 1)
        return self.hidden[rows, columns]

    def targets(self, mask: BoolArray) -> Tensor:
        """The tokens of the mask [T]. int64 [N]"""
        rows, columns = _on(self.hidden.device, self.rows[mask], self.columns[mask])
        return self.token_ids[rows, columns]

    def after(self) -> Tensor:
        """Hidden states [S, H] of the state after each sequence's last token."""
        rows, columns = _on(self.hidden.device, np.arange(self.lengths.size), self.lengths - 1)
        return self.hidden[rows, columns]


def forward(decoder: Any, batch: Batch, device: torch.device) -> Forward:
    """Run ``decoder`` (a Hugging Face model without its head) over the whole sequences of ``batch``, at least one."""
    rows = sequence_of_token(batch)
    columns = np.arange(rows.size) - batch.boundaries[rows]
    shape = (batch.num_sequences, int(batch.lengths.max()))
    token_ids, attended = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    token_ids[rows, columns], attended[rows, columns] = batch.token_ids, 1
    ids, mask = _on(device, token_ids, attended)
    hidden = decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    lengths = batch.lengths.astype(np.int64)
    return Forward(hidden=hidden, token_ids=ids, rows=rows, columns=columns, lengths=lengths)


def _on(device: torch.device, *arrays: IntArray) -> list[Tensor]:
    return [torch.from_numpy(array).to(device) for array in arrays]
