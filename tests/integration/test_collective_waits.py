"""Faults 46 and 47: who waits in a collective is told from outside, by a thread of a process that is stuck in C."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from torch.distributed import ProcessGroup

from areal_hpc.collective import host_store
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.embedded.updates import WeightUpdates
from areal_hpc.training.ranks import Ranks
from areal_hpc.transfer import GroupAddress
from areal_hpc.waits import Wait, open_waits
from tests.ranks import run_ranks

LIMIT_S = 60.0


def until_open(parties: tuple[str, ...]) -> Wait:
    """The open wait of this process for ``parties``, as soon as there is one."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := [wait for wait in open_waits() if wait.parties == parties]):
        assert time.monotonic() < deadline, open_waits()
        time.sleep(0.01)
    return found[0]


def meet(group: ProcessGroup, directory: str) -> dict[str, Any] | None:
    """Rank 1 comes only when rank 0 has told, from a thread, that it is waited for."""
    ranks, told = Ranks(group), Path(directory) / "told.json"
    if ranks.rank == 1:
        deadline = time.monotonic() + LIMIT_S
        while not told.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks.barrier()
        return None

    def tell() -> None:
        wait = until_open(("trainer-1",))
        (Path(directory) / "part").write_text(json.dumps({"what": wait.what, "limit_s": wait.limit_s}))
        (Path(directory) / "part").rename(told)

    watcher = threading.Thread(target=tell)
    watcher.start()
    ranks.barrier()
    watcher.join()
    assert not [wait for wait in open_waits() if wait.parties == ("trainer-1",)]
    return cast(dict[str, Any], json.loads(told.read_text()))


def test_fault_47_a_rank_in_a_collective_says_for_whom_it_waits(tmp_path: Path) -> None:
    told, _ = run_ranks(2, meet, str(tmp_path))
    assert told == {"what": "all ranks to agree", "limit_s": 60.0}  # the limit that the group was made with


def test_fault_46_an_engine_says_which_group_does_not_form_and_gives_up_in_time(tmp_path: Path) -> None:
    """The trainer hosts the store and never joins."""
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="w-1-0", world_size=2, backend="gloo")
    updates = WeightUpdates(cast(Any, None), cast(Any, None), timeout_s=3.0)
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except WeightUpdateError as error:
            failures.append(error)

    joining = threading.Thread(target=run, args=(lambda: updates.join(address, 1),))
    joining.start()
    wait = until_open(("trainer-0",))
    assert (wait.what, wait.limit_s) == ("group w-1-0 to form", 3.0)
    joining.join(LIMIT_S)
    assert not joining.is_alive()
    with pytest.raises(WeightUpdateError, match=r"group 'w-1-0' at 127\.0\.0\.1:\d+ did not form within 3 s"):
        raise failures[0]
    assert not [wait for wait in open_waits() if wait.parties == ("trainer-0",)]
