"""What another user of the machine gets from the ports of a run, and of a process of torch by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import LIMIT_S, Launched, launched
from signed import library_in
from strangers import OPEN, REFUSED, SILENT, reception, receptions

from areal_hpc.signing import signing_variables

STORE = """
import sys, socket
from areal_hpc.collective import host_store
store = host_store("{host}", timeout_s=60)
ours = socket.create_server(("127.0.0.1", 0))
print(store.port, ours.getsockname()[1], store.num_keys(), flush=True)
sys.stdin.read()
print(store.num_keys())
"""
CLIENT = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=2))
store.set("met", "yes")
"""
TWO_RANKS = ("trainer.ranks=2", "algorithm.minibatches=2", "trainer.total_steps=1000")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library_in(tmp_path_factory.mktemp("attempt"))


def key_in(directory: Path, key: str) -> Path:
    path = directory / key
    path.write_text(key, encoding="ascii")
    return path


def started(code: str, variables: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def met_at(started: Launched) -> dict[str, set[str]]:
    """By role, what a stranger meets at the ports of its process."""
    return {name: receptions(process) for name, process in started.roles().items()}


@pytest.mark.usefixtures("library")
def test_every_port_of_a_run_asks_for_its_secret(model: Path, tmp_path: Path) -> None:
    """Stores of torch, gloo's pairs, HTTP: the run trains on while a stranger tries them all."""
    with launched(tmp_path, model, *TWO_RANKS, "cluster.sign_sockets=always") as started:
        started.wait_for_step(1)
        met = met_at(started)
        assert met["trainer-0"] == met["trainer-1"] == {SILENT}
        assert met["generator-0"] == {SILENT, REFUSED}
        assert OPEN not in set().union(*met.values()), met
        started.wait_for_step(max(record.number("step") or 0 for record in started.records("step")) + 2)


def test_without_signatures_whoever_reaches_the_ports_of_torch_is_let_in(model: Path, tmp_path: Path) -> None:
    with launched(tmp_path, model, *TWO_RANKS, "cluster.sign_sockets=never") as started:
        started.wait_for_step(1)
        met = met_at(started)
        assert not started.run.attempt(1).signing.exists()
    assert SILENT not in set().union(*met.values())
    assert OPEN in met["trainer-0"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_store_of_torch_hears_who_has_its_key_and_nobody_else(library: Path, tmp_path: Path, host: str) -> None:
    """``::`` takes IPv4 peers as well. Python's own sockets, which HTTP goes through, are as ever."""
    ours = signing_variables(library, key_in(tmp_path, "ours"), {})
    theirs = signing_variables(library, key_in(tmp_path, "theirs"), {})
    store = started(STORE.format(host=host), ours)
    assert store.stdout is not None
    at, plain, keys = map(int, store.stdout.readline().split())
    clients = {"ours": started(CLIENT, ours, str(at)), "theirs": started(CLIENT, theirs, str(at))}
    assert reception(("127.0.0.1", at)) == SILENT
    assert reception(("127.0.0.1", plain)) == OPEN
    ended = {name: (client.communicate(timeout=LIMIT_S)[1], client.returncode) for name, client in clients.items()}
    assert ended["ours"][1] == 0, ended["ours"][0]
    assert ended["theirs"][1] != 0
    assert "timed out" in ended["theirs"][0]
    assert int(store.communicate("", timeout=LIMIT_S)[0]) == keys + 1, "who has the key has set one"


def test_a_socket_that_cannot_be_given_the_key_does_not_listen(library: Path, tmp_path: Path) -> None:
    store = started(STORE.format(host="127.0.0.1"), signing_variables(library, tmp_path / "none", {}))
    assert "no such file or directory" in store.communicate(timeout=LIMIT_S)[1]
    assert store.returncode != 0


def test_without_a_key_in_its_environment_a_process_is_as_ever(library: Path) -> None:
    store = started(STORE.format(host="127.0.0.1"), {"LD_PRELOAD": str(library)})
    assert store.stdout is not None
    assert reception(("127.0.0.1", int(store.stdout.readline().split()[0]))) == OPEN
    store.communicate("", timeout=LIMIT_S)
    assert store.returncode == 0
