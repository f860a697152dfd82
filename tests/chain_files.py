"""Chains with a few records, for tests of who writes and who reads them."""

from __future__ import annotations

import os
from pathlib import Path

from areal_hpc.buffer.chain import ChainName, ChainWriter
from areal_hpc.buffer.records import RecordType
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
