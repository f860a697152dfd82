"""A process's own address, as its peers see it."""

from __future__ import annotations

import socket

import pytest

from areal_hpc.cluster.rendezvous import address_towards
from areal_hpc.collective import bracketed


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
