"""A weight update by broadcast against one raw broadcast of the same bytes, in the same run.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/weights.py [--bucket-mb 16] [--rounds 5]

    raw        the bytes in buffers of the same size, from this process to another; neither packed, nor checked, nor
               loaded by anybody; each received in memory of its own
    raw again  the same, into memory that has been received in before: no page is touched for the first time
    update     ``BroadcastTransport.publish`` to a real embedded engine: packed, CRC-32C on both sides, copied beside
               the model's weights, put in their place
    in turn    the same, but each bucket packed only when the one before it is loaded
    changes    the same as ``update`` with a baseline, after 2 % of the elements have changed

The five take turns, and their medians are compared: other work on the machine slows all of them. CPU is that of the
sending process and of the receiving one. Writes ``weights.json`` beside this file and prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from embedded_process import embedded
from machine import describe
from tiny_models import make_model

from areal_hpc.buckets import Bucket
from areal_hpc.collective import host_store, join_group
from areal_hpc.generation.client import EngineClient
from areal_hpc.transfer import GroupAddress
from areal_hpc.weights import broadcast
from areal_hpc.weights.ahead import Ahead
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.broadcast import BroadcastTransport

SHAPE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
LIMIT_S = 300.0
RATED = ("update", "in turn", "changes")
MIB = 1 << 20
SHARE = 0.02
"""Of elements that change from one update to the next."""


class InTurn(Ahead):
    """Packs a bucket when it is asked for."""

    def _begin(self) -> Future[Bucket | None]:
        return Future()

    async def take(self) -> Bucket | None:
        return next(self._buckets, None)


def receive(address: GroupAddress, sizes: list[int], num_rounds: int) -> None:
    """The other end of the raw broadcast."""
    torch.set_num_threads(1)
    group = join_group(address, 1, LIMIT_S)
    used = torch.ones(max(sizes), dtype=torch.uint8)
    for _ in range(num_rounds):
        for size in sizes:
            dist.broadcast(torch.empty(size, dtype=torch.uint8), group=group, group_src=0)
        dist.barrier(group=group)
        for size in sizes:
            dist.broadcast(used[:size], group=group, group_src=0)
        dist.barrier(group=group)


@contextmanager
def raw_receiver(sizes: list[int], num_rounds: int) -> Iterator[dist.ProcessGroup]:
    """A group of this process and another that receives ``sizes`` so many times."""
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="raw", world_size=2, backend="gloo")
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(address, sizes, num_rounds))
    process.start()
    try:
        yield join_group(address, 0, LIMIT_S, store)
        process.join(LIMIT_S)
    finally:
        process.kill()


def send_raw(group: dist.ProcessGroup, buffers: list[torch.Tensor]) -> float:
    """Seconds until the other end has all ``buffers``."""
    start = time.perf_counter()
    for buffer in buffers:
        dist.broadcast(buffer, group=group, group_src=0)
    dist.barrier(group=group)
    return time.perf_counter() - start


def measure(bucket_bytes: int, num_rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), "llama", 0, **SHAPE)
        weights = {name: value.clone() for name, value in model.state_dict().items() if name != "lm_head.weight"}
        with embedded(Path(directory)) as urls:
            return asyncio.run(_rounds(urls[0], weights, bucket_bytes, num_rounds))


class Clock:
    """Seconds of an update, by the wall and by the CPU of the sender and of the ``receiver``."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def measure(self, name: str, receiver: psutil.Process) -> Iterator[None]:
        start = self._now(receiver)
        yield
        for kind, before, after in zip(("", " sender", " receiver"), start, self._now(receiver), strict=True):
            self.note(f"{name}{kind}", after - before)

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    @staticmethod
    def _now(receiver: psutil.Process) -> tuple[float, float, float]:
        used = receiver.cpu_times()
        return time.perf_counter(), time.process_time(), used.user + used.system


def change(weights: dict[str, torch.Tensor], random: torch.Generator) -> None:
    """Turn the sign of ``SHARE`` of the elements."""
    for value in weights.values():
        value[torch.rand(value.shape, generator=random) < SHARE] *= -1


async def _rounds(url: str, weights: dict[str, torch.Tensor], bucket_bytes: int, num_rounds: int) -> dict[str, Any]:
    total = sum(value.nbytes for value in weights.values())
    sizes = [min(bucket_bytes, total - start) for start in range(0, total, bucket_bytes)]
    buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    before = set(psutil.Process().children())  # besides the engine, what multiprocessing counts resources with
    engine = max(before, key=lambda process: process.memory_info().rss)
    client = EngineClient("engine-0", url, token="secret")
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "timeout_s": LIMIT_S}
    whole = BroadcastTransport([client], epoch=1, **options)
    changes = BroadcastTransport([client], epoch=2, baseline=DeltaBaseline(whole_every=1 << 30), **options)
    clock, random, saved = Clock(), torch.Generator().manual_seed(0), 0.0
    with raw_receiver(sizes, num_rounds + 1) as group:
        (other,) = set(psutil.Process().children()) - before
        for number in range(num_rounds + 1):
            for name in ("raw", "raw again"):
                with clock.measure(name, other):
                    await asyncio.to_thread(send_raw, group, buffers)
            with clock.measure("update", engine):
                told = await whole.publish(3 * number + 1, weights.items())
            clock.note("update paused", told["seconds_paused"])
            with mock.patch.object(broadcast, "Ahead", InTurn), clock.measure("in turn", engine):
                told = await whole.publish(3 * number + 2, weights.items())
            clock.note("in turn paused", told["seconds_paused"])
            change(weights, random)
            with clock.measure("changes", engine):
                told = await changes.publish(3 * number + 3, weights.items())
            clock.note("changes paused", told["seconds_paused"])
            saved = told["bytes_saved"] / total
    for transport in (whole, changes):
        await transport.close()
    await client.close()
    seconds = {name: values[1:] for name, values in clock.seconds.items()}  # the first makes the groups
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": total,
        "bucket_bytes": bucket_bytes,
        "rounds": num_rounds,
        "changed": SHARE,
        "saved": round(saved, 4),
        "median_s": {name: round(value, 4) for name, value in medians.items()},
        "all_s": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "ratio": {name: round(medians["raw"] / medians[name], 3) for name in RATED},
        "ratio_to_raw_again": {name: round(medians["raw again"] / medians[name], 3) for name in RATED},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket-mb", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    machine = describe()
    result = measure(int(arguments.bucket_mb * MIB), arguments.rounds)
    Path(__file__).with_suffix(".json").write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")
    print(f"{result['bytes'] / MIB:.0f} MiB in buckets of {arguments.bucket_mb:g} MiB, medians of {arguments.rounds}")
    print("            seconds   MiB/s   of raw   again   paused   CPU ms/MiB of sender and receiver")
    for name in ("raw", "raw again", *RATED):
        median, mib = result["median_s"], result["bytes"] / MIB
        share, again = median["raw"] / median[name], median["raw again"] / median[name]
        paused = median.get(f"{name} paused", 0.0)
        cpu = "   ".join(f"{1000 * median[f'{name} {who}'] / mib:6.2f}" for who in ("sender", "receiver"))
        speed = f"{median[name]:7.3f}  {mib / median[name]:6.0f}   {share:6.2f}  {again:6.2f}"
        print(f"{name:<10}  {speed}   {paused:6.3f}   {cpu}")
    print(f"changes: {result['saved']:.1%} of the bytes were not sent")


if __name__ == "__main__":
    main()
