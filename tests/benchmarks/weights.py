"""A weight update by broadcast against one raw broadcast of the same bytes, in the same run.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/weights.py [--bucket-mb 16] [--rounds 5]

    raw        the bytes in buffers of the same size, from this process to another; neither packed, nor checked, nor
               loaded by anybody
    update     ``BroadcastTransport.publish`` to a real embedded engine: packed, CRC-32C on both sides, copied over the
               model's weights
    in turn    the same, but each bucket packed only when the one before it is loaded

The three take turns, and their medians are compared: other work on the machine slows all of them. Writes
``weights.json`` beside this file and prints a table.
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

import torch
import torch.distributed as dist
from embedded_process import embedded
from machine import describe
from tiny_models import make_model

from areal_hpc.buckets import Bucket
from areal_hpc.collective import host_store, join_group
from areal_hpc.generation.client import EngineClient
from areal_hpc.types import GroupAddress
from areal_hpc.weights import broadcast
from areal_hpc.weights.ahead import Ahead
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
MIB = 1 << 20


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
    for _ in range(num_rounds):
        for size in sizes:
            dist.broadcast(torch.empty(size, dtype=torch.uint8), group=group, group_src=0)
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


async def _rounds(url: str, weights: dict[str, torch.Tensor], bucket_bytes: int, num_rounds: int) -> dict[str, Any]:
    total = sum(value.nbytes for value in weights.values())
    sizes = [min(bucket_bytes, total - start) for start in range(0, total, bucket_bytes)]
    buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    client = EngineClient("engine-0", url, token="secret")
    transport = BroadcastTransport([client], epoch=1, bucket_bytes=bucket_bytes, timeout_s=LIMIT_S)
    seconds: dict[str, list[float]] = {"raw": [], "update": [], "paused": [], "in turn": [], "paused in turn": []}
    with raw_receiver(sizes, num_rounds + 1) as group:
        for number in range(num_rounds + 1):
            seconds["raw"].append(await asyncio.to_thread(send_raw, group, buffers))
            told = await transport.publish(2 * number + 1, weights.items())
            with mock.patch.object(broadcast, "Ahead", InTurn):
                in_turn = await transport.publish(2 * number + 2, weights.items())
            for name, one in (("", told), (" in turn", in_turn)):
                seconds[name.strip() or "update"].append(one["seconds"])
                seconds[f"paused{name}"].append(one["seconds_paused"])
    await transport.close()
    await client.close()
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first makes the group
    return {
        "bytes": total,
        "bucket_bytes": bucket_bytes,
        "rounds": num_rounds,
        "median_s": {name: round(value, 4) for name, value in medians.items()},
        "all_s": {name: [round(value, 4) for value in values[1:]] for name, values in seconds.items()},
        "ratio": {name: round(medians["raw"] / medians[name], 3) for name in ("update", "in turn")},
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
    print("            seconds   MiB/s   of raw   engine paused, seconds")
    for name, paused in (("raw", ""), ("update", "paused"), ("in turn", "paused in turn")):
        median = result["median_s"][name]
        share = f"{result['ratio'][name]:6.2f}" if paused else "      "
        pause = f"{result['median_s'][paused]:8.3f}" if paused else ""
        print(f"{name:<10}  {median:7.3f}  {result['bytes'] / MIB / median:6.0f}   {share}   {pause}")


if __name__ == "__main__":
    main()
