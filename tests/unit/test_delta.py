"""Deltas of tensors: bits in, the same bits out, or an error."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.buckets import plan_buckets, unpack
from areal_hpc.delta import CHUNK, Delta, apply, bits, bridged, checksum, difference
from areal_hpc.errors import WeightUpdateError

DTYPES = (torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool)
SPECIAL = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, 1e-40, 3.4e38]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one dtype and shape, with random bits or special values, that differ in few or all elements."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    numel = math.prod(shape)

    def some() -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        if dtype is torch.bool:
            return torch.from_numpy(rng.integers(0, 2, numel).astype(np.bool_))
        if dtype.is_floating_point and draw(st.booleans()):
            return torch.from_numpy(rng.choice(SPECIAL, numel)).to(dtype)
        return torch.from_numpy(rng.integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)).view(dtype)

    held, now = some().view(shape), some().view(shape)
    stays = torch.from_numpy(rng.random(numel) >= draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))).view(shape)
    return held, torch.where(stays, held, now) if dtype is not torch.float8_e4m3fn else now


@given(pair=pairs())
@settings(max_examples=300, deadline=None)
def test_any_pair_of_tensors_round_trips_bit_for_bit(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    held, now = pair
    delta = difference(held, now)
    num_changed = sum(a != b for a, b in zip(bits(held).tolist(), bits(now).tolist(), strict=True))
    assert num_changed <= len(delta.values) <= num_changed + held.numel() // 256
    [bucket] = plan_buckets([("w", delta), ("whole", now)], 1 << 30)
    arrived = dict(unpack(bucket.buffer, bucket.specs))
    apply(held, arrived["w"])
    assert raw(held) == raw(now) == raw(arrived["whole"])


def test_bits_count_and_not_numbers() -> None:
    held = torch.tensor([math.nan, 0.0, 1.0, 2.0])
    assert len(difference(held, held.clone()).values) == 0  # NaN is no change
    now = held.clone()
    bits(now)[0] += 1  # another NaN
    now[1] = -0.0
    delta = difference(held, now)
    assert delta.gaps.tolist() == [0, 0]
    apply(held, delta)
    assert raw(held) == raw(now)


@given(steps=st.lists(st.sampled_from([1, 2, 255, 256, 257, 512, 513, 5000]), max_size=20))
def test_no_two_positions_are_farther_apart_than_a_gap_can_say(steps: list[int]) -> None:
    positions = np.cumsum(np.array(steps, dtype=np.int64)) - 1
    filled = bridged(positions)
    distances = np.diff(filled, prepend=-1)
    assert set(positions) <= set(filled)
    assert ((distances >= 1) & (distances <= 256)).all()
    assert len(filled) == sum(-(-step // 256) for step in steps)


def test_a_tensor_longer_than_a_chunk() -> None:
    held = torch.zeros(2 * CHUNK + 5, dtype=torch.bfloat16)
    now = held.clone()
    places = [0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 4]
    now[places] = 1.0
    delta = difference(held, now)
    apply(held, delta)
    assert raw(held) == raw(now)
    assert len(delta.values) == len(places) + 2 * CHUNK // 256 - 2  # the neighbours of chunks' borders need no bridge


@given(pair=pairs(), other=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_against_other_weights_it_makes_the_same_or_an_error(
    pair: tuple[torch.Tensor, torch.Tensor], other: int
) -> None:
    """A missed update is never silently wrong."""
    held, now = pair
    delta = difference(held, now)
    rng = np.random.default_rng(other)
    flipped = bits(held).numpy().view(np.uint8)
    if flipped.size and held.dtype is not torch.bool:
        flipped[rng.integers(flipped.size, size=3)] ^= rng.integers(0, 256, 3, dtype=np.uint8)
    try:
        apply(held, delta)
    except WeightUpdateError as error:
        assert "was made against other weights" in str(error)
        assert raw(held) != raw(now)
    else:
        assert raw(held) == raw(now)


def test_D3_every_byte_changed_on_the_way_is_found() -> None:
    held = torch.arange(600, dtype=torch.bfloat16)
    now = held.clone()
    now[[3, 299, 599]] = torch.tensor([-1.0, -2.0, -3.0]).bfloat16()
    [bucket] = plan_buckets([("w", difference(held, now))], 1 << 10)
    assert bucket.buffer.numel() == 5 * 3  # the three, and two bridges, with a byte each
    for byte in range(bucket.buffer.numel()):
        bad = bucket.buffer.clone()
        bad[byte] ^= 0x10
        [(_, delta)] = unpack(bad, bucket.specs)
        with pytest.raises(WeightUpdateError, match=r"CRC-32C|reaches to element"):
            apply(held.clone(), delta)


def test_what_does_not_fit_is_refused_before_anything_is_replaced() -> None:
    held = torch.zeros(4)
    delta = difference(held, torch.ones(4))
    far = replace(delta, gaps=torch.tensor([0, 0, 0, 1], dtype=torch.uint8))
    with pytest.raises(WeightUpdateError, match="reaches to element 4 of 4"):
        apply(held, far)
    for wrong in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(WeightUpdateError, match="came for"):
            apply(wrong, delta)
    assert not held.any()


def test_a_checksum_is_that_of_the_whole_tensor_afterwards() -> None:
    now = torch.arange(12.0).bfloat16().view(3, 4)
    delta: Delta = difference(torch.zeros_like(now), now)
    assert delta.checksum == checksum(now)
    assert (delta.shape, delta.nbytes) == (now.shape, 11 * 3)
