from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from areal_hpc import collective
from areal_hpc.collective import (
    bracketed,
    broadcast,
    device_for,
    host_store,
    join_group,
    leave_group,
    meeting,
    name_at,
    remember_operations,
    unbracketed,
)
from areal_hpc.errors import ConfigError
from areal_hpc.transfer import GroupAddress
from areal_hpc.waits import open_waits

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 60.0


def receive(addresses: list[GroupAddress], size: int, pipe: Connection) -> None:
    """An engine's side: join each group in turn, take one broadcast, leave."""
    for address in addresses:
        group = join_group(address, 1, LIMIT_S)
        buffer = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(buffer, group=group, group_src=0)
        pipe.send(buffer.tolist())
        leave_group(group)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"], ids=["ipv4", "A16 ipv6", "A16 ipv6 in brackets"])
def test_a_broadcast_reaches_the_other_process(host: str) -> None:
    """Two memberships on one store, one after the other: a fresh name each (D21)."""
    store = host_store(host, timeout_s=LIMIT_S)
    addresses = [
        GroupAddress(host=host, port=store.port, name=f"w-{host}-{k}", world_size=2, backend="gloo") for k in range(2)
    ]
    ours, theirs = SPAWN.Pipe()
    engine = SPAWN.Process(target=receive, args=(addresses, 4, theirs))
    engine.start()
    for k, address in enumerate(addresses):
        group = join_group(address, 0, LIMIT_S, store)
        dist.broadcast(torch.tensor([1, 2, 3, k], dtype=torch.uint8), group=group, group_src=0)
        assert ours.poll(LIMIT_S)
        assert ours.recv() == [1, 2, 3, k]
        leave_group(group)
    engine.join(LIMIT_S)
    assert engine.exitcode == 0


def test_a_member_that_does_not_come_ends_the_join_in_time() -> None:
    store = host_store(timeout_s=1)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="w-alone", world_size=2, backend="gloo")
    with pytest.raises((dist.DistError, RuntimeError)):
        join_group(address, 0, 1, store)


def test_A13_stores_that_are_made_at_one_moment_have_ports_of_their_own() -> None:
    """The kernel gives a port and holds it: nobody looks for a free one first, and loses it to another."""
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: host_store(timeout_s=LIMIT_S), range(8)))
    assert len({store.port for store in stores}) == 8


def test_the_store_listens_on_the_named_host_only() -> None:
    store = host_store("127.0.0.1", timeout_s=5)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_a_store_tells_its_keys_to_whoever_reaches_it_so_a_secret_in_their_names_would_hide_nothing() -> None:
    """Should this ever fail, torch keeps them to itself, and a secret prefix is worth its place in ``join_group``."""
    store = host_store(timeout_s=5)
    PrefixStore("secret", store).set("address", "10.0.0.1")
    stranger = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    assert stranger.list_keys() == ["secret/address"]


def address_at(store: TCPStore, name: str) -> GroupAddress:
    return GroupAddress(host="127.0.0.1", port=store.port, name=name, world_size=1, backend="gloo")


def test_a_store_that_is_another_runs_is_refused_at_once_though_its_group_has_the_same_name() -> None:
    """Whoever comes late may find that a trainer's port is another's by now."""
    ours, theirs = host_store(timeout_s=LIMIT_S), host_store(timeout_s=LIMIT_S)
    name = name_at(ours, "w-1-0")
    assert name != name_at(theirs, "w-1-0")
    for foreign in (theirs, host_store(timeout_s=LIMIT_S)):
        began = time.monotonic()
        with pytest.raises(
            dist.DistError, match=rf"127\.0\.0\.1:{foreign.port} does not know the group 'w-1-0@"
        ) as told:
            join_group(address_at(foreign, name), 0, LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2, "and not only when the limit is over"
        assert "of another run or attempt" in str(told.value)
    leave_group(join_group(address_at(ours, name), 0, LIMIT_S))


def test_a_store_of_somebody_who_makes_groups_in_torchs_own_way_is_entered_as_ever() -> None:
    store = host_store(timeout_s=LIMIT_S)
    leave_group(join_group(address_at(store, "weight_update_group"), 0, LIMIT_S))


def test_A16_brackets_are_put_once_and_taken_off() -> None:
    assert bracketed("2001:db8::1") == bracketed("[2001:db8::1]") == "[2001:db8::1]"
    assert bracketed("node-7") == "node-7"
    assert unbracketed("[2001:db8::1]") == "2001:db8::1"
    assert unbracketed("10.0.0.1") == "10.0.0.1"


def test_each_backend_names_its_device() -> None:
    assert [device_for(backend).name for backend in ("gloo", "nccl", "hccl")] == ["cpu", "cuda", "npu"]
    with pytest.raises(ConfigError, match="smoke"):
        device_for("smoke")


def test_the_wait_for_others_is_named_until_a_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the call of an operation returns when it has begun."""
    seen: list[list[str]] = []
    stream = SimpleNamespace(synchronize=lambda: seen.append([wait.what for wait in open_waits()]))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="w-named", world_size=1, backend="gloo")
    group = join_group(address, 0, LIMIT_S, store)
    with meeting("the sum of gradients", group):
        dist.all_reduce(torch.ones(1), group=group)
        assert not seen
    assert seen == [["the sum of gradients"]]
    assert not open_waits()
    leave_group(group)


@pytest.mark.parametrize("vital", [False, True])
def test_a_group_that_outlives_its_members_raises_errors_and_only_while_it_is_made(
    monkeypatch: pytest.MonkeyPatch, vital: bool
) -> None:
    """NCCL's own watch would end the trainer with an engine; torch reads whether it is to when a group is made."""
    variable, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(variable, raising=False)

    def make(*_: object, **__: object) -> None:
        seen.append(os.environ.get(variable))
        raise dist.DistBackendError("there is no NCCL here")

    monkeypatch.setattr(c10d, "_new_process_group_helper", make)
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="w", world_size=2, backend="nccl")
    with pytest.raises(dist.DistBackendError):
        join_group(address, 0, LIMIT_S, store, vital=vital)
    assert seen == [None if vital else "1"]
    assert variable not in os.environ


def test_a_group_is_not_split_from_a_default_group_that_is_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other members have no part in that: NCCL would wait for its ranks, and never hear of the trainer."""
    monkeypatch.setattr(c10d, "_get_split_source", lambda *_: pytest.fail("it is to be split from another"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default, device = dist.distributed_c10d._get_default_group(), torch.device("cuda", 0)
        default.bound_device_id = device
        store = host_store(timeout_s=LIMIT_S)
        address = GroupAddress(host="127.0.0.1", port=store.port, name="w-apart", world_size=1, backend="gloo")
        leave_group(join_group(address, 0, LIMIT_S, store))
        assert default.bound_device_id == device
    finally:
        dist.destroy_process_group()


def wait_in_vain(address: GroupAddress, pipe: Connection) -> None:
    group = join_group(address, 1, LIMIT_S)
    pipe.send("in")
    try:
        broadcast(torch.ones(1), group)
    except RuntimeError as error:
        pipe.send(type(error).__name__)
    leave_group(group)


def test_who_leaves_a_group_waits_for_nobody_and_wakes_who_waits_for_it() -> None:
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="w-left", world_size=2, backend="gloo")
    ours, theirs = SPAWN.Pipe()
    engine = SPAWN.Process(target=wait_in_vain, args=(address, theirs))
    engine.start()
    group = join_group(address, 0, LIMIT_S, store)
    assert ours.poll(LIMIT_S) and ours.recv() == "in"
    leave_group(group)
    del group  # gloo's connections close with the last hold on it
    assert ours.poll(LIMIT_S / 2) and ours.recv()
    engine.join(LIMIT_S)
    assert engine.exitcode == 0


def test_torch_is_told_to_remember_operations_in_words_that_it_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    for name in (*names, "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[0], "7")
    remember_operations(tmp_path / "collectives-")
    assert os.environ[names[0]] == "7"
    assert os.environ[names[1]] == str(tmp_path / "collectives-")
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as code:
        assert all(code.find(name.encode() + b"\0") >= 0 for name in names)


CARD, OTHER_CARD = "GPU 0000:1a:00 of node-3 (boot 5f0c1d2e)", "GPU 0000:1b:00 of node-3 (boot 5f0c1d2e)"


def test_who_comes_to_a_card_that_has_a_member_is_refused_before_nccl_would_and_never_rank_0() -> None:
    """An engine on rank 0's card, one on a card of its own, and one on that: they come before rank 0 itself does."""
    store = host_store(timeout_s=LIMIT_S)
    name = name_at(store, "w-1-0", CARD)
    address = GroupAddress(host="127.0.0.1", port=store.port, name=name, world_size=4, backend="nccl")
    with pytest.raises(ConfigError, match=rf"ranks 0 and 1 of group '{name}' .* set weights.transport=disk"):
        join_group(address, 1, LIMIT_S, card=CARD)
    place = PrefixStore(name, store)
    collective._take_card(place, address, 2, OTHER_CARD)
    with pytest.raises(ConfigError, match="ranks 2 and 3"):
        join_group(address, 3, LIMIT_S, card=OTHER_CARD)
    collective._take_card(place, address, 0, CARD)


def test_where_tensors_travel_by_the_cpu_members_may_be_on_one_card() -> None:
    store = host_store(timeout_s=LIMIT_S)
    name = name_at(store, "w-1-0")
    PrefixStore(name, store).set(CARD, "1")
    address = GroupAddress(host="127.0.0.1", port=store.port, name=name, world_size=1, backend="gloo")
    leave_group(join_group(address, 0, LIMIT_S, store, card=CARD))
