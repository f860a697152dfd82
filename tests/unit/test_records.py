"""The format on disk: what comes back is what went in, and damaged bytes never come back as a record."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as numpy_st

from areal_hpc.buffer import records
from areal_hpc.buffer.records import (
    COLUMNS,
    HEADER_BYTES,
    Body,
    RecordType,
    checksum,
    decode_group,
    encode_group,
    frame,
    group_ref,
    parse_header,
    parse_meta,
)
from areal_hpc.errors import CorruptRecord, DataError
from areal_hpc.types import Baseline, GroupRef, StopReason, Trajectory, TrajectoryGroup

OWNER = 7
TABLE = [[name, dtype, 0] for name, dtype in COLUMNS.items()]


def trajectory(num_tokens: int) -> Trajectory:
    return Trajectory(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.zeros(num_tokens, dtype=np.int32),
        reward=0.0,
        stop=StopReason.STOP,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    size = draw(st.integers(0, 20))
    numbers = st.integers(-(2**31), 2**31 - 1)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return Trajectory(
        token_ids=np.array(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=np.int32),
        loss_mask=np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=np.bool_),
        logprobs=np.array(draw(st.lists(finite, min_size=size, max_size=size)), dtype=np.float32),
        versions=np.array(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=np.int32),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        stop=draw(st.sampled_from(StopReason)),
        episode=draw(st.integers(0, 9)),
    )


groups = st.builds(
    lambda position, prompt_id, members, baseline: TrajectoryGroup(
        position=position, prompt_id=prompt_id, trajectories=tuple(members), baseline=baseline
    ),
    st.integers(0, 2**62),
    st.text(max_size=20),
    st.lists(trajectories(), max_size=4),
    st.none() | st.builds(Baseline, st.floats(-9, 9), st.floats(0, 9)),
)


@st.composite
def groups_of_mixtures(draw: st.DrawFn) -> TrajectoryGroup:
    """Groups in which some trajectories, or all, come with the experts that computed them."""
    group, shape = draw(groups), draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    told = [
        replace(t, experts=draw(numpy_st.arrays(dtype, (t.token_ids.size, *shape)))) if draw(st.booleans()) else t
        for t in group.trajectories
    ]
    return replace(group, trajectories=tuple(told))


def read_back(stored: bytes, owner: int = OWNER) -> tuple[dict[str, object], bytes] | None:
    """Metadata and body of the record at the start of ``stored``, if all of it verifies."""
    header = parse_header(stored, owner)
    if header is None:
        return None
    meta = parse_meta(header, stored)
    body = stored[header.head_bytes : header.head_bytes + header.body_bytes]
    if meta is None or checksum(body) != header.body_crc or len(body) != header.body_bytes:
        return None
    return meta, body


TICKET = {"ticket": 8, "version": (1, 0)}


def reference(meta: Mapping[str, Any], body: bytes = b"") -> GroupRef:
    """What a plan has of a DATA record with this metadata."""
    stored = frame(RecordType.DATA, 0, OWNER, {**meta, **TICKET}, body)
    header = parse_header(stored, OWNER)
    assert header is not None
    found = parse_meta(header, stored)
    assert found is not None
    return group_ref("chain", found, handle=Body.of(header, found, 0))


def through_a_record(group: TrajectoryGroup) -> TrajectoryGroup:
    """Written, read back by what the reference says of its body, which went through JSON as between ranks."""
    meta, body = encode_group(group)
    stored = frame(RecordType.DATA, 0, OWNER, {**meta, **TICKET}, body)
    ref = GroupRef.from_record(json.loads(json.dumps(reference(meta, body).record())))
    told = Body(*ref.handle)
    found = stored[told.offset :][: told.num_bytes]
    assert found == body and checksum(found) == told.checksum
    return decode_group(ref, found)


def test_checksum_is_crc32c() -> None:
    """The check value of CRC-32C and the all-zeros vector of RFC 3720, B.4."""
    assert checksum(b"123456789") == 0xE3069283
    assert checksum(bytes(32)) == 0x8A9136AA


def test_the_layout_on_disk_is_what_the_page_says() -> None:
    """Field by field at the offsets of the table, so that a change of the format cannot go unnoticed."""
    stored = frame(RecordType.DATA, 5, OWNER, {"ticket": 1}, b"abc")
    meta = msgpack.packb({"ticket": 1})
    assert HEADER_BYTES == 40 and len(stored) % 8 == 0
    assert stored[:8] == b"ARHR\x01\x01\x00\x00"
    assert struct.unpack_from("<IIQQI", stored, 8) == (len(meta), OWNER, 3, 5, checksum(b"abc"))
    assert struct.unpack_from("<I", stored, 36) == (checksum(stored[:36] + bytes(4) + meta),)
    assert stored[40 : 40 + len(meta)] == meta
    assert stored[40 + len(meta) :].rstrip(b"\0") == b"abc"


@given(groups)
def test_a_group_comes_back_as_it_went_in(group: TrajectoryGroup) -> None:
    back = through_a_record(group)
    assert (back.position, back.prompt_id, len(back.trajectories)) == (
        group.position,
        group.prompt_id,
        len(group.trajectories),
    )
    assert back.baseline == group.baseline
    for ours, theirs in zip(back.trajectories, group.trajectories, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "versions"):
            assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes()
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
            assert not getattr(ours, name).flags.writeable
        assert (ours.reward, ours.stop, ours.episode) == (theirs.reward, theirs.stop, theirs.episode)


@given(st.data())
def test_a_flipped_bit_is_never_a_record(data: st.DataObject) -> None:
    body = data.draw(st.binary(max_size=64))
    stored = frame(RecordType.DATA, 3, OWNER, {"ticket": 1, "position": 2}, body)
    used = len(stored.rstrip(b"\0")) if body.rstrip(b"\0") == body and body else len(stored) - 8
    bit = data.draw(st.integers(0, 8 * used - 1))
    damaged = bytearray(stored)
    damaged[bit // 8] ^= 1 << bit % 8
    assert read_back(bytes(damaged)) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_without_an_error(data: bytes) -> None:
    assert read_back(data) is None
    assert read_back(b"ARHR\x01\x01\x00\x00" + data) is None


@given(st.integers(0, 60))
def test_a_torn_record_is_not_one(length: int) -> None:
    stored = frame(RecordType.DATA, 0, OWNER, {"ticket": 0}, b"0123456789abcdef")
    assert read_back(stored[: min(length, len(stored) - 1)]) is None


def test_bytes_of_another_chain_are_not_a_record() -> None:
    stored = frame(RecordType.DATA, 0, OWNER, {}, b"")
    assert read_back(stored, OWNER) is not None
    assert read_back(stored, OWNER + 1) is None


@pytest.mark.parametrize(("meta_bytes", "body_bytes"), [(records.MAX_META + 1, 0), (0, records.MAX_BODY + 1)])
def test_a_length_above_the_limit_is_refused_before_anything_is_read(meta_bytes: int, body_bytes: int) -> None:
    head = records.HEADER.pack(b"ARHR", 1, 1, 0, meta_bytes, OWNER, body_bytes, 0, 0, 0)
    assert parse_header(head, OWNER) is None


def test_a_group_above_the_limit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_BODY", 25)
    one = Trajectory(
        token_ids=np.zeros(2, np.int32),
        loss_mask=np.zeros(2, np.bool_),
        logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
        reward=0.0,
        stop=StopReason.STOP,
    )
    with pytest.raises(DataError, match=r"prompt p9 has 26 bytes.*rollout\.group_size"):
        encode_group(TrajectoryGroup(position=0, prompt_id="p9", trajectories=(one,)))


def test_metadata_that_does_not_describe_the_body_is_corrupt() -> None:
    meta, body = encode_group(TrajectoryGroup(position=4, prompt_id="", trajectories=()))
    with pytest.raises(CorruptRecord, match="token_ids"):
        decode_group(reference({**meta, "lengths": [3]}), body)
    with pytest.raises(CorruptRecord, match="position 4 do not hold 0 tokens"):
        decode_group(reference({**meta, "columns": [["token_ids", "<i4", 0]]}), body)
    with pytest.raises(CorruptRecord, match="position 4 do not hold 3 tokens"):
        decode_group(reference({**meta, "lengths": [3], "columns": TABLE}), body)
    with pytest.raises(CorruptRecord, match="token_ids"):
        decode_group(reference({**meta, "columns": [["token_ids", "<i4", 1]]}), body)
    with pytest.raises(CorruptRecord, match="token_ids"):
        decode_group(reference({**meta, "columns": [["token_ids", "|O", 0]]}), body)


@given(groups_of_mixtures())
def test_experts_come_back_and_who_had_none_beside_others_that_had_has_a_record_of_nothing(
    group: TrajectoryGroup,
) -> None:
    body = encode_group(group)[1]
    told = [t.experts for t in group.trajectories if t.experts is not None]
    assert len(body) == group.num_tokens * (
        4 + 4 + 4 + 1 + (told[0].itemsize * int(np.prod(told[0].shape[1:])) if told else 0)
    )
    found = through_a_record(group)
    for one, two in zip(found.trajectories, group.trajectories, strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
        if not told:
            assert one.experts is None
            continue
        assert one.experts is not None and one.experts.dtype == told[0].dtype
        nothing = np.full((two.token_ids.size, *told[0].shape[1:]), 2 ** (8 * told[0].itemsize) - 1)
        np.testing.assert_array_equal(one.experts, nothing if two.experts is None else two.experts)


@pytest.mark.parametrize(
    ("shape", "column"),
    [([3, 2], ["experts", "|u1", 6]), ([3], ["experts", "|u1", 3]), ([1, 2], ["experts", "<i4", 2])],
    ids=["another model's", "no shape", "no type of experts"],
)
def test_experts_of_something_else_are_corrupt(shape: list[int], column: list[object]) -> None:
    experts = np.zeros((2, 3, 2), np.uint8)
    group = TrajectoryGroup(position=4, prompt_id="x", trajectories=(replace(trajectory(2), experts=experts),))
    meta, body = encode_group(group)
    broken = {**meta, "experts": shape, "columns": [*meta["columns"][:-1], column]}
    with pytest.raises(CorruptRecord, match="the experts of position 4 are not those of 2 tokens"):
        decode_group(reference(broken), body)


def test_experts_count_in_the_size_that_a_record_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    group = TrajectoryGroup(position=4, prompt_id="x", trajectories=(trajectory(2),))
    monkeypatch.setattr(records, "MAX_BODY", 2 * 13)
    encode_group(group)
    told = replace(group.trajectories[0], experts=np.zeros((2, 3, 2), np.uint8))
    with pytest.raises(DataError, match="has 38 bytes, more than the 26"):
        encode_group(replace(group, trajectories=(told,)))


def test_an_unknown_column_is_passed_over() -> None:
    """A later version may store more for each token; this one still reads what it knows."""
    meta, body = encode_group(TrajectoryGroup(position=4, prompt_id="x", trajectories=()))
    more = {**meta, "columns": [*TABLE, ["entropies", "|u1", 2]]}
    assert decode_group(reference(more), body + b"\1\2").prompt_id == "x"
