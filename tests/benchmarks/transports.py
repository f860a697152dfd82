"""Ways to bring records from writers to readers, for ``ring.py``. Each is given the same bytes: one DATA record of the
ring's format for each group, with its checksums, which every reader verifies and decodes."""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc.buffer.chain import ChainName, ChainWriter, GroupCommit
from areal_hpc.buffer.records import COLUMNS, RecordType, checksum, encode_group, frame, parse_header, parse_meta
from areal_hpc.buffer.scan import ChainReader, GroupFetcher, intact
from areal_hpc.fs import fsync_directory, make_private_directory
from areal_hpc.run_dir import RunDir
from areal_hpc.types import StopReason, Trajectory, TrajectoryGroup

NUM_WRITERS, NUM_READERS, NUM_TOKENS, POLL_S = 4, 2, 4096, 0.01  # 13 bytes a token: 53 KB a group
STEP = 16
"""Groups that a reader wants at once, where a transport can give several."""
KEPT: deque[TrajectoryGroup] = deque(maxlen=STEP)
"""What a reader's process holds: its newest groups, as a trainer does, whatever brought them. Who lets each go before
the next comes reads all of them into the same memory."""


def a_group(position: int) -> TrajectoryGroup:
    one = Trajectory(
        token_ids=np.arange(position, position + NUM_TOKENS, dtype=np.int32),
        loss_mask=np.ones(NUM_TOKENS, np.bool_),
        logprobs=np.full(NUM_TOKENS, -1.0, np.float32),
        versions=np.zeros(NUM_TOKENS, np.int32),
        reward=1.0,
        stop=StopReason.STOP,
    )
    return TrajectoryGroup(position=position, prompt_id="", trajectories=(one,))


SOME = [a_group(position) for position in range(16)]


def groups(count: int) -> Iterator[TrajectoryGroup]:
    return (SOME[number % len(SOME)] for number in range(count))


def packed(group: TrajectoryGroup) -> bytes:
    meta, body = encode_group(group)
    return frame(RecordType.DATA, group.position, 0, meta, body)


def verified(record: bytes) -> None:
    header = parse_header(record, 0)
    assert header is not None
    meta, body = parse_meta(header, record), record[header.head_bytes : header.head_bytes + header.body_bytes]
    assert meta is not None and checksum(body) == header.body_crc
    KEPT.append(decoded(meta, body))


def decoded(meta: dict[str, Any], body: bytes) -> TrajectoryGroup:
    """A group of one trajectory, without the reference that the ring has of it: nobody plans with these."""
    arrays, offset = {}, 0
    for name, dtype in COLUMNS.items():
        arrays[name] = np.frombuffer(body, dtype, meta["lengths"][0], offset)
        offset += arrays[name].nbytes
    one = Trajectory(**arrays, reward=meta["rewards"][0], stop=StopReason(meta["stops"][0]))
    return TrajectoryGroup(position=meta["position"], prompt_id=meta["prompt"], trajectories=(one,))


@dataclass(frozen=True)
class Transport:
    """``write`` runs in a process for each slot, ``read`` in one for each reader; it ends when it has ``count`` groups
    of each of its slots."""

    directory: Path
    count: int

    @property
    def slots(self) -> range:
        return range(NUM_WRITERS)

    def write(self, slot: int) -> None:
        raise NotImplementedError

    def read(self, reader: int) -> None:
        raise NotImplementedError

    def connect(self) -> None:
        """In each process before the clock starts: imports, and a session where one is shared by all calls."""

    def mine(self, reader: int) -> list[int]:
        return list(self.slots)[reader::NUM_READERS]

    def close(self) -> None:
        """Once everybody is done."""


class Raw(Transport):
    """One sequential file a writer, one fsync at its end; readers begin when it is complete. Nothing can be seen, and
    a crash loses all, before that."""

    def write(self, slot: int) -> None:
        _write_raw(self.directory / f"{slot}.tmp", self.count)
        (self.directory / f"{slot}.tmp").rename(self.directory / str(slot))

    def read(self, reader: int) -> None:
        for slot in self.mine(reader):
            while str(slot) not in os.listdir(self.directory):
                time.sleep(POLL_S)
            _read_raw(self.directory / str(slot), self.count)


def _write_raw(path: Path, count: int) -> None:
    with path.open("wb") as file:
        for group in groups(count):
            record = packed(group)
            file.write(struct.pack("<I", len(record)))
            file.write(record)
        file.flush()
        os.fsync(file.fileno())


def _read_raw(path: Path, count: int) -> None:
    with path.open("rb") as file:
        for _ in range(count):
            verified(file.read(struct.unpack("<I", file.read(4))[0]))


class RawAlone(Transport):
    """The same by one process, which writes everything to one file and reads it back. It has one core, and waits for
    nobody."""

    @property
    def slots(self) -> range:
        return range(1)

    def write(self, slot: int) -> None:
        count = NUM_WRITERS * self.count
        _write_raw(self.directory / "raw", count)
        _read_raw(self.directory / "raw", count)

    def read(self, reader: int) -> None:
        pass


class Ring(Transport):
    """Our chains: committed each 4 MiB or 0.2 s, read while they are written, in batches. A writer waits while a batch
    is due behind the one that is written: what tickets do in a run."""

    def name(self, slot: int) -> ChainName:
        return ChainName(slot, 1, 0, "00000000")

    def write(self, slot: int) -> None:
        chain = ChainWriter(make_private_directory(self.directory / "ring" / "chains"), self.name(slot), 64 << 20)
        commits = GroupCommit(chain, commit_s=0.2, patience_s=60.0)
        for number, group in enumerate(groups(self.count)):
            meta, body = encode_group(group)
            while due(chain):
                time.sleep(0.002)
            chain.append(RecordType.DATA, number, {**meta, "version": [1, 0]}, body)
        commits.stop()
        chain.end()

    def read(self, reader: int) -> None:
        fetcher = GroupFetcher(RunDir(self.directory))
        chains = [ChainReader(self.directory / "ring" / "chains", self.name(slot)) for slot in self.mine(reader)]
        num_read = 0
        while not all(chain.ended for chain in chains):
            before = num_read
            for chain in chains:
                name = str(chain.name)
                refs = [found.ref(name) for found in chain.poll()]
                for start in range(0, len(refs), STEP):
                    KEPT.extend(intact(fetcher.read_all(refs[start : start + STEP])))
                num_read += len(refs)
            if num_read == before:
                time.sleep(POLL_S)
        assert num_read == self.count * len(chains)


def due(chain: ChainWriter) -> bool:
    with chain.wake:
        return chain.due_in(0.2) == 0.0


class FileEach(Transport):
    """A file for each group: written, synced, renamed, its directory synced; deleted when it has been read."""

    def write(self, slot: int) -> None:
        reader = make_private_directory(self.directory / str(slot % NUM_READERS))
        for number, group in enumerate(groups(self.count)):
            temporary = self.directory / f"{slot}.{number}"
            with temporary.open("wb") as file:
                file.write(packed(group))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(reader / temporary.name)
            fsync_directory(reader)

    def read(self, reader: int) -> None:
        directory = make_private_directory(self.directory / str(reader))
        left = self.count * len(self.mine(reader))
        while left:
            for name in os.listdir(directory):
                verified((directory / name).read_bytes())
                (directory / name).unlink()
                left -= 1
            time.sleep(POLL_S)


class ZeroMQ(Transport):
    """PUSH and PULL over a Unix socket; nothing is durable."""

    def connect(self) -> None:
        import zmq  # noqa: F401

    def write(self, slot: int) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.set_hwm(64)
            socket.connect(f"ipc://{self.directory}/{slot % NUM_READERS}")
            for group in groups(self.count):
                socket.send(packed(group))

    def read(self, reader: int) -> None:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.set_hwm(64)
            socket.bind(f"ipc://{self.directory}/{reader}")
            for _ in range(self.count * len(self.mine(reader))):
                verified(socket.recv())


@dataclass(frozen=True)
class Queues(Transport):
    """``multiprocessing.Queue``, one a reader; nothing is durable."""

    queues: tuple[Any, ...]

    def write(self, slot: int) -> None:
        for group in groups(self.count):
            self.queues[slot % NUM_READERS].put(packed(group))

    def read(self, reader: int) -> None:
        for _ in range(self.count * len(self.mine(reader))):
            verified(self.queues[reader].get())


class Redis(Transport):
    """Streams of a server on a Unix socket that appends to a file and syncs it each second."""

    def connect(self) -> None:
        self._client().ping()

    def write(self, slot: int) -> None:
        client = self._client()
        for group in groups(self.count):
            client.xadd(str(slot % NUM_READERS), {"record": packed(group)})

    def read(self, reader: int) -> None:
        client, after, left = self._client(), "0", self.count * len(self.mine(reader))
        while left:
            for _, entries in client.xread({str(reader): after}, count=64, block=100):
                for _, fields in entries:
                    verified(fields[b"record"])
                after, left = entries[-1][0], left - len(entries)
                client.xdel(str(reader), *(number for number, _ in entries))

    def _client(self) -> Any:
        import redis

        return redis.Redis(unix_socket_path=str(self.directory / "redis.sock"))


class RayStore(Transport):
    """Ray's object store: each record an object, its references handed over by an actor, 80 at a time; nothing is
    durable, and an object is lost with the process that put it."""

    def write(self, slot: int) -> None:
        import ray

        box = self._box(slot % NUM_READERS)
        pending: list[Any] = []
        for number, group in enumerate(groups(self.count), start=1):
            pending.append(ray.put(packed(group)))
            if len(pending) == 80 or number == self.count:
                ray.get(box.add.remote(pending))
                pending = []

    def read(self, reader: int) -> None:
        import ray

        box, left = self._box(reader), self.count * len(self.mine(reader))
        while left:
            references = ray.get(box.take.remote())
            for reference in references:
                verified(ray.get(reference))
            left -= len(references)
            time.sleep(POLL_S)

    def connect(self) -> None:
        import ray

        ray.init(address="auto", namespace="ring", log_to_driver=False, logging_level="ERROR")
        for reader in range(NUM_READERS):
            ray.get(self._box(reader).take.remote())  # somebody must start them

    def _box(self, reader: int) -> Any:
        """The actor that all processes of this measurement find by its name."""
        import ray

        name = f"{self.directory.name}-{reader}"
        return ray.remote(num_cpus=0)(Box).options(name=name, get_if_exists=True, lifetime="detached").remote()


class Box:
    """References under way."""

    def __init__(self) -> None:
        self._references: list[Any] = []

    def add(self, references: list[Any]) -> None:
        self._references += references

    def take(self) -> list[Any]:
        taken, self._references = self._references, []
        return taken


class Swmr(Transport):
    """HDF5 single writer, multiple readers: a file a writer, flushed and synced each 4 MiB."""

    def connect(self) -> None:
        import h5py  # noqa: F401

    def write(self, slot: int) -> None:
        import h5py

        path = self.directory / f"{slot}.tmp"
        with h5py.File(path, "w", libver="latest", locking=False) as file:
            data = file.create_dataset("data", (0,), np.uint8, maxshape=(None,), chunks=(1 << 20,))
            ends = file.create_dataset("ends", (0,), np.int64, maxshape=(None,), chunks=(1024,))
            file.swmr_mode = True
            path.rename(self.directory / str(slot))
            fd, pending, known = os.open(self.directory / str(slot), os.O_RDONLY), list[bytes](), 0
            for number, group in enumerate(groups(self.count), start=1):
                pending.append(packed(group))
                if len(pending) < 80 and number < self.count:
                    continue
                known += _extend(data, np.frombuffer(b"".join(pending), np.uint8))
                sizes = np.cumsum([len(record) for record in pending])
                _extend(ends, known - sizes[-1] + sizes)
                os.fsync(fd)
                pending.clear()
            os.close(fd)

    def read(self, reader: int) -> None:
        import h5py

        for slot in self.mine(reader):
            while str(slot) not in os.listdir(self.directory):
                time.sleep(POLL_S)
            with h5py.File(self.directory / str(slot), "r", swmr=True, locking=False) as file:
                num_read = begin = 0
                while num_read < self.count:
                    file["ends"].refresh()
                    if (new := file["ends"][num_read:]).size == 0:
                        time.sleep(POLL_S)
                        continue
                    file["data"].refresh()
                    blob, base = file["data"][begin : new[-1]].tobytes(), begin
                    for end in new.tolist():
                        verified(blob[begin - base : end - base])
                        begin = end
                    num_read += new.size


def _extend(dataset: Any, values: Any) -> int:
    before = dataset.shape[0]
    dataset.resize((before + len(values),))
    dataset[before:] = values
    dataset.flush()
    return len(values)


Build = Callable[[Path, int], Transport]
