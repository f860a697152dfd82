"""What context- and tensor-parallel ranks hold of a packed micro-batch, against a plain walk over the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.training.megatron.packing import nothing, pack_for_rank
from areal_hpc.types import Batch


def batch_of(lengths: list[int]) -> Batch:
    """Every token is another; of each sequence all but the first are trained on, of every third sequence none."""
    total = sum(lengths)
    mask = np.concatenate([np.arange(n) > 0 if s % 3 < 2 else np.zeros(n, bool) for s, n in enumerate(lengths)])
    return Batch(
        token_ids=np.arange(1, total + 1, dtype=np.int32),
        loss_mask=mask,
        behaviour=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        advantages=np.zeros(total, np.float32),
        boundaries=np.cumsum([0, *lengths], dtype=np.int32),
    )


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    context=st.sampled_from([1, 2, 3, 4]),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_every_token_is_on_one_rank_and_every_trainable_one_is_predicted_once(
    lengths: list[int], context: int, multiple: int
) -> None:
    batch = batch_of(lengths)
    ranks = [pack_for_rank(batch, context_rank=r, context_size=context, multiple=multiple) for r in range(context)]
    held = np.concatenate([one.token_ids for one in ranks])
    np.testing.assert_array_equal(np.sort(held[held > 0]), batch.token_ids)  # 0 is padding
    assert {one.token_ids.size for one in ranks} == {held.size // context}
    assert ranks[0].token_ids.size % multiple == 0
    slots = np.concatenate([one.slots for one in ranks])
    np.testing.assert_array_equal(np.sort(slots), np.flatnonzero(batch.loss_mask))
    for one in ranks:
        np.testing.assert_array_equal(one.targets, batch.token_ids[one.slots])
        np.testing.assert_array_equal(one.token_ids[one.rows], one.targets - 1)  # the token before it, as all count up
        assert one.boundaries[-1] == held.size
        assert np.all(np.diff(one.boundaries) % (2 * context if context > 1 else 1) == 0)
        assert one.experts is None
        real = one.token_ids > 0
        sequence = np.searchsorted(batch.boundaries, one.token_ids[real] - 1, side="right") - 1
        np.testing.assert_array_equal(one.positions[real], one.token_ids[real] - 1 - batch.boundaries[sequence])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    context=st.sampled_from([1, 2, 3, 4]),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_experts_are_where_their_tokens_are(lengths: list[int], context: int, multiple: int) -> None:
    batch = batch_of(lengths)
    experts = np.stack([batch.token_ids, batch.token_ids + 1000], 1).astype(np.uint16)[:, None, :]
    experts[::3] = 65535
    batch = replace(batch, experts=experts)
    for rank in range(context):
        one = pack_for_rank(batch, context_rank=rank, context_size=context, multiple=multiple)
        assert one.experts is not None and one.experts.shape == (one.token_ids.size, 1, 2)
        for token, (first, second) in zip(one.token_ids.tolist(), one.experts[:, 0].tolist(), strict=True):
            known = token > 0 and (token - 1) % 3 > 0
            assert (first, second) == ((token, token + 1000) if known else (65535, 65535))


def test_a_rank_holds_one_early_and_one_late_chunk() -> None:
    """Two sequences of 8 on two ranks: chunks 0 and 3 of each on rank 0, chunks 1 and 2 on rank 1."""
    one, other = (pack_for_rank(batch_of([8, 8]), context_rank=rank, context_size=2) for rank in range(2))
    assert one.token_ids.tolist() == [1, 2, 7, 8, 9, 10, 15, 16]
    assert other.token_ids.tolist() == [3, 4, 5, 6, 11, 12, 13, 14]


def test_no_more_is_padded_than_ranks_need() -> None:
    assert pack_for_rank(batch_of([5, 3])).token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pack_for_rank(batch_of([5, 2]), multiple=2).boundaries.tolist() == [0, 5, 8]


def test_nothing_is_as_long_as_it_must_be_and_trains_on_nothing() -> None:
    empty = nothing(4, context_size=2)
    assert (empty.token_ids.size, empty.boundaries.tolist(), empty.rows.size) == (4, [0, 8], 0)
