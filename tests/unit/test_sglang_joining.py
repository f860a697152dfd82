"""SGLang's schedulers enter weight groups within our limit: SGLang's objects are stand-ins, the groups are gloo's."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import fork_server

from areal_hpc.collective import host_store, join_group, leave_group, limit_of
from areal_hpc.generation.served import entering
from areal_hpc.generation.sglang.joining import FORMING, Joining, join_patiently
from areal_hpc.transfer import GroupAddress

THEIRS = "what SGLang itself does"
LIMIT_S = 120.0
"""The trainer's process is started while an engine waits for it already."""


@dataclass
class Scheduler:
    """One rank of an engine."""

    tp_rank: int
    joining: Joining
    groups: dict[str, Any] = field(default_factory=dict)
    others: list[bool] = field(default_factory=list)
    """Votes of the engine's other ranks, one after the other; afterwards they say yes."""

    def updater(self) -> Any:
        runner = SimpleNamespace(tp_rank=self.tp_rank, _model_update_group=self.groups)
        return SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(weight_updater=runner)), tp_cpu_group=self.others
        )

    def join(self, address: GroupAddress, rank_offset: int = 1) -> Any:
        request = SimpleNamespace(
            master_address=address.host,
            master_port=address.port,
            group_name=address.name,
            world_size=address.world_size,
            backend=address.backend,
            rank_offset=rank_offset,
        )
        return self.joining.join(lambda *_: pytest.fail("SGLang's own way in"), self.updater(), request)

    def leave(self, name: str) -> Any:
        return self.joining.leave(lambda *_: THEIRS, self.updater(), SimpleNamespace(group_name=name))


@pytest.fixture(autouse=True)
def structs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.io_struct")
    for name in ("InitWeightsUpdateGroupReqOutput", "DestroyWeightsUpdateGroupReqOutput"):
        vars(module)[name] = SimpleNamespace
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dist, "all_reduce", vote)


def vote(agreed: torch.Tensor, operation: Any, *, group: list[bool]) -> None:
    assert operation == dist.ReduceOp.MIN
    agreed.mul_(int(group.pop(0) if group else True))


@pytest.fixture
def store() -> Any:
    return host_store(timeout_s=LIMIT_S)


def address_of(store: Any, name: str) -> GroupAddress:
    return GroupAddress(host="127.0.0.1", port=store.port, name=name, world_size=2, backend="gloo")


def until(asked: Callable[[], Any]) -> Any:
    """The first answer that is none of a group that is forming."""
    deadline = time.monotonic() + LIMIT_S
    while (told := asked()).message == FORMING:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return told


def sends(address: GroupAddress) -> None:
    """The trainer's side, in a process of its own."""
    group = join_group(address, 0, LIMIT_S)
    dist.broadcast(torch.arange(3.0), group=group, group_src=0)
    leave_group(group)


def takes_part(engine: Scheduler, address: GroupAddress) -> None:
    """The group forms, and what is sent comes."""
    with ProcessPoolExecutor(1, mp_context=fork_server()) as trainer:
        sent = trainer.submit(sends, address)
        assert until(lambda: engine.join(address)).success
        received = torch.zeros(3)
        dist.broadcast(received, group=engine.groups[address.name], group_src=0)
        sent.result(LIMIT_S)
    assert received.tolist() == [0.0, 1.0, 2.0]


def test_a_scheduler_is_not_held_up_by_a_group_that_forms_and_is_a_member_when_it_has(store: Any) -> None:
    engine, address = Scheduler(0, Joining(limit_s=LIMIT_S)), address_of(store, "w-1-0")
    assert [engine.join(address).message for _ in range(3)] == [FORMING] * 3
    assert engine.groups == {}
    takes_part(engine, address)
    assert [engine.join(address).success for _ in range(2)] == [True, True], "it is asked while others are not so far"
    leave_group(engine.groups["w-1-0"])


def test_D24_a_partition_is_over_for_the_engine_within_our_limit_and_not_within_torchs(store: Any) -> None:
    """Nobody else comes: the trainer is cut off. Torch alone would wait for half an hour with gloo."""
    engine = Scheduler(0, Joining(limit_s=0.5))
    address = address_of(store, "w-1-1")
    told = until(lambda: engine.join(address))
    assert not told.success
    assert f"group 'w-1-1' at 127.0.0.1:{store.port} did not form within 0.5 s, seen from host" in told.message
    assert engine.groups == {}
    assert engine.join(address).message == told.message
    engine.joining.limit_s = LIMIT_S
    takes_part(engine, address_of(store, "w-1-2"))
    leave_group(engine.groups["w-1-2"])


def test_a_group_that_nobody_wants_any_more_keeps_none_waiting_that_comes_after_it(store: Any) -> None:
    engine = Scheduler(0, Joining(limit_s=LIMIT_S))
    assert engine.join(address_of(store, "w-1-3")).message == FORMING
    takes_part(engine, address_of(store, "w-1-4"))
    assert engine.join(address_of(store, "w-1-3")).message == FORMING
    takes_part(engine, address_of(store, "w-1-3"))
    for group in engine.groups.values():
        leave_group(group)


def test_a_group_that_is_left_while_it_forms_has_no_member_here_once_it_has(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, joined = threading.Event(), list[Any]()

    def join_late(address: GroupAddress, rank: int, limit_s: float, *, card: str) -> Any:
        assert come.wait(LIMIT_S)
        joined.append(join_group(address, rank, limit_s, card=card))
        return joined[0]

    monkeypatch.setattr(entering, "join_group", join_late)
    engine, address = Scheduler(0, Joining(limit_s=LIMIT_S)), replace(address_of(store, "w-1-5"), world_size=1)
    assert engine.join(address, rank_offset=0).message == FORMING
    assert engine.leave("another") == engine.leave(address.name) == THEIRS
    told = engine.join(address, rank_offset=0)
    assert (told.success, told.message) == (False, "group 'w-1-5' was left before it had formed")
    come.set()
    deadline = time.monotonic() + LIMIT_S
    while not joined or limit_of(joined[0]) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert (engine.groups, engine.joining.entering) == ({}, {})


def test_a_group_is_left_while_a_member_hangs_in_it(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's way to destroy one waits for its operations, and holds the lock that would end them; to abort does not."""
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: pytest.fail("it waits for who hangs"))
    engine, address = Scheduler(0, Joining(limit_s=LIMIT_S)), replace(address_of(store, "w-1-6"), world_size=1)
    assert until(lambda: engine.join(address, rank_offset=0)).success
    group, aborted = engine.groups[address.name], list[Any]()

    def abort(self: Any) -> None:
        aborted.append(self)

    monkeypatch.setattr(dist.ProcessGroup, "abort", abort)
    assert engine.leave(address.name).success
    assert (aborted, engine.groups, limit_of(group)) == ([group], {}, None)
    assert engine.leave(address.name) == THEIRS, "a second time it is none that it knows"


@pytest.mark.parametrize("all_enter", [True, False])
def test_the_first_rank_tells_what_became_of_all_since_it_alone_is_heard(store: Any, all_enter: bool) -> None:
    """What is sent to a group that another rank does not have, that rank would never receive."""
    engine = Scheduler(0, Joining(limit_s=LIMIT_S))
    address = replace(address_of(store, f"w-2-{all_enter}"), world_size=1)
    engine.others += [False, False, True, all_enter]  # not so far twice; so far; and has the group, or has it not
    assert engine.join(address, rank_offset=0).message == FORMING
    engine.joining.entering[address].result(LIMIT_S)
    assert engine.join(address, rank_offset=0).message == FORMING
    assert engine.groups == {}
    told = engine.join(address, rank_offset=0)
    assert engine.others == []
    assert told.success is all_enter
    assert list(engine.groups) == ([address.name] if all_enter else [])
    assert all_enter or told.message == "another rank of this engine did not enter group 'w-2-False'"
    for group in engine.groups.values():
        leave_group(group)


def test_who_asked_is_answered_when_every_rank_has_an_answer() -> None:
    told = iter(
        [
            (False, f"{FORMING} | {FORMING}"),
            (False, f"Joined group w. | {FORMING}"),
            (False, "Joined group w. | it did not form"),
        ]
    )
    asked: list[Any] = []

    async def original(tokenizer: str, request: str, *more: Any) -> tuple[bool, str]:
        asked.append((tokenizer, request, *more))
        return next(told)

    outcome = asyncio.run(join_patiently(original, "the tokenizer", "the request", None))
    assert outcome == (False, "Joined group w. | it did not form")
    assert asked == [("the tokenizer", "the request", None)] * 3
