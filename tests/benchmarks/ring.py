"""How much of a raw file's speed the ring keeps, and what other ways of carrying groups do in the same run.

    python tests/benchmarks/ring.py [--count 6000] [--repeats 3] [--small 1000000]

4 writers and 2 readers, processes of their own, 53 KB a group; every transport carries the same records (the ring's
format, transports.py), which its readers verify and decode, and all of them take turns. Only ratios within one run
mean anything. Two raw files are the measure, and both are in the table: "raw" has the same six processes, a sequential
file a writer, one fsync at its end, and readers that begin after it; "raw alone" is one process that writes one file
with one fsync and reads it back, which never waits for anybody but uses one core. Both lose everything in a crash
before their fsync, and show nothing before it; the ring commits each 4 MiB. What a transport costs once, such as making
directories durable, must not be what is measured: with 6000 groups a writer a run lasts a second and a half. "CPU"
is what writers and readers work for a group, without a transport's server: on a busy machine the only figure that
means something.

Also: from append to visible, file calls a group, and inodes of many small records. Writes ring.json, .png, .svg.
ZeroMQ needs pyzmq, Redis redis with redis-server, Ray ray; what cannot be imported is listed as not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import machine
import psutil
import transports
from transports import NUM_READERS, NUM_TOKENS, NUM_WRITERS, POLL_S, SOME, Build, Ring, Transport

from areal_hpc.buffer.chain import ChainWriter, GroupCommit
from areal_hpc.buffer.records import RecordType, encode_group
from areal_hpc.buffer.scan import ChainReader

CONTEXT = multiprocessing.get_context("spawn")
LIMIT_S = 300.0
METADATA = ("open", "stat", "fstat", "listdir", "scandir", "mkdir", "rename", "replace", "unlink", "link")


def _queues(directory: Path, count: int) -> Transport:
    return transports.Queues(directory, count, tuple(CONTEXT.Queue(64) for _ in range(NUM_READERS)))


TRANSPORTS: dict[str, tuple[Build, tuple[str, ...], str]] = {
    "raw": (transports.Raw, (), "at its end"),
    "raw alone": (transports.RawAlone, (), "at its end"),
    "ring": (Ring, (), "each 4 MiB or 0.2 s"),
    "a file a group": (transports.FileEach, (), "each group"),
    "h5py SWMR": (transports.Swmr, ("h5py",), "each 4 MiB, no crash safety"),
    "Ray objects": (transports.RayStore, ("ray",), "never"),
    "Redis streams": (transports.Redis, ("redis", "redis-server"), "each second"),
    "ZeroMQ": (transports.ZeroMQ, ("zmq",), "never"),
    "mp.Queue": (_queues, (), "never"),
}
"""Name -> how it is made, what it needs, when it is durable."""


def work(connect: Callable[[], None], part: Callable[[int], None], index: int, barrier: Any, cpu_s: Any) -> None:
    connect()
    barrier.wait()
    before = time.process_time()
    part(index)
    with cpu_s:
        cpu_s.value += time.process_time() - before
    barrier.wait()


def seconds(transport: Transport) -> tuple[float, float]:
    """From the moment at which all processes have started until all of them are done, and what they worked together."""
    parts = [(transport.write, slot) for slot in transport.slots]
    parts += [(transport.read, reader) for reader in range(NUM_READERS)]
    barrier, cpu_s = CONTEXT.Barrier(len(parts) + 1, timeout=LIMIT_S), CONTEXT.Value("d")
    told = [(transport.connect, part, index, barrier, cpu_s) for part, index in parts]
    processes = [CONTEXT.Process(target=work, args=arguments) for arguments in told]
    for process in processes:
        process.start()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    lasted_s = time.perf_counter() - began
    for process in processes:
        process.join()
        assert process.exitcode == 0, process
    return lasted_s, float(cpu_s.value)


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray of one node, on loopback, with room for all records."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def server(name: str, directory: Path) -> Iterator[None]:
    """The server that a transport needs, for as long as it is measured."""
    if name == "Ray objects":
        with ray_cluster():
            yield
        return
    if name != "Redis streams":
        yield
        return
    options = ["--port", "0", "--unixsocket", str(directory / "redis.sock"), "--dir", str(directory), "--save", ""]
    command = ["redis-server", *options, "--appendonly", "yes", "--appendfsync", "everysec"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while not (directory / "redis.sock").exists():
            assert time.monotonic() < deadline, "redis-server did not come up in 10 s"
            time.sleep(POLL_S)
        yield
    finally:
        process.terminate()
        process.wait()


def absent(needs: tuple[str, ...]) -> list[str]:
    return [need for need in needs if not (shutil.which(need) if "-" in need else importlib.util.find_spec(need))]


def compare(root: Path, count: int, repeats: int) -> dict[str, Any]:
    runnable = {name: build for name, (build, needs, _) in TRANSPORTS.items() if not absent(needs)}
    taken: dict[str, list[float]] = {name: [] for name in runnable}
    worked: dict[str, list[float]] = {name: [] for name in runnable}
    for repeat in range(repeats):
        for index, (name, build) in enumerate(runnable.items()):
            directory = root / f"{repeat}-{index}"
            directory.mkdir()
            with server(name, directory):
                for times, one in zip((taken[name], worked[name]), seconds(build(directory, count)), strict=True):
                    times.append(one)
            shutil.rmtree(directory)
    megabytes = NUM_WRITERS * count * NUM_TOKENS * 13 / 1e6
    return {
        name: {
            "durable": TRANSPORTS[name][2],
            "mb_per_s": [round(megabytes / each, 1) for each in lasted],
            "of_raw": round(median(taken["raw"]) / median(lasted), 3),
            "of_raw_alone": round(median(taken["raw alone"]) / median(lasted), 3),
            "cpu_us_a_group": round(1e6 * median(worked[name]) / (NUM_WRITERS * count), 1),
        }
        for name, lasted in taken.items()
    }


def visible_ms(directory: Path, count: int = 100) -> dict[str, float]:
    """From append to found by a reader that polls each 10 ms, at 50 groups a second and commits each 0.2 s."""
    chain = ChainWriter(directory, Ring(directory, 0).name(0), 64 << 20)
    commits, reader = GroupCommit(chain, commit_s=0.2, patience_s=60.0), ChainReader(directory, chain.name)
    meta, body = encode_group(SOME[0])
    appended: list[float] = []

    def write() -> None:
        for number in range(count):
            appended.append(time.monotonic())
            chain.append(RecordType.DATA, number, meta, body)
            time.sleep(0.02)
        commits.stop()
        chain.end()

    writer, delays = threading.Thread(target=write), list[float]()
    writer.start()
    while not reader.ended:
        delays += [time.monotonic() - appended[found.meta["ticket"]] for found in reader.poll()]
        time.sleep(POLL_S)
    writer.join()
    ordered = sorted(delays)
    return {"p50": round(1e3 * median(ordered), 1), "p95": round(1e3 * ordered[int(0.95 * len(ordered))], 1)}


def file_calls(directory: Path, count: int = 400) -> dict[str, float]:
    """File calls for each group of one trajectory, of one writer and one reader in one process."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(os, name)
        return lambda *args, **options: (calls.update([name]), real(*args, **options))[1]

    names = (*METADATA, "close", "pread", "pwrite", "fsync", "fdatasync")
    with patch.multiple(os, **{name: counted(name) for name in names}):
        ring = OneReader(directory, count)
        writer = threading.Thread(target=ring.write, args=(0,))
        (directory / "ring" / "chains").mkdir(parents=True)
        writer.start()
        ring.read(0)
        writer.join()
    per_group = {name: round(calls[name] / count, 3) for name in names}
    return {**per_group, "metadata": round(sum(calls[name] for name in METADATA) / count, 3)}


class OneReader(Ring):
    def mine(self, reader: int) -> list[int]:
        return [0]


def small_records(directory: Path, count: int) -> dict[str, float]:
    """Inodes of so many records of 64 bytes, none of them reclaimed, and memory of a process that writes them and reads
    them as they come: what it has after the first tenth, and at the end."""
    chain = ChainWriter(directory, Ring(directory, 0).name(0), 64 << 20)
    reader, found, rss_mb = ChainReader(directory, chain.name), 0, list[float]()
    began = time.perf_counter()
    for number in range(count):
        chain.append(RecordType.DATA, number, {}, bytes(64))
        if number % 10_000 == 0:
            chain.commit()
            found += len(reader.poll())
        if number == count // 10:
            rss_mb.append(psutil.Process().memory_info().rss / 1e6)
    chain.end()
    found += len(reader.poll())
    lasted_s = time.perf_counter() - began
    rss_mb.append(psutil.Process().memory_info().rss / 1e6)
    assert reader.ended and found == count
    return {
        "records": count,
        "live_inodes": 1 + len(os.listdir(chain.directory)),
        "records_per_s": round(count / lasted_s),
        "rss_mb_after_a_tenth": round(rss_mb[0], 1),
        "rss_mb_at_the_end": round(rss_mb[1], 1),
    }


def picture(rows: dict[str, Any]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    names = list(rows)[::-1]
    bars = axes.barh(names, [rows[name]["of_raw"] for name in names])
    axes.bar_label(bars, [f"{rows[name]['of_raw']:.2f}  durable {rows[name]['durable']}" for name in names], padding=3)
    axes.set_xlabel("speed, as a share of raw (median)")
    axes.set_xlim(0, 1.6 * max(row["of_raw"] for row in rows.values()))
    for suffix in ("png", "svg"):
        figure.savefig(Path(__file__).with_suffix(f".{suffix}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=6000, help="groups a writer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", type=int, default=1_000_000, help="small records")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.describe(), "groups_a_writer": options.count}
    with tempfile.TemporaryDirectory() as root:
        result["transports"] = rows = compare(Path(root), options.count, options.repeats)
        for name, measure in (("visible_ms", visible_ms), ("file_calls_a_group", file_calls)):
            result[name] = measure(Path(tempfile.mkdtemp(dir=root)))
        result["small"] = small_records(Path(tempfile.mkdtemp(dir=root)), options.small)
    result["not_installed"] = {
        name: missing for name, (_, needs, _) in TRANSPORTS.items() if (missing := absent(needs))
    }
    result["load_at_end"] = round(os.getloadavg()[0], 2)
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    picture(rows)
    print(f"{'':16}{'MB/s':>8}{'of raw':>8}{'of raw alone':>14}{'CPU us':>8}  durable")
    for name, row in rows.items():
        shares = f"{row['of_raw']:8.2f}{row['of_raw_alone']:14.2f}{row['cpu_us_a_group']:8.0f}"
        print(f"{name:16}{median(row['mb_per_s']):8.0f}{shares}  {row['durable']}")
    print({name: result[name] for name in ("visible_ms", "file_calls_a_group", "small", "not_installed")})


if __name__ == "__main__":
    main()
