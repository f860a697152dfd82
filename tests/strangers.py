"""Another user of the machine, who tries every port of a run without its secret."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import psutil

SILENT, REFUSED, OPEN = "silent", "refused", "open"
CONNECT_S = 0.5
"""Far more than it takes on one machine, whose kernel alone makes a connection, where there is to be one."""
ANSWER_S = 5.0


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, int]]:
    """Every address at which one of them, or of those that they have started, takes TCP connections."""
    every = {one for process in processes for one in (process, *process.children(recursive=True))}
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in every
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def reception(address: tuple[str, int]) -> str:
    """What becomes of a stranger there: nobody listens to him, an HTTP server wants a key of him, or he is let in."""
    try:
        connection = socket.create_connection(address, CONNECT_S)
    except TimeoutError:
        return SILENT
    with connection:
        connection.settimeout(ANSWER_S)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
        try:
            return REFUSED if connection.recv(12) == b"HTTP/1.1 401" else OPEN
        except (TimeoutError, ConnectionResetError):  # who listens here has taken it, and speaks another language
            return OPEN


def receptions(*processes: psutil.Process) -> set[str]:
    """What a stranger meets at their ports, all of which he tries at once."""
    with ThreadPoolExecutor(64) as pool:
        return set(pool.map(reception, listening(processes)))


if __name__ == "__main__":
    print(*sorted(receptions(*(psutil.Process(int(pid)) for pid in sys.argv[1:]))))
