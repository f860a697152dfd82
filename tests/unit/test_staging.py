"""Weight updates beside sampling in SGLang's scheduler: SGLang's objects and the network are stand-ins."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from frozen_models import FrozenModel

from areal_hpc.buckets import Bucket, plan_buckets
from areal_hpc.delta import difference
from areal_hpc.generation import manifest
from areal_hpc.generation.served import arrivals, merging
from areal_hpc.generation.served.arrivals import Arrivals
from areal_hpc.generation.sglang.staging import Staged
from areal_hpc.pretrained.files import read_weights
from areal_hpc.transfer import Reception
from areal_hpc.weights.baseline import DeltaBaseline
from areal_hpc.weights.disk import DiskTransport

ANSWERS = (
    "BeginWeightUpdateReqOutput",
    "UpdateWeightsFromDistributedReqOutput",
    "EndWeightUpdateReqOutput",
    "UpdateWeightFromDiskReqOutput",
)
WEIGHTS = {"a": torch.arange(60.0).view(20, 3), "b": torch.arange(5.0)}
LIMIT_S = 20.0
THEIRS = "what SGLang itself does"


@dataclass
class Runner:
    """SGLang's updater of one model: notes how it is taken apart, loaded and put together."""

    _model_update_group: dict[str, str] = field(default_factory=lambda: {"w": "the group"})
    device: str = "cpu"
    done: list[str] = field(default_factory=list)
    model: dict[str, torch.Tensor] = field(default_factory=dict)
    refuses: str = ""

    def begin_weight_update(self) -> None:
        self.done.append("begin")

    def load_weights_from_distributed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> tuple[bool, str]:
        self.done.append("load")
        self.model |= {name: tensor.clone() for name, tensor in weights}
        return not self.refuses, self.refuses

    def end_weight_update(self, *, run_post_load: bool) -> None:
        assert not run_post_load
        self.done.append("end")


class World:
    """One scheduler of an engine and what reaches it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, keeps: bool = False, limit_s: float = LIMIT_S, adapters: Any = None
    ) -> None:
        self.staged = Staged(limit_s=limit_s, keeps=keeps, adapters=adapters)
        self.runner, self.noted = Runner(), list[Any]()
        self.sent: queue.Queue[torch.Tensor | None] = queue.Queue()
        self.others_agree, self.votes = True, list[bool]()
        inner = SimpleNamespace(weight_updater=self.runner)
        self.updater = SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=inner),
            tp_cpu_group="the ranks",
            _select_runners=lambda: [("target", inner)],
            flush_cache_after_weight_update=lambda _: self.noted.append("flush"),
            record_weight_version_after_update=self.noted.append,
        )
        structs = ModuleType("sglang.srt.managers.io_struct")
        for name in ANSWERS:
            setattr(structs, name, SimpleNamespace)
        for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, structs.__name__, structs)
        monkeypatch.setattr(arrivals, "broadcast", self._broadcast)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)

    def _broadcast(self, buffer: torch.Tensor, group: str) -> None:
        assert group == "the group"
        sent = self.sent.get(timeout=LIMIT_S)
        if sent is None:
            raise RuntimeError("connection closed by peer")
        buffer.copy_(sent)

    def _all_reduce(self, agreed: torch.Tensor, _: Any, *, group: str) -> None:
        assert group == "the ranks"
        self.votes.append(bool(agreed.item()))
        agreed.mul_(int(self.others_agree))

    def begin(self) -> Any:
        return self.staged.begin(theirs, self.updater, SimpleNamespace())

    def announce(self, bucket: Bucket, *, load_format: str = "", group: str = "w") -> Any:
        """What the client asks; nothing is sent yet."""
        request = SimpleNamespace(
            names=[spec.name for spec in bucket.specs],
            dtypes=[spec.dtype for spec in bucket.specs],
            shapes=[list(spec.shape) for spec in bucket.specs],
            group_name=group,
            load_format=load_format or manifest.written(bucket.specs),
        )
        return self.staged.receive(theirs, self.updater, request)

    def end(self) -> Any:
        return self.staged.end(theirs, self.updater, SimpleNamespace())

    def update(self, weights: dict[str, Any]) -> Any:
        assert self.begin().success
        bucket = one(weights)
        assert self.announce(bucket).success
        self.sent.put(bucket.buffer)
        return self.end()

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        model = self.runner.model
        return model.keys() == weights.keys() and all(torch.equal(model[name], weights[name]) for name in weights)


def theirs(*_: Any) -> str:
    return THEIRS


def one(weights: dict[str, Any]) -> Bucket:
    (bucket,) = plan_buckets(weights.items(), 1 << 20)
    return bucket


Make = Callable[..., World]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **options: World(monkeypatch, **options)


def test_a_bucket_is_answered_before_it_has_come_and_the_model_is_not_touched_before_the_end(make: Make) -> None:
    world = make()
    first, second = one({"a": WEIGHTS["a"]}), one({"b": WEIGHTS["b"]})
    assert world.begin().success
    assert [world.announce(bucket).success for bucket in (first, second)] == [True, True]
    assert world.runner.done == []
    for bucket in (first, second):
        world.sent.put(bucket.buffer)
    assert world.end().success
    assert world.runner.done == ["begin", "load", "end"]
    assert world.holds(WEIGHTS)
    assert world.end() == THEIRS, "no update is open"


def test_a_bucket_comes_to_the_device_that_the_scheduler_has_chosen(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang calls its device "cuda", which is the first one in every thread that has chosen no other."""
    world, bucket, told = make(), one(WEIGHTS), list[torch.device]()
    scheduler = threading.get_ident()

    def empty(_: int, *, device: str) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device(device, 3 if threading.get_ident() == scheduler else 0))

    def receive(_: Arrivals, group: str, specs: Any, device: torch.device | str, *, checked: bool) -> None:
        told.append(torch.device(device))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(Arrivals, "receive", receive)
    world.runner.device = "cuda"
    assert world.begin().success
    assert world.announce(bucket).success
    wait(world.staged.coming)
    assert told == [torch.device("cuda", 3)]


def test_changes_alone_are_taken_where_the_weights_are_kept_and_refused_where_they_are_not(make: Make) -> None:
    after = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    after["a"][3] = -1.0
    changes = {"a": difference(WEIGHTS["a"], after["a"]), "b": after["b"]}
    world = make(keeps=True)
    assert world.update(WEIGHTS).success
    assert world.update(changes).success
    assert world.holds(after)
    forgetful = make(keeps=False)
    assert forgetful.update(WEIGHTS).success
    told = forgetful.update(changes)
    assert (told.success, "of which nothing is held; send it whole" in told.message) == (False, True)
    assert forgetful.holds(WEIGHTS)


def test_what_comes_whole_takes_the_place_of_what_was_kept(make: Make) -> None:
    """A rank's host memory has room for one model, not for two."""
    world = make(keeps=True)
    assert world.update(WEIGHTS).success
    assert world.begin().success
    first = one({"a": WEIGHTS["a"]})
    assert world.announce(first).success
    world.sent.put(first.buffer)
    wait(world.staged.coming)
    arrivals = world.staged.arrivals
    assert (arrivals.base.keys(), arrivals.new.keys()) == ({"b"}, {"a"})


def fails_on_its_way(world: World, bucket: Bucket) -> None:
    world.sent.put(None)


def arrives_damaged(world: World, bucket: Bucket) -> None:
    damaged = bucket.buffer.clone()
    damaged[7] ^= 1
    world.sent.put(damaged)


def is_missed_by_another_rank(world: World, bucket: Bucket) -> None:
    world.others_agree = False
    world.sent.put(bucket.buffer)


def never_comes(world: World, bucket: Bucket) -> None:
    """Nothing is sent."""


@pytest.mark.parametrize(
    ("fate", "why"),
    [
        (fails_on_its_way, "a bucket was not received: connection closed by peer"),
        (arrives_damaged, "'a' arrived with other bytes than were sent"),
        (is_missed_by_another_rank, "another rank of this engine has not got all"),
        (never_comes, "1 buckets are late"),
    ],
)
def test_D20_what_has_not_arrived_whole_on_every_rank_changes_nothing_and_the_next_update_does(
    make: Make, fate: Callable[[World, Bucket], None], why: str
) -> None:
    world = make(limit_s=0.3 if fate is never_comes else LIMIT_S)
    bucket = one(WEIGHTS)
    assert world.begin().success
    assert world.announce(bucket).success
    fate(world, bucket)
    told = world.end()
    assert (told.success, why in told.message) == (False, True), told.message
    assert world.runner.done == []
    if fate is never_comes:
        assert "still coming" in world.begin().message, "two threads would write into one model's arrivals"
        num_votes = len(world.votes)
        assert "still coming" in world.end().message
        assert world.votes[num_votes:] == [False], "the other ranks may have begun, and would wait for this one"
        world.sent.put(None)
    world.others_agree, world.staged.limit_s = True, LIMIT_S
    assert world.update(WEIGHTS).success
    assert world.holds(WEIGHTS)


def test_an_update_that_is_begun_anew_forgets_what_had_come(make: Make) -> None:
    world = make()
    assert world.begin().success
    stranger = one({"a": torch.full((20, 3), 9.0), "c": torch.ones(2)})
    assert world.announce(stranger).success
    world.sent.put(stranger.buffer)
    assert world.update(WEIGHTS).success
    assert world.holds(WEIGHTS)


def test_what_is_refused_while_it_is_loaded_is_said_and_no_longer_kept(make: Make) -> None:
    world = make(keeps=True)
    assert world.update(WEIGHTS).success
    world.runner.refuses = "no such parameter"
    told = world.update(WEIGHTS)
    assert (told.success, told.message) == (False, "no such parameter")
    assert world.runner.done[-1] == "end", "the model is put together all the same"
    world.runner.refuses = ""
    told = world.update({"b": difference(WEIGHTS["b"], WEIGHTS["b"] + 1)})
    assert (told.success, "send it whole" in told.message) == (False, True)


def test_what_is_not_ours_is_sglangs_own_affair(make: Make) -> None:
    world = make()
    bucket = one(WEIGHTS)
    assert world.announce(bucket, load_format="flattened_bucket") == THEIRS
    assert not world.announce(bucket).success, "no update is open"
    assert world.begin().success
    told = world.announce(bucket, group="stranger")
    assert (told.success, "no group 'stranger'" in told.message) == (False, True)
    assert not world.end().success
    assert world.votes == [False]


class Target:
    """An engine as the disk transport sees it: hands directories on."""

    name, num_ranks = "engine-0", 1

    def __init__(self, world: World) -> None:
        self.world = world

    async def prepare(self) -> Reception:
        return Reception(stages=True, proves=True)

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    async def load_directory(self, path: str, version: int) -> None:
        request = SimpleNamespace(model_path=path, weight_version=str(version))
        told = self.world.staged.read(theirs, self.world.updater, request)
        assert told.success, told.message


def test_changes_alone_are_read_from_a_directory_too_and_a_checkpoint_is_sglangs_to_read(
    make: Make, tmp_path: Path
) -> None:
    world = make(keeps=True)
    targets: Any = [Target(world)]
    transport = DiskTransport(
        tmp_path / "weights", targets, epoch=1, timeout_s=20, baseline=DeltaBaseline(whole_every=8)
    )
    after = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    after["a"][3] = -1.0
    whole = asyncio.run(transport.publish(1, iter(WEIGHTS.items())))
    changes = asyncio.run(transport.publish(2, iter(after.items())))
    assert (whole["bytes_saved"], changes["bytes_saved"] > 0) == (0, True)
    assert world.holds(after)
    assert world.noted == ["flush", "1", "flush", "2"]
    assert world.votes == [False, True, True] * 2, "not SGLang's to read; that it has all, and that it has loaded it"
    checkpoint = SimpleNamespace(model_path=str(tmp_path))
    assert world.staged.read(theirs, world.updater, checkpoint) == THEIRS


def test_a_file_that_is_cut_short_is_taken_by_no_rank(make: Make, tmp_path: Path) -> None:
    world = make(keeps=True)
    targets: Any = [Target(world)]
    transport = DiskTransport(tmp_path / "weights", targets, epoch=1, timeout_s=20)
    asyncio.run(transport.publish(1, iter(WEIGHTS.items())))
    (directory,) = [path for path in (tmp_path / "weights").iterdir() if path.is_dir()]
    for file in directory.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    world.votes.clear()
    told = world.staged.read(theirs, world.updater, SimpleNamespace(model_path=str(directory), weight_version="2"))
    assert not told.success and "cannot be taken" in told.message
    assert world.votes == [False, False]


def test_an_update_that_one_rank_does_not_see_yet_is_taken_by_no_rank(make: Make, tmp_path: Path) -> None:
    world = make(keeps=True)
    world.others_agree = False
    told = world.staged.read(theirs, world.updater, SimpleNamespace(model_path=str(tmp_path), weight_version="2"))
    assert not told.success and "cannot be taken" in told.message
    assert world.votes == [True, False], "by itself it would have had SGLang read the directory"
    assert world.noted == []


def test_adapters_that_come_alone_are_loaded_as_the_weights_that_they_make(make: Make, tmp_path: Path) -> None:
    """Over both ways; with changes of them alone, too. The judge of ``Merging`` is in its own tests."""
    model = FrozenModel(tmp_path / "model")
    world = make(keeps=True, adapters=model.order)
    first, second = model.adapters(1), model.adapters(1)
    second["model.q_proj.lora_B.weight"][3, 1] = 9.0
    assert world.update(first).success
    assert world.holds(model.with_adapters(first))
    changes = {name: difference(first[name], second[name]) for name in first}
    assert world.update(changes).success
    assert world.holds(model.with_adapters(second))
    third = model.adapters(3)
    targets: Any = [Target(world)]
    transport = DiskTransport(tmp_path / "weights", targets, epoch=1, timeout_s=20, stands_for=1_000_000)
    told = asyncio.run(transport.publish(4, iter(third.items())))
    assert told["bytes"] == sum(tensor.nbytes for tensor in third.values())
    assert told["bytes_saved"] == 1_000_000 - told["bytes"]
    assert world.holds(model.with_adapters(third))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lora_base": torch.tensor([3])}, "the adapters are of other weights than those in"),
        ({"model.q_proj.lora_A.weight": torch.zeros(3, 4)}, "are not the adapters of"),
        ({"model.q_proj.lora_A.weight": None}, "are not the adapters of"),
    ],
)
def test_D20_adapters_that_do_not_belong_change_nothing_and_the_right_ones_do(
    make: Make, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    model = FrozenModel(tmp_path / "model")
    world = make(adapters=model.order)
    right = model.adapters(1)
    assert world.update(right).success
    world.runner.done.clear()
    wrong = {name: tensor for name, tensor in (model.adapters(2) | change).items() if tensor is not None}
    told = world.update(wrong)
    assert (told.success, why in told.message) == (False, True), told.message
    assert world.runner.done == [] and world.holds(model.with_adapters(right))
    assert world.update(right).success


def test_frozen_weights_that_are_not_read_in_time_are_so_the_next_time(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, may_read = FrozenModel(tmp_path / "model"), threading.Event()
    world = make(adapters=model.order, limit_s=0.2)

    def slowly(directory: Path) -> Any:
        may_read.wait(LIMIT_S)
        return read_weights(directory)

    monkeypatch.setattr(merging, "read_weights", slowly)
    told = world.update(model.adapters(1))
    assert (told.success, "are still being read" in told.message) == (False, True)
    may_read.set()
    world.staged.limit_s = LIMIT_S
    assert world.update(model.adapters(1)).success
    assert world.holds(model.with_adapters(model.adapters(1)))
