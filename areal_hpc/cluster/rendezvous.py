"""Under which address a process of the run is found: one of the cluster's own network, published by the process itself.

Never the first name of a node list (rank 0 may sit elsewhere), and never a look-up of the own name: on many systems
that is a loopback address.
"""

from __future__ import annotations

import ipaddress
import socket

ANY_PORT = 9  # nothing is sent: connecting a datagram socket only chooses the route


def address_towards(peer: str) -> str:
    """This machine's address on the network that leads to ``peer``, which is an address of the same cluster."""
    family = socket.AF_INET6 if ipaddress.ip_address(peer).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((peer, ANY_PORT))
        return str(route.getsockname()[0])
