"""What our part of vLLM's worker does with what comes; the worker, its model and the network are stand-ins."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_models import FrozenModel

from areal_hpc.buckets import plan_buckets
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.served import arrivals
from areal_hpc.generation.vllm.worker import Receiver
from areal_hpc.transfer import Reception
from areal_hpc.weights.disk import DiskTransport

LIMIT_S = 20.0


class Worker(Receiver):
    """Whose model is a dictionary."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told_in: Path) -> None:
        self.told_in, self.loaded = told_in, list[int]()
        self.model: dict[str, torch.Tensor] = {}
        self.sent: queue.Queue[torch.Tensor | None] = queue.Queue()
        self.areal_arrivals.groups["w"] = "the group"  # type: ignore[assignment]
        monkeypatch.setattr(arrivals, "broadcast", self._broadcast)

    def _broadcast(self, buffer: torch.Tensor, group: Any) -> None:
        sent = self.sent.get(timeout=LIMIT_S)
        if sent is None:
            raise RuntimeError("connection closed by peer")
        buffer.copy_(sent)

    def areal_replace(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        loaded = {}
        for name, tensor in weights:
            self.loaded.append(self.told_in.stat().st_mtime_ns)
            os.utime(self.told_in, ns=(0, 0))  # as if it had been long ago
            loaded[name] = tensor.clone()
        self.model = loaded

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        return self.model.keys() == weights.keys() and all(torch.equal(self.model[n], weights[n]) for n in weights)

    def announce(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        (bucket,) = plan_buckets(weights.items(), 1 << 20)
        self.areal_receive("w", [asdict(spec) for spec in bucket.specs], True)
        return bucket.buffer

    def until_here(self) -> None:
        coming = self._areal_coming
        assert coming is not None
        coming.exception(LIMIT_S)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    return Worker(monkeypatch, tmp_path / "loaded")


def test_adapters_that_come_alone_are_merged_where_they_are_loaded(worker: Worker, tmp_path: Path) -> None:
    model = FrozenModel(tmp_path / "model")
    right = model.adapters(1)
    for adapters in (right, right | {"lora_base": torch.tensor([3])}):
        worker.areal_begin(False, model.order)
        buffer = worker.announce(adapters)
        assert not worker.areal_come() and not worker.areal_idle()
        worker.sent.put(buffer)
        worker.until_here()
        assert worker.areal_come() and worker.areal_idle()
        assert worker.areal_arrivals.merging is not None
        worker.areal_arrivals.merging.wait(LIMIT_S)
        assert worker.areal_ready()
        if adapters is right:
            worker.areal_load(str(tmp_path / "loaded"))
        else:
            with pytest.raises(
                WeightUpdateError, match=r"of other weights than those in .*/model; see that model\.path"
            ):
                worker.areal_load(str(tmp_path / "loaded"))
        assert worker.holds(model.with_adapters(right)), "what is not its own leaves the model as it was"


def test_what_fails_on_its_way_is_told_once_and_the_next_update_begins_all_the_same(worker: Worker) -> None:
    weights = {"a": torch.ones(3)}
    for told in (True, False):
        worker.areal_begin(False, None)
        worker.announce(weights)
        worker.sent.put(None)
        worker.until_here()
        if told:
            with pytest.raises(RuntimeError, match="closed by peer"):
                worker.areal_come()
        assert worker.areal_idle()
    worker.areal_begin(False, None)
    worker.sent.put(worker.announce(weights))
    worker.until_here()
    assert worker.areal_come() and worker.areal_ready()


def test_a_bucket_is_taken_beside_what_samples_down_to_the_copy_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sampling waits for it, where it has its device's common stream: to wait for an operation holds that up."""
    [bucket] = plan_buckets([("a", torch.ones(3))], 1 << 20)
    taker, order = arrivals.Arrivals(groups={"w": "the group"}), list[str]()  # type: ignore[dict-item]

    @contextmanager
    def beside(device: torch.device) -> Iterator[None]:
        order.append(f"beside on {device}")
        yield
        order.append(f"over, with {list(taker.new)}")

    def sent(buffer: torch.Tensor, group: Any) -> None:
        order.append(f"broadcast to {group}")
        buffer.copy_(bucket.buffer)

    monkeypatch.setattr(arrivals, "beside", beside)
    monkeypatch.setattr(arrivals, "broadcast", sent)
    taker.receive("w", bucket.specs, torch.device("cpu"), checked=True)
    assert order == ["beside on cpu", "broadcast to the group", "over, with ['a']"]


@pytest.mark.parametrize("kind", ["weights", "weights that are kept", "adapters"])
def test_a_directory_becomes_the_model(worker: Worker, tmp_path: Path, kind: str) -> None:
    model = FrozenModel(tmp_path / "model")
    sent = model.adapters(2) if kind == "adapters" else model.weights
    worker.areal_begin(kind == "weights that are kept", model.order if kind == "adapters" else None)

    class Target:
        name, num_ranks = "engine-0", 1

        async def prepare(self) -> Reception:
            return Reception(stages=True, proves=True)

        async def pause(self) -> None: ...

        async def resume(self, version: int) -> None: ...

        async def load_directory(self, path: str, version: int) -> None:
            while not worker.areal_ready():
                await asyncio.sleep(0.01)
            worker.areal_read(path, str(tmp_path / "loaded"))

    targets: Any = [Target()]
    asyncio.run(DiskTransport(tmp_path / "weights", targets, epoch=1, timeout_s=LIMIT_S).publish(1, iter(sent.items())))
    assert worker.holds(model.with_adapters(sent) if kind == "adapters" else model.weights)
    assert len(worker.loaded) == len(model.weights) and all(worker.loaded), "it tells of each that it is loaded"
    held = worker.areal_arrivals.held
    assert held.keys() == (model.weights.keys() if kind == "weights that are kept" else set())
