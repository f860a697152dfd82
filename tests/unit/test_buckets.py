from __future__ import annotations

import zlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc import delta
from areal_hpc.buckets import Bucket, BucketMemory, dtype_named, fingerprint, plan_buckets, unpack
from areal_hpc.delta import checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.transfer import TensorSpec

DTYPES = (torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool)


def tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bytes (0 and 1, which every dtype takes, bool too) as a tensor."""
    data = np.random.default_rng(seed).integers(0, 2, size=int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data.size else torch.empty(shape, dtype=dtype)
    )


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def mark(weights: list[tuple[str, torch.Tensor]], limit: int = 20) -> int:
    return fingerprint(spec for bucket in plan_buckets(weights, limit) for spec in bucket.specs)


def test_C32_a_fingerprint_is_of_the_weights_and_not_of_the_buckets() -> None:
    weights = [(f"w{i}", torch.arange(float(i + 1))) for i in range(5)]
    assert {mark(weights, limit) for limit in (1, 8, 20, 1000)} == {mark(weights[::-1])}
    changed = [(name, tensor.clone()) for name, tensor in weights]
    changed[3][1][0] = -0.0
    swapped = [weights[0], ("w1", weights[2][1]), ("w2", weights[1][1]), *weights[3:]]
    renamed = [("other", weights[0][1]), *weights[1:]]
    assert len({mark(one) for one in (weights, changed, swapped, renamed, weights[1:])}) == 5


weights_lists = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple)), max_size=12
).map(lambda rows: [(f"w{i}", tensor(i, dtype, shape)) for i, (dtype, shape) in enumerate(rows)])


@given(weights=weights_lists, limit=st.integers(1, 400))
@settings(max_examples=200)
def test_every_tensor_arrives_bit_for_bit_once_and_within_the_limit(
    weights: list[tuple[str, torch.Tensor]], limit: int
) -> None:
    buckets = list(plan_buckets(weights, limit))
    arrived = [item for bucket in buckets for item in unpack(bucket.buffer, bucket.specs)]
    assert {name: raw(value) for name, value in arrived} == {name: raw(value) for name, value in weights}
    assert len(arrived) == len(weights)
    for bucket in buckets:
        assert bucket.buffer.numel() <= limit or sum(bool(np.prod(s.shape)) for s in bucket.specs) == 1


@given(weights=weights_lists)
@settings(max_examples=100)
def test_a_bucket_is_laid_out_as_sglang_takes_it_apart(weights: list[tuple[str, torch.Tensor]]) -> None:
    """Back to back in the order of the names, each piece viewed as its dtype: what the receiver does."""
    sent = dict(weights)
    for bucket in plan_buckets(weights, 1 << 20):
        sizes = [sent[spec.name].nbytes for spec in bucket.specs]
        for spec, part in zip(bucket.specs, bucket.buffer.split(sizes), strict=True):
            value = part.view(getattr(torch, spec.dtype)).view(torch.Size(spec.shape))
            assert raw(value) == raw(sent[spec.name])


def test_a_tensor_larger_than_the_limit_makes_a_bucket_of_its_own() -> None:
    weights = [("a", torch.zeros(2)), ("big", torch.zeros(100)), ("b", torch.zeros(2)), ("c", torch.zeros(2))]
    assert [[s.name for s in bucket.specs] for bucket in plan_buckets(weights, 16)] == [["a"], ["big"], ["b", "c"]]


def test_D5_buckets_without_bytes_and_updates_without_tensors_are_legal() -> None:
    assert list(plan_buckets([], 100)) == []
    assert unpack(torch.empty(0, dtype=torch.uint8), ()) == []
    [bucket] = plan_buckets([("empty", torch.empty(0, 7, dtype=torch.bfloat16))], 100)
    [(name, value)] = unpack(bucket.buffer, bucket.specs)
    assert (name, value.shape, value.dtype) == ("empty", (0, 7), torch.bfloat16)


def test_D8_a_tensor_that_is_not_contiguous_travels_by_value() -> None:
    matrix = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    strided = {"t": matrix.t(), "slice": matrix[:, 1:3], "broadcast": torch.ones(1).expand(5)}
    [bucket] = plan_buckets(strided.items(), 1 << 10)
    for name, value in unpack(bucket.buffer, bucket.specs):
        assert torch.equal(value, strided[name])


def test_a_bucket_is_a_copy() -> None:
    weight = torch.ones(3)
    [bucket] = plan_buckets([("w", weight)], 100)
    weight.zero_()
    assert torch.equal(unpack(bucket.buffer, bucket.specs)[0][1], torch.ones(3))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), reuse=st.integers(0, 4))
def test_a_buckets_memory_is_anothers_only_so_many_buckets_later(sizes: list[int], reuse: int) -> None:
    memory = BucketMemory(reuse=reuse)
    taken = [memory.take(size) for size in sizes]  # all are held, so fresh memory is nobody's
    assert [len(one) for one in taken] == sizes
    for place, one in enumerate(taken):
        nearest = taken[max(0, place - max(reuse - 1, 0)) : place] if reuse else taken[:place]
        assert one.data_ptr() not in {other.data_ptr() for other in nearest}


@pytest.mark.parametrize("device", [None, "cpu:0"], ids=["where tensors are", "a device by number"])
def test_memory_is_used_again_until_it_is_to_be_forgotten(device: str | None) -> None:
    memory = BucketMemory(device, reuse=2)
    first = [memory.take(size) for size in (10, 20, 15, 20)]
    assert [one.data_ptr() for one in first[2:]] != [one.data_ptr() for one in first[:2]], "10 are too few for 15"
    assert [memory.take(20).data_ptr() for _ in range(2)] == [one.data_ptr() for one in first[2:]], "of the largest"
    memory.forget()
    assert not {memory.take(20).data_ptr() for _ in range(2)} & {one.data_ptr() for one in first}


def one_bucket() -> Bucket:
    [bucket] = plan_buckets([("head", torch.arange(4.0)), ("tail", torch.arange(6.0).bfloat16())], 1 << 10)
    return bucket


@pytest.mark.parametrize(("byte", "name"), [(0, "head"), (15, "head"), (16, "tail"), (27, "tail")])
def test_D3_bytes_changed_on_the_way_are_found_and_the_tensor_named(byte: int, name: str) -> None:
    bucket = one_bucket()
    bucket.buffer[byte] ^= 1
    with pytest.raises(WeightUpdateError, match=f"'{name}'"):
        unpack(bucket.buffer, bucket.specs)


def test_D20_memory_that_was_never_written_is_not_taken_for_weights() -> None:
    bucket = one_bucket()
    with pytest.raises(WeightUpdateError, match="head"):
        unpack(torch.zeros_like(bucket.buffer), bucket.specs)


def test_a_buffer_of_another_length_is_refused() -> None:
    bucket = one_bucket()
    with pytest.raises(WeightUpdateError, match="27 bytes where its tensors need 28"):
        unpack(bucket.buffer[:-1], bucket.specs)


def test_a_name_may_come_once() -> None:
    with pytest.raises(WeightUpdateError, match="'w' comes twice"):
        list(plan_buckets([("w", torch.ones(1)), ("w", torch.ones(1))], 1))


def test_a_dtype_that_torch_lacks_is_refused() -> None:
    bucket = one_bucket()
    specs = [replace(bucket.specs[0], dtype="float4711"), bucket.specs[1]]
    with pytest.raises(WeightUpdateError, match="float4711"):
        unpack(bucket.buffer, specs)
    with pytest.raises(WeightUpdateError, match="'nn'"):
        dtype_named("nn")  # an attribute of torch, but no dtype


def test_the_checksum_is_crc32c_by_its_standard_check_value() -> None:
    data = np.frombuffer(b"123456789", dtype=np.uint8).copy()
    assert checksum(torch.from_numpy(data)) == 0xE3069283  # the check value of CRC-32C (Castagnoli)
    assert checksum(torch.from_numpy(data)) != zlib.crc32(data)


def test_a_checksum_lets_other_threads_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """google_crc32c keeps Python's lock for as long as one call lasts: a third of a second for 512 MiB."""
    lengths: list[int] = []

    def extend(so_far: int, data: Any) -> int:
        lengths.append(len(data))
        return int(google_crc32c.extend(so_far, data))

    monkeypatch.setattr(delta, "STRETCH", 4)
    monkeypatch.setattr(delta, "google_crc32c", SimpleNamespace(extend=extend))
    assert checksum(torch.from_numpy(np.frombuffer(b"123456789", dtype=np.uint8).copy())) == 0xE3069283
    assert lengths == [4, 4, 1]


def test_specs_are_plain_data() -> None:
    spec = one_bucket().specs[0]
    assert spec == TensorSpec(name="head", dtype="float32", shape=(4,), checksum=spec.checksum)
