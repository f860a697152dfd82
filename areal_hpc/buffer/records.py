"""The ring's format on disk: records, and how a group of trajectories becomes one.

    record = header (40 bytes, little-endian) | meta (msgpack map) | body (raw little-endian columns) | zeros to 8 bytes

    offset  size  field
         0     4  magic "ARHR"
         4     1  format version, 1
         5     1  type: 1 DATA, 2 COMMIT, 3 SEAL, 4 RESERVE, 5 DROP
         6     2  zero
         8     4  length of meta
        12     4  owner: CRC-32C of the chain's name, so that bytes of another file are never taken for ours
        16     8  length of body
        24     8  sequence number in the chain, one more for each record but a SEAL, whose number the next one has too
        32     4  CRC-32C of body
        36     4  CRC-32C of header (this field as zero) and meta

Lengths are checked against limits before anything is allocated. A body is columns: those of ``COLUMNS``, or what
``meta["columns"]`` lists as (name, dtype, count), so that one can be added without a new format: ``experts`` is there
only where engines told which experts computed the tokens, and ``meta["experts"]`` is its [layers, experts of a token].
Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import google_crc32c
import msgpack
import numpy as np
from numpy.typing import NDArray

from areal_hpc.errors import CorruptRecord, DataError
from areal_hpc.routing import ExpertRecord, joined
from areal_hpc.types import NOT_SAMPLED, Baseline, GroupRef, StopReason, Trajectory, TrajectoryGroup, WeightVersion

HEADER = struct.Struct("<4sBBHIIQQII")
HEADER_BYTES = HEADER.size
HEAD_CRC_AT = HEADER_BYTES - 4
NO_CRC = bytes(4)
MAGIC = b"ARHR"
FORMAT = 1
MAX_META = 1 << 24
MAX_BODY = 1 << 30
COLUMNS = {"token_ids": "<i4", "logprobs": "<f4", "versions": "<i4", "loss_mask": "|b1"}
"""Columns of a group: one value for each token, the trajectories one after the other."""
DTYPES = {name: np.dtype(text) for name, text in COLUMNS.items()}
TOKEN_BYTES = sum(dtype.itemsize for dtype in DTYPES.values())
EXPERTS = "experts"
EXPERT_TYPES = ("|u1", "<u2")


class RecordType(IntEnum):
    DATA = 1
    """A sealed group."""
    COMMIT = 2
    """Everything before it is on disk."""
    SEAL = 3
    """The segment ends; names the next one, or none where the chain ends."""
    RESERVE = 4
    """A ticket was reserved."""
    DROP = 5
    """A ticket was given back."""


TYPES = {int(kind): kind for kind in RecordType}


class Header(NamedTuple):
    """A tuple, since a tail makes one of each record and a frozen dataclass takes three times as long."""

    type: RecordType
    meta_bytes: int
    owner: int
    body_bytes: int
    seq: int
    body_crc: int
    head_crc: int

    @property
    def head_bytes(self) -> int:
        return HEADER_BYTES + self.meta_bytes

    @property
    def record_bytes(self) -> int:
        length = self.head_bytes + self.body_bytes
        return length + -length % 8


def checksum(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720)."""
    return int(google_crc32c.value(data))


def frame(type_: RecordType, seq: int, owner: int, meta: Mapping[str, Any], body: bytes = b"") -> bytes:
    """One record."""
    return b"".join(parts(type_, seq, owner, meta, body))


def parts(
    type_: RecordType, seq: int, owner: int, meta: Mapping[str, Any], body: bytes = b""
) -> tuple[bytes, bytes, bytes, bytes]:
    """Header, meta, body and padding of one record, so that a batch of large bodies is copied once."""
    packed: bytes = msgpack.packb(meta)
    assert len(packed) <= MAX_META and len(body) <= MAX_BODY, (len(packed), len(body))
    fields = (MAGIC, FORMAT, type_, 0, len(packed), owner, len(body), seq, checksum(body))
    head_crc = checksum(HEADER.pack(*fields, 0) + packed)
    return HEADER.pack(*fields, head_crc), packed, body, bytes(-(HEADER_BYTES + len(packed) + len(body)) % 8)


def parse_header(data: bytes, owner: int, at: int = 0) -> Header | None:
    """The header at ``at`` in ``data``, or None where there is none: zeros, a torn write, somebody else's bytes."""
    if len(data) - at < HEADER_BYTES:
        return None
    magic, version, type_, zero, meta_bytes, whose, body_bytes, seq, body_crc, head_crc = HEADER.unpack_from(data, at)
    kind = TYPES.get(type_)
    if kind is None or (magic, version, zero, whose) != (MAGIC, FORMAT, 0, owner):
        return None
    if meta_bytes > MAX_META or body_bytes > MAX_BODY:
        return None
    return Header(kind, meta_bytes, whose, body_bytes, seq, body_crc, head_crc)


def parse_meta(header: Header, data: bytes, at: int = 0) -> dict[str, Any] | None:
    """The metadata behind ``header``, which is at ``at`` in ``data``, or None where the checksum says that either is
    damaged, or something is missing."""
    packed = data[at + HEADER_BYTES : at + header.head_bytes]
    if len(packed) != header.meta_bytes:
        return None
    if checksum(data[at : at + HEAD_CRC_AT] + NO_CRC + packed) != header.head_crc:
        return None
    meta: dict[str, Any] = msgpack.unpackb(packed, use_list=False)
    return meta


def encode_group(group: TrajectoryGroup) -> tuple[dict[str, Any], bytes]:
    """Metadata and body of a DATA record: what a plan needs to know in the first, the tokens in the second.

    Where any trajectory has a record of its experts, one without gets a record of nothing.

    Raises:
        DataError: the group is larger than a record may be.
    """
    trajectories = group.trajectories
    lengths = [t.token_ids.size for t in trajectories]
    experts = joined([t.experts for t in trajectories], lengths)
    num_bytes = sum(lengths) * TOKEN_BYTES + (0 if experts is None else experts.nbytes)
    if num_bytes > MAX_BODY:
        raise DataError(
            f"the group of prompt {group.prompt_id} has {num_bytes} bytes, more than the {MAX_BODY} that one record "
            "holds; lower rollout.group_size or model.max_tokens"
        )
    arrays = [np.ascontiguousarray(getattr(t, name), dtype) for name, dtype in DTYPES.items() for t in trajectories]
    if experts is not None:
        arrays.append(np.ascontiguousarray(experts, experts.dtype.newbyteorder("<")))
    meta = {
        "position": group.position,
        "prompt": group.prompt_id,
        "rewards": [float(t.reward) for t in trajectories],
        "lengths": lengths,
        "generated": [t.num_generated for t in trajectories],
        "stops": [t.stop.value for t in trajectories],
        "episodes": [t.episode for t in trajectories],
        "newest": max([int(t.versions.max(initial=NOT_SAMPLED)) for t in trajectories], default=NOT_SAMPLED),
        **({} if experts is None else _table_with(arrays[-1], sum(lengths))),
        **({} if group.baseline is None else {"baseline": [float(number) for number in group.baseline]}),
    }
    return meta, b"".join([array.data for array in arrays])


def _table_with(experts: NDArray[Any], num_tokens: int) -> dict[str, Any]:
    plain = [(name, text, num_tokens) for name, text in COLUMNS.items()]
    columns = [*plain, (EXPERTS, experts.dtype.str, experts.size)]
    return {"columns": columns, EXPERTS: list(experts.shape[1:])}


class Body(NamedTuple):
    """How a group's tokens lie in a segment, told by the verified head of their record: the handle of a reference.

    Whoever has it reads and checks the tokens without looking at the head again.
    """

    offset: int
    num_bytes: int
    checksum: int  # CRC-32C
    stops: Sequence[str]
    columns: Sequence[tuple[str, str, int]] | None  # name, dtype, count; None: those of COLUMNS
    experts: Sequence[int] | None  # layers, experts of a token

    @classmethod
    def of(cls, header: Header, meta: Mapping[str, Any], at: int) -> Body:
        """The body of the DATA record whose header is at ``at`` in its segment."""
        offset = at + header.head_bytes
        columns, experts = meta.get("columns"), meta.get(EXPERTS)
        return cls(offset, header.body_bytes, header.body_crc, meta["stops"], columns, experts)


def group_ref(
    chain: str, meta: Mapping[str, Any], *, segment: int = 0, offset: int = 0, seq: int = 0, handle: Body | None = None
) -> GroupRef:
    """The reference to a DATA record, from its metadata (``encode_group``'s, with ``ticket`` and ``version``)."""
    return GroupRef(
        chain=chain,
        segment=segment,
        offset=offset,
        seq=seq,
        ticket=meta["ticket"],
        position=meta["position"],
        prompt_id=meta["prompt"],
        version=WeightVersion(*meta["version"]),
        rewards=tuple(meta["rewards"]),
        lengths=tuple(meta["lengths"]),
        generated=tuple(meta["generated"]),
        truncated=tuple([stop == StopReason.LENGTH for stop in meta["stops"]]),
        episodes=tuple(meta["episodes"]),
        baseline=Baseline(*meta["baseline"]) if "baseline" in meta else None,
        handle=() if handle is None else handle,
    )


def newest_weights(epoch: int, meta: Mapping[str, Any]) -> WeightVersion:
    """The newest weights behind a DATA record of an attempt: engines may have loaded newer ones than its ticket's."""
    return WeightVersion(epoch, max(meta["newest"], WeightVersion(*meta["version"]).step))


def decode_group(ref: GroupRef, body: bytes) -> TrajectoryGroup:
    """The group that ``encode_group`` was given; its arrays are views of ``body``, which nobody writes to.

    Args:
        ref: the reference to its record, with its handle.

    Raises:
        CorruptRecord: the metadata does not describe this body (written by something else; the checksums were right).
    """
    told = Body(*ref.handle)
    ends = list(accumulate(ref.lengths, initial=0))
    columns = _columns(_plain(ends[-1]) if told.columns is None else _listed(told.columns, ref), body)
    experts = _experts(ref.position, told.experts, columns.get(EXPERTS), ends[-1])
    trajectories = [
        Trajectory(
            token_ids=columns["token_ids"][start:end],
            loss_mask=columns["loss_mask"][start:end],
            logprobs=columns["logprobs"][start:end],
            versions=columns["versions"][start:end],
            reward=reward,
            stop=StopReason(stop),
            episode=episode,
            experts=None if experts is None else experts[start:end],
        )
        for (start, end), reward, stop, episode in zip(
            pairwise(ends), ref.rewards, told.stops, ref.episodes, strict=True
        )
    ]
    return TrajectoryGroup(
        position=ref.position, prompt_id=ref.prompt_id, trajectories=tuple(trajectories), baseline=ref.baseline
    )


def _experts(
    position: int, shape: Sequence[int] | None, column: NDArray[Any] | None, num_tokens: int
) -> ExpertRecord | None:
    if column is None:
        return None
    whole = (num_tokens, *(shape or ()))
    if column.dtype.str not in EXPERT_TYPES or len(whole) != 3 or column.size != math.prod(whole):
        raise CorruptRecord(f"the experts of position {position} are not those of {num_tokens} tokens")
    return column.reshape(whole)


Column = tuple[str, np.dtype[Any], int]
"""name, dtype, count"""


def _plain(num_tokens: int) -> list[Column]:
    """The columns of a body of which nothing else is said."""
    return [(name, dtype, num_tokens) for name, dtype in DTYPES.items()]


def _listed(table: Sequence[tuple[str, str, int]], ref: GroupRef) -> list[Column]:
    columns = [(name, _dtype(text), count) for name, text, count in table]
    if not set(columns).issuperset(_plain(ref.num_tokens)):
        raise CorruptRecord(f"columns of position {ref.position} do not hold {ref.num_tokens} tokens: {table}")
    return columns


def _columns(table: Sequence[Column], body: bytes) -> dict[str, NDArray[Any]]:
    columns, offset = {}, 0
    for name, dtype, count in table:
        end = offset + dtype.itemsize * count
        if end > len(body):
            raise CorruptRecord(f"column {name} ({dtype.str} x {count}) does not fit a body of {len(body)} bytes")
        columns[name] = np.frombuffer(body, dtype, count, offset)
        offset = end
    return columns


_dtype = cache(np.dtype)
