"""Buckets into the embedded engine: one is received while the one before it is loaded. No group: bytes are given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from embedded_engines import LIMIT_S, MakeEngine, Models
from safetensors.torch import load_file

from areal_hpc.buckets import Bucket, plan_buckets
from areal_hpc.delta import checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.embedded import updates
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.scheduler import QUARANTINE

NUM_BUCKETS = 3


class Sender:
    """An engine whose broadcasts bring ``buckets``, and whose loading waits at a gate, bucket by bucket."""

    def __init__(self, engine: EmbeddedEngine, buckets: list[Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.buckets = engine, buckets
        self.received = [threading.Event() for _ in buckets]
        self.gates = [threading.Event() for _ in buckets]
        self._pool = ThreadPoolExecutor(1)
        monkeypatch.setattr(updates, "broadcast", self._broadcast)
        engine.updates._groups["g"] = self  # type: ignore[assignment]  # only handed on to the broadcast
        spare, gates = engine.model.spare, iter(self.gates)
        load = spare.load

        def slow(*arguments: Any, **options: Any) -> Any:
            assert next(gates).wait(LIMIT_S)
            return load(*arguments, **options)

        monkeypatch.setattr(spare, "load", slow)

    def _broadcast(self, buffer: torch.Tensor, _: Any) -> None:
        number = sum(event.is_set() for event in self.received)
        buffer.copy_(self.buckets[number].buffer)
        self.received[number].set()

    def send(self, number: int) -> Future[None]:
        return self._pool.submit(
            self.engine.updates.load_bucket,
            "g",
            self.buckets[number].specs,
            flattened=True,
            checked=True,
            version="2",
            flush_cache=False,
            abort_all=False,
        )

    def close(self) -> None:
        self.engine.updates._groups.clear()
        self._pool.shutdown()


def buckets_of(models: Models) -> tuple[list[Bucket], dict[str, int]]:
    weights = load_file(models["new"][0] / "model.safetensors")
    limit = sum(value.nbytes for value in weights.values()) // NUM_BUCKETS + 40_000
    buckets = list(plan_buckets(weights.items(), limit))
    assert len(buckets) == NUM_BUCKETS
    return buckets, {name: checksum(value) for name, value in weights.items()}


def test_a_bucket_is_received_while_the_one_before_it_is_loaded_into_memory_of_its_own(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    buckets, sums = buckets_of(models)
    before = engine.updates.checksums()
    sender = Sender(engine, buckets, monkeypatch)
    engine.updates.begin()
    sender.send(0).result(LIMIT_S)  # received, and not loaded: the gate is shut
    second = sender.send(1)
    assert sender.received[1].wait(LIMIT_S)
    assert not second.done()  # two buckets are in memory, and no third one comes
    assert engine.updates.is_open and engine.updates.checksums() == before and not engine.scheduler.holds
    for gate in sender.gates:
        gate.set()
    second.result(LIMIT_S)
    sender.send(2).result(LIMIT_S)
    engine.updates.end()
    held = engine.updates.checksums()
    assert {name: held[name] for name in sums} == sums
    assert engine.scheduler.version == "2"
    sender.close()


def test_what_a_bucket_has_met_is_told_by_the_next_call_and_what_serves_stays_as_it_was(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    buckets, _ = buckets_of(models)
    before = engine.updates.checksums()
    buckets[0].buffer[0] ^= 1
    sender = Sender(engine, buckets, monkeypatch)
    for gate in sender.gates:
        gate.set()
    engine.updates.begin()
    sender.send(0).result(LIMIT_S)
    with pytest.raises(WeightUpdateError, match="arrived with other bytes than were sent"):
        sender.send(1).result(LIMIT_S)
    with pytest.raises(WeightUpdateError, match="arrived with other bytes than were sent"):
        engine.updates.end()
    assert QUARANTINE in engine.scheduler.holds
    assert engine.updates.checksums() == before
    engine.updates.load_directory(models["new"][0], "3", flush_cache=True, abort_all=False)
    assert QUARANTINE not in engine.scheduler.holds
    assert engine.scheduler.version == "3"
    sender.close()


@contextmanager
def hanging(engine: EmbeddedEngine) -> Iterator[None]:
    """Its thread is in one step meanwhile."""
    begun, over = threading.Event(), threading.Event()
    step = engine.scheduler.call(lambda: begun.set() or over.wait(LIMIT_S))
    assert begun.wait(LIMIT_S)
    try:
        yield
    finally:
        over.set()
        step.result(LIMIT_S)


def in_time(call: Callable[[], object]) -> None:
    """It is refused well before a person would look for the reason."""
    late = r"busy for 0\.1 s .* limits\.weight_update_s"
    with ThreadPoolExecutor(1) as pool, pytest.raises(WeightUpdateError, match=late):
        pool.submit(call).result(LIMIT_S / 2)


def test_an_update_that_ends_while_the_engines_thread_hangs_fails_in_time_and_is_never_put_into_place(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(update_timeout_s=0.1)
    buckets, _ = buckets_of(models)
    before = engine.updates.checksums()
    sender = Sender(engine, buckets, monkeypatch)
    for gate in sender.gates:
        gate.set()
    engine.updates.begin()
    for number in range(NUM_BUCKETS):
        sender.send(number).result(LIMIT_S)
    with hanging(engine):
        in_time(engine.updates.end)
        in_time(engine.updates.checksums)
        in_time(lambda: engine.updates.name_version("7", abort_all=False))
    assert engine.updates.checksums() == before
    assert engine.scheduler.version == "1" and QUARANTINE in engine.scheduler.holds
    monkeypatch.undo()
    engine.updates.load_directory(models["new"][0], "3", flush_cache=True, abort_all=False)
    assert engine.scheduler.version == "3" and QUARANTINE not in engine.scheduler.holds
    sender.close()


def test_a_bucket_that_fails_while_the_engines_thread_hangs_is_told_and_the_engine_serves_nothing_once_it_is_back(
    make_engine: MakeEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(update_timeout_s=0.1)
    buckets, _ = buckets_of(models)
    buckets[0].buffer[0] ^= 1
    sender = Sender(engine, buckets, monkeypatch)
    for gate in sender.gates:
        gate.set()
    engine.updates.begin()
    with hanging(engine):
        sender.send(0).result(LIMIT_S)
        with pytest.raises(WeightUpdateError, match="arrived with other bytes than were sent"):
            sender.send(1).result(LIMIT_S)
        assert QUARANTINE not in engine.scheduler.holds
    engine.updates.checksums()  # the thread has done what was asked for before
    assert QUARANTINE in engine.scheduler.holds
    sender.close()
