from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_hpc.delta import checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.transfer import GroupAddress, Reception, TensorSpec
from areal_hpc.weight_files import MANIFEST
from areal_hpc.weights.disk import DiskTransport

WEIGHTS = {"b": torch.arange(6.0).reshape(2, 3).t(), "a": torch.ones(4, dtype=torch.bfloat16), "empty": torch.empty(0)}


class Target:
    """An engine that notes what it is told and loads what it is shown."""

    num_ranks = 1

    def __init__(self, name: str, log: list[str], refuses: str = "") -> None:
        self.name, self.log, self.refuses = name, log, refuses
        self.loaded: dict[str, torch.Tensor] = {}

    def note(self, what: str) -> None:
        self.log.append(what)
        if what == self.refuses:
            raise WeightUpdateError(f"{self.name} refuses to {what}")

    async def prepare(self) -> Reception:
        return Reception(stages=False, proves=True)

    async def join(self, group: GroupAddress, rank_offset: int) -> None: ...

    async def leave(self, group_name: str) -> None: ...

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None: ...

    async def pause(self) -> None:
        self.note("pause")

    async def load_directory(self, path: str, version: int) -> None:
        self.note("load")
        assert Path(path).is_absolute()
        for file in sorted(Path(path).glob("*.safetensors")):
            self.loaded.update(load_file(file))

    async def resume(self, version: int) -> None:
        self.note(f"resume {version}")


def publish(transport: DiskTransport, *versions: int) -> None:
    for version in versions:
        asyncio.run(transport.publish(version, WEIGHTS.items()))


def test_a_version_lies_whole_in_its_directory_with_a_manifest(tmp_path: Path) -> None:
    target = Target("e", [])
    publish(DiskTransport(tmp_path / "w", [target], epoch=3, file_bytes=20), 12)
    [name] = os.listdir(tmp_path / "w")
    assert name == "v00000012.e00000003.0"
    for weight, value in WEIGHTS.items():
        assert torch.equal(target.loaded[weight], value)
        assert target.loaded[weight].dtype == value.dtype
    manifest = json.loads((tmp_path / "w" / name / MANIFEST).read_text())
    assert (manifest["version"], manifest["epoch"]) == (12, 3)
    sums = {weight: crc for file in manifest["files"].values() for weight, crc in file["crc32c"].items()}
    assert sums == {weight: checksum(value.contiguous()) for weight, value in WEIGHTS.items()}
    assert {file: entry["bytes"] for file, entry in manifest["files"].items()} == {
        path.name: path.stat().st_size for path in (tmp_path / "w" / name).glob("*.safetensors")
    }
    assert len(manifest["files"]) > 1


def test_engines_sample_on_until_the_version_is_written(tmp_path: Path) -> None:
    log: list[str] = []

    def produced() -> Iterator[tuple[str, torch.Tensor]]:
        log.append("first weight")
        yield "a", torch.ones(1)
        log.append("last weight")

    transport = DiskTransport(tmp_path, [Target("e", log)], epoch=1)
    told = asyncio.run(transport.publish(1, produced()))
    assert log == ["first weight", "last weight", "pause", "load", "resume 1"]
    assert told["seconds_paused"] < told["seconds"]


def test_the_newest_versions_stay_and_what_an_attempt_left_unfinished_goes(tmp_path: Path) -> None:
    (tmp_path / ".v00000099.e00000001.0.tmp").mkdir()
    (tmp_path / "v00000009.e00000001.0").mkdir()
    (tmp_path / "somebody-elses").mkdir()
    transport = DiskTransport(tmp_path, [Target("e", [])], epoch=2, keep=2)
    publish(transport, 7)
    assert sorted(os.listdir(tmp_path)) == ["somebody-elses", "v00000007.e00000002.0", "v00000009.e00000001.0"]
    publish(transport, 8, 8)
    assert sorted(os.listdir(tmp_path)) == ["somebody-elses", "v00000008.e00000002.1", "v00000008.e00000002.2"]


@pytest.mark.parametrize("refused", ["pause", "load", "resume 5"])
def test_an_engine_that_refuses_is_lost_and_the_others_are_brought_up_by_the_next(tmp_path: Path, refused: str) -> None:
    logs: list[list[str]] = [[], []]
    transport = DiskTransport(
        tmp_path, [Target("good", logs[0]), Target("bad", logs[1], refuses=refused)], epoch=1, keep=1
    )
    with pytest.raises(WeightUpdateError, match=f"bad refuses to {refused}.*Engines left: good"):
        publish(transport, 5)
    assert ("resume 5" in logs[0]) == (refused == "resume 5")  # the barrier: nobody goes on before all have loaded
    logs[0].clear()
    publish(transport, 5)
    assert logs[0] == ["pause", "load", "resume 5"]
    assert logs[1][-1] == refused
    assert list(transport.membership.lost) == ["bad"]


def test_an_engine_that_does_not_answer_is_named_when_the_limit_ends(tmp_path: Path) -> None:
    class Silent(Target):
        async def pause(self) -> None:
            await asyncio.Event().wait()

    transport = DiskTransport(tmp_path, [Silent("mute", [])], epoch=1, timeout_s=0.05)
    with pytest.raises(WeightUpdateError, match=r"engine mute did not pause in 0\.05 s"):
        publish(transport, 1)
    with pytest.raises(WeightUpdateError, match="no engine is left"):
        publish(transport, 1)


def test_a_version_that_cannot_be_written_leaves_the_engines_alone(tmp_path: Path) -> None:
    log: list[str] = []
    transport = DiskTransport(tmp_path / "w", [Target("e", log)], epoch=1)
    (tmp_path / "w").rmdir()
    with pytest.raises(OSError):
        publish(transport, 1)
    assert log == []
