"""A process's own address, as its peers see it."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from areal_hpc.cluster.rendezvous import address_towards, meet, torchrun_variables
from areal_hpc.collective import bracketed
from areal_hpc.errors import AttemptFailed


def test_towards_this_machine_it_is_an_address_that_one_can_listen_on() -> None:
    address = address_towards("127.0.0.1")
    with socket.create_server((address, 0)) as server:
        socket.create_connection(server.getsockname()[:2], timeout=10).close()


def test_A16_an_ipv6_address_is_bare_for_sockets_and_bracketed_in_a_url() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    address = address_towards("::1")
    assert (address, bracketed(address)) == ("::1", "[::1]")


def test_a_name_is_no_address() -> None:
    with pytest.raises(ValueError, match="node17"):
        address_towards("node17")


class World:
    """Threads as the members of a communicator: what one says, all hear."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._said: list[Any] = [None] * size
        self._all = threading.Barrier(size, timeout=20)

    def member(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._said[rank] = value
            self._all.wait()
            heard = list(self._said)
            self._all.wait()
            return heard

        return SimpleNamespace(
            rank=rank, size=self.size, allgather=gather, bcast=lambda value, root: gather(value)[root]
        )


def meeting(size: int) -> list[Any]:
    """What each of ``size`` nodes comes to: its address, or what it raised."""

    def one(rank: int) -> Any:
        try:
            return meet(world.member(rank), "127.0.0.1", size)
        except AttemptFailed as failure:
            return str(failure)

    world = World(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_nodes_that_meet_know_the_address_by_which_the_first_is_reached() -> None:
    assert meeting(3) == ["127.0.0.1"] * 3


def test_who_cannot_reach_the_first_node_is_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, *_: object) -> None:
            raise OSError("No route to host")

    monkeypatch.setattr(socket, "create_connection", Refused)
    for said in meeting(2):
        assert said.count("does not reach 127.0.0.1: No route to host") == 2
        assert "ask your site's support" in said


def test_worlds_of_one_are_no_world() -> None:
    with pytest.raises(AttemptFailed, match=r"a world of 1 where srun started 4 tasks.*set cluster\.mpi to another"):
        meet(World(1).member(0), "127.0.0.1", 4)


def test_A46_an_address_of_the_variables_is_bare_for_torch() -> None:
    """That torch itself enters a group by them: tests/integration/test_ranks.py."""
    found = torchrun_variables(3, 8, (1, 4), "[fd00::7]", 2900)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["RANK"], found["LOCAL_RANK"]) == (
        "fd00::7",
        "2900",
        "3",
        "1",
    )
