"""Groups that are entered in threads, and left before that has come to its end; the groups are gloo's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from areal_hpc.collective import host_store, join_group, leave_group, name_at
from areal_hpc.errors import ConfigError
from areal_hpc.generation.served import entering as module
from areal_hpc.generation.served.entering import entering, leave
from areal_hpc.generation.vllm.worker import Receiver
from areal_hpc.transfer import GroupAddress

LIMIT_S = 60.0
ADDRESS = GroupAddress(host="127.0.0.1", port=0, name="w-7-0", world_size=1, backend="gloo")


@pytest.fixture
def store() -> Any:
    return host_store(timeout_s=LIMIT_S)


@pytest.fixture
def address(store: Any) -> GroupAddress:
    return GroupAddress(**asdict(ADDRESS) | {"port": store.port})


@pytest.fixture
def others_come(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until this is set no group forms."""
    came = threading.Event()

    def join_late(address: GroupAddress, rank: int, limit_s: float, *, card: str) -> Any:
        assert came.wait(LIMIT_S)
        return join_group(address, rank, limit_s, card=card)

    monkeypatch.setattr(module, "join_group", join_late)
    return came


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def is_left(group: dist.ProcessGroup) -> bool:
    """By torch's own account."""
    return group not in dist.distributed_c10d._world.pg_map


def test_a_group_is_left_whether_it_has_formed_or_is_yet_to(
    address: GroupAddress, others_come: threading.Event
) -> None:
    entry = entering(address, 0, LIMIT_S)
    leave(entry)
    others_come.set()
    until(lambda: is_left(entry.result(LIMIT_S)))
    again = entering(address, 0, LIMIT_S)
    group = again.result(LIMIT_S)
    assert not is_left(group)
    leave(again)
    assert is_left(group)


def test_one_that_cannot_be_entered_is_left_without_a_word(
    address: GroupAddress, others_come: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    others_come.set()
    held = join_group(address, 0, LIMIT_S)
    entry = entering(address, 0, LIMIT_S)
    with pytest.raises(ValueError, match="name"):
        entry.result(LIMIT_S)
    leave(entry)
    assert caplog.text == ""
    assert not is_left(held)
    leave_group(held)


class Worker(Receiver):
    rank, device = 0, torch.device("cpu")


def test_a_worker_of_vllm_keeps_no_group_whose_join_was_given_up(
    address: GroupAddress, others_come: threading.Event
) -> None:
    worker = Worker()
    worker.areal_join(asdict(address), 0, LIMIT_S)
    assert not worker.areal_entered(address.name)
    late = worker.areal_entries[address.name]
    worker.areal_leave(address.name)
    assert worker.areal_idle(), "nothing of it keeps an update waiting"
    others_come.set()
    until(lambda: is_left(late.result(LIMIT_S)))
    worker.areal_leave(address.name)  # again: another worker may not have been asked the first time
    worker.areal_join(asdict(address), 0, LIMIT_S)
    until(lambda: worker.areal_entered(address.name))
    group = worker.areal_arrivals.groups[address.name]
    assert not is_left(group)
    worker.areal_leave(address.name)
    assert (worker.areal_arrivals.groups, worker.areal_entries, is_left(group)) == ({}, {}, True)


def test_a_worker_enters_by_its_own_device_and_not_by_that_of_the_thread(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is the first that it sees, for all workers of an engine; so two on one card are refused, and no others."""
    worker = threading.current_thread()
    monkeypatch.setattr(module, "card_here", lambda: "card 3" if threading.current_thread() is worker else "card 0")
    name = name_at(store, "w-7-1", "card 3")
    address = GroupAddress(**asdict(ADDRESS) | {"port": store.port, "name": name, "backend": "nccl", "world_size": 2})
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 of group .* are both on card 3"):
        entering(address, 1, LIMIT_S).result(LIMIT_S)
