"""Under which address a process of the run is found: one of the cluster's own network, published by the process itself.

Never the first name of a node list (rank 0 may sit elsewhere), and never a look-up of the own name: on many systems
that is a loopback address. With ``cluster.mpi`` the nodes of a step tell each other by MPI, and prove it:

    node 0   its address, and a port that it listens on   ──bcast──>   every node
    node i   the own address towards it, and a connection ──gather──>  node 0, which says who could not
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any

from areal_hpc.collective import unbracketed
from areal_hpc.errors import AttemptFailed
from areal_hpc.extras import optional

ANY_PORT = 9  # nothing is sent: connecting a datagram socket only chooses the route
CONNECT_S = 10.0
PMI_VARIABLES = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL")


def address_towards(peer: str) -> str:
    """This machine's address on the network that leads to ``peer``, which is an address of the same cluster."""
    family = socket.AF_INET6 if ipaddress.ip_address(peer).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:
        route.connect((peer, ANY_PORT))
        return str(route.getsockname()[0])


def address_by_mpi(peer: str, num_nodes: int, environment: MutableMapping[str, str] = os.environ) -> str:
    """This node's address towards the first of its step, after all nodes of the step have connected to that one.

    MPI is over when this returns, and what started it is taken out of ``environment``: a child that asked for MPI would
    believe that it is this process.

    Args:
        peer: an address of the cluster, for the first node.
        num_nodes: tasks of the step, one on each node.

    Raises:
        ConfigError: mpi4py is not installed.
        AttemptFailed: MPI has not joined the nodes, or some of them do not reach the first; names them.
    """
    mpi = optional("mpi4py.MPI", extra="mpi", what="cluster.mpi")
    try:
        return meet(mpi.COMM_WORLD, peer, num_nodes)
    finally:
        mpi.Finalize()
        for name in [name for name in environment if name.startswith(PMI_VARIABLES)]:
            del environment[name]


def meet(world: Any, peer: str, num_nodes: int) -> str:
    """``address_by_mpi`` among the members of ``world``, a communicator of mpi4py."""
    if world.size != num_nodes:
        raise AttemptFailed(
            f"MPI has made a world of {world.size} where srun started {num_nodes} tasks, so its library does not speak "
            "this PMI; set cluster.mpi to another of `srun --mpi=list`, or to nothing"
        )
    with ExitStack() as open_until_all_have_tried:
        told = None
        if world.rank == 0:
            host = address_towards(peer)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, 0), family=family, backlog=num_nodes)  # nobody is taken, all may come
            open_until_all_have_tried.enter_context(server)
            told = server.getsockname()[:2]
        first, port = world.bcast(told, root=0)
        own = address_towards(first)
        problems = world.allgather(_problem(own, first, port))
    if found := [problem for problem in problems if problem]:
        raise AttemptFailed(f"{'; '.join(found)}: nodes must reach each other; ask your site's support for the network")
    return own


def _problem(own: str, first: str, port: int) -> str:
    """Why this node cannot connect to the first one; empty if it can."""
    try:
        with socket.create_connection((first, port), CONNECT_S):
            return ""
    except OSError as error:
        return f"{socket.gethostname()} ({own}) does not reach {first}: {error}"


def torchrun_variables(rank: int, world_size: int, local: tuple[int, int], host: str, port: int) -> dict[str, str]:
    """What torchrun tells a process, and torch's ``env://`` reads (torch.distributed, "Environment variable
    initialization"), of a store that rank 0 hosts already.

    Args:
        local: number of the rank's device among those that it sees, and how many ranks share them.
    """
    local_rank, local_world_size = local
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": unbracketed(host),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is to join the store as well, and not to host another
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
