"""Records of experts: what stands for none, and how records are put together."""

from __future__ import annotations

import numpy as np
import pytest

from areal_hpc.routing import Routing, check_record, joined, no_expert, overlaid, replayed


@pytest.mark.parametrize(
    ("num_experts", "dtype", "none"), [(8, np.uint8, 255), (255, np.uint8, 255), (256, np.uint16, 65535)]
)
def test_no_expert_is_a_number_that_no_expert_has(num_experts: int, dtype: type, none: int) -> None:
    nothing = Routing(3, 2, num_experts).unrecorded(4)
    assert (nothing.dtype, nothing.shape) == (dtype, (4, 3, 2))
    assert set(nothing.ravel().tolist()) == {none} == {no_expert(nothing.dtype)}
    assert num_experts - 1 < none


def test_parts_are_one_after_the_other_and_nothing_is_known_of_the_rest() -> None:
    parts = [np.full((2, 1, 1), 7, np.uint8), np.full((1, 1, 1), 8, np.uint8)]
    assert Routing(1, 1, 9).whole(parts, 5).ravel().tolist() == [7, 7, 8, 255, 255]
    assert Routing(1, 1, 9).whole([], 2).ravel().tolist() == [255, 255]


def test_sequences_without_a_record_have_one_of_nothing_beside_others() -> None:
    record = np.array([[[1, 2]], [[3, 4]]], dtype=np.uint16)
    assert joined([None, None], [2, 3]) is None
    found = joined([None, record, None], [1, 2, 0])
    assert found is not None and found.dtype == np.uint16
    assert found.tolist() == [[[65535, 65535]], *record.tolist()]


def test_the_later_of_two_stretches_counts_where_they_overlap() -> None:
    first, second = np.array([1, 2, 255], np.uint8), np.array([3, 4, 255], np.uint8)
    found = overlaid([(3, first[:, None, None]), (6, second[:, None, None])], 7)
    assert found is not None and found.ravel().tolist() == [1, 2, 255, 3, 4, 255, 255]
    found = overlaid([(3, first[:, None, None]), (5, second[:, None, None])], 5)
    assert found is not None and found.ravel().tolist() == [1, 2, 3, 4, 255]
    assert overlaid([], 4) is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_router_reads_minus_one_where_it_is_to_choose(dtype: type) -> None:
    record = np.array([[[0, 254]], [[no_expert(dtype)] * 2]], dtype=dtype)
    assert replayed(record).tolist() == [[[0, 254]], [[-1, -1]]]
    assert replayed(record).dtype == np.int32


@pytest.mark.parametrize(
    "record",
    [np.zeros((3, 1, 1), np.uint8), np.zeros((4, 1), np.uint8), np.zeros((4, 1, 1), np.int32)],
    ids=["other tokens", "no layers", "signed"],
)
def test_what_is_no_record_of_the_tokens_is_refused(record: np.ndarray) -> None:
    check_record(None, 4)
    check_record(np.zeros((4, 1, 1), np.uint16), 4)
    with pytest.raises(ValueError, match="a record of experts of 4 tokens cannot be"):
        check_record(record, 4)
