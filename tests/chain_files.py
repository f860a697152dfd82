"""Chains with a few records, for tests of who writes and who reads them."""

from __future__ import annotations

import os
from pathlib import Path

from areal_hpc.buffer.chain import ChainName, ChainWriter
from areal_hpc.buffer.records import HEADER, RecordType, parse_header
from areal_hpc.buffer.scan import ChainReader

LARGE = 1 << 30
"""Bytes of a segment that nothing in a test fills."""


def new_chain(chains: Path, segment_bytes: int = LARGE) -> ChainWriter:
    return ChainWriter(chains, ChainName.new(0, 1, 0), segment_bytes)


def put(chain: ChainWriter, *tickets: int, size: int = 10) -> None:
    """One commit of a record for each ticket."""
    for ticket in tickets:
        chain.append(RecordType.DATA, ticket, {}, bytes([ticket % 256]) * size)
    chain.commit()


def tickets(reader: ChainReader, *, last: bool = False) -> list[int]:
    return [record.meta["ticket"] for record in reader.poll(last=last)]


def segments(chain: ChainWriter) -> list[str]:
    return sorted(os.listdir(chain.directory))


def kinds_in(data: bytes) -> list[str]:
    """The types of whole records that follow each other."""
    found = []
    while data:
        _, _, kind, _, meta_bytes, owner, *_ = HEADER.unpack_from(data)
        header = parse_header(data, owner)
        assert header is not None and header.meta_bytes == meta_bytes
        found.append(RecordType(kind).name)
        data = data[header.record_bytes :]
    return found
