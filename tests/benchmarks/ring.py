"""How much of a raw file's speed the ring keeps: 4 writers and 2 readers at once, every byte synced and verified.

    python tests/benchmarks/ring.py [groups per writer]

The raw file is written by one process with one fsync and read back, in the same run; only the ratio means anything.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from areal_hpc.buffer.chain import ChainName, ChainWriter, GroupCommit
from areal_hpc.buffer.records import RecordType, encode_group, group_ref
from areal_hpc.buffer.scan import ChainReader, GroupFetcher
from areal_hpc.fs import RunDir, make_private_directory
from areal_hpc.types import StopReason, Trajectory, TrajectoryGroup

NUM_WRITERS, NUM_READERS, NUM_TOKENS, REPEATS = 4, 2, 4096, 3  # 13 bytes a token: 53 KB a group


def a_group(position: int) -> TrajectoryGroup:
    one = Trajectory(
        token_ids=np.full(NUM_TOKENS, position, np.int32),
        loss_mask=np.ones(NUM_TOKENS, np.bool_),
        logprobs=np.full(NUM_TOKENS, -1.0, np.float32),
        versions=np.zeros(NUM_TOKENS, np.int32),
        reward=1.0,
        stop=StopReason.STOP,
    )
    return TrajectoryGroup(position=position, prompt_id="", trajectories=(one,))


def write(chains: Path, name: ChainName, count: int, barrier: Barrier) -> None:
    chain = ChainWriter(chains, name, 64 << 20)
    groups = [a_group(position) for position in range(16)]
    barrier.wait()
    commits = GroupCommit(chain, commit_s=0.2, patience_s=60.0)
    for position in range(count):
        meta, body = encode_group(groups[position % 16])
        chain.append(RecordType.DATA, position, {**meta, "version": [1, 0]}, body)
    commits.stop()
    chain.end()
    barrier.wait()


def read(run: RunDir, names: list[ChainName], barrier: Barrier) -> None:
    fetcher = GroupFetcher(run)
    readers = [ChainReader(run.ring / "chains", name) for name in names]
    barrier.wait()
    while not all(reader.ended for reader in readers):
        for reader in readers:
            for found in reader.poll():
                where = {"segment": found.segment, "offset": found.offset, "seq": found.seq}
                ref = group_ref(str(reader.name), found.meta, **where)
                assert fetcher.read(ref).position == ref.position
        time.sleep(0.01)
    barrier.wait()


def ring_s(directory: Path, count: int) -> float:
    run = RunDir.create(directory)
    chains = make_private_directory(run.ring / "chains")
    names = [ChainName.new(slot, 1, 0) for slot in range(NUM_WRITERS)]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(NUM_WRITERS + NUM_READERS + 1, timeout=300)  # all begin; all are done
    workers = [context.Process(target=write, args=(chains, name, count, barrier)) for name in names]
    workers += [
        context.Process(target=read, args=(run, names[reader::NUM_READERS], barrier)) for reader in range(NUM_READERS)
    ]
    for worker in workers:
        worker.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    lasted_s = time.perf_counter() - began
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    return lasted_s


def raw_s(path: Path, count: int) -> float:
    body = encode_group(a_group(0))[1]
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(NUM_WRITERS * count):
            file.write(body)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        while file.read(len(body)):
            pass
    return time.perf_counter() - began


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as directory:
        raw, ring = [], []
        for repeat in range(REPEATS):
            raw.append(raw_s(Path(directory) / f"raw{repeat}", count))
            ring.append(ring_s(Path(directory) / f"run{repeat}", count))
    megabytes = NUM_WRITERS * count * NUM_TOKENS * 13 / 1e6
    result = {
        "megabytes": megabytes,
        "raw_mb_per_s": [megabytes / seconds for seconds in raw],
        "ring_mb_per_s": [megabytes / seconds for seconds in ring],
        "ratio_of_best": min(raw) / min(ring),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'':8}{'MB/s, best of ' + str(REPEATS):>22}{'of raw':>10}")
    print(f"{'raw':8}{max(result['raw_mb_per_s']):22.0f}{1:10.2f}")
    print(f"{'ring':8}{max(result['ring_mb_per_s']):22.0f}{result['ratio_of_best']:10.2f}")


if __name__ == "__main__":
    main()
