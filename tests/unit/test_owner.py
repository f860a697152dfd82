"""Whether the process that owns a run is gone, where pids are reused and hosts reboot."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from areal_hpc.cluster.owner import Machine, Owner, namesakes, start_ticks


def me(**changes: Any) -> Owner:
    return dataclasses.replace(Owner.this_process(), **changes)


def test_this_process_is_there_and_says_so_in_plain_data() -> None:
    owner = Owner.this_process()
    assert owner.pid == os.getpid()
    assert not owner.is_gone()
    assert Owner.from_record({**json.loads(json.dumps(owner.record())), "state": "running"}) == owner


def test_the_start_time_is_the_kernel_s() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    assert since_boot + psutil.boot_time() == pytest.approx(psutil.Process().create_time(), abs=2.0)


def test_a_name_with_a_parenthesis_and_spaces_does_not_confuse_it() -> None:
    code = "open('/proc/self/comm', 'w').write('x) Z 0 (y'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert start_ticks(child.pid) == pytest.approx(start_ticks(os.getpid()), abs=10**6)
        child.communicate(b"\n")


def test_a_pid_that_another_process_has_now_is_not_the_owner() -> None:
    assert me(start_ticks=1).is_gone()


def test_a_process_that_ended_is_gone_also_while_it_is_a_zombie() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    owner = me(pid=child.pid, start_ticks=ticks)
    assert not owner.is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has reaped it
    assert owner.is_gone()
    child.communicate()
    assert owner.is_gone()


def test_nothing_survives_a_reboot_of_its_host() -> None:
    assert me(boot="another").is_gone()


def test_what_became_of_a_process_on_another_host_cannot_be_known() -> None:
    assert not me(host="node17", start_ticks=1, boot="another").is_gone()


def test_fault_29_different_machines_of_one_name_are_told_apart_by_their_boots() -> None:
    one, clone, other = Machine("node", "a"), Machine("node", "b"), Machine("other", "c")
    assert namesakes({"n1": one, "n2": other}) == ""
    assert namesakes({"n1": one, "n2": one}) == "", "one machine may be several nodes, as in a test of Slurm"
    found = namesakes({"n3": clone, "n1": one, "n2": other})
    assert found.startswith("different machines have one hostname: n1 and n3, all named node; give each a name")
    assert Machine.here() == Machine(me().host, me().boot)
