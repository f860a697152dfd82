"""Weights by way of a directory into a real embedded engine: what a bad disk does to them is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from embedded_engines import FREE, PROMPT, MakeEngine, Models, complete, one
from safetensors.torch import load_file

from areal_hpc.delta import checksum
from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.embedded.engine import EmbeddedEngine
from areal_hpc.generation.embedded.scheduler import QUARANTINE
from areal_hpc.transfer import GroupAddress, Reception, TensorSpec
from areal_hpc.weights.disk import DiskTransport


class Target:
    """An engine whose disk changes one bit of every directory while ``bad``."""

    name, num_ranks = "engine-0", 1

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine, self.bad = engine, True

    async def prepare(self) -> Reception:
        return Reception(stages=True, proves=True)

    async def join(self, group: GroupAddress, rank_offset: int) -> None: ...

    async def leave(self, group_name: str) -> None: ...

    async def load_bucket(self, group_name: str, specs: Sequence[TensorSpec]) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    async def load_directory(self, path: str, version: int) -> None:
        if self.bad:
            (file,) = Path(path).glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        await asyncio.to_thread(
            lambda: self.engine.updates.load_directory(Path(path), str(version), flush_cache=True, abort_all=False)
        )


def test_D3_a_bit_that_turned_on_disk_is_named_with_its_tensor_and_the_next_update_heals(
    make_engine: MakeEngine, models: Models, tmp_path: Path
) -> None:
    engine = make_engine()
    target = Target(engine)
    transport = DiskTransport(tmp_path / "weights", [target], epoch=1)
    weights = load_file(models["new"][0] / "model.safetensors")
    with pytest.raises(WeightUpdateError, match=r"weight '[\w.]+' in .*/v00000002\S+ has other bytes than the trainer"):
        asyncio.run(transport.publish(2, weights.items()))
    assert QUARANTINE in engine.scheduler.holds
    target.bad = False
    transport.membership.admit(target)
    asyncio.run(transport.publish(3, weights.items()))
    assert QUARANTINE not in engine.scheduler.holds
    held = engine.updates.checksums()
    assert {name: held[name] for name in weights} == {name: checksum(tensor) for name, tensor in weights.items()}
    (sequence,) = complete(engine, one(engine, PROMPT, FREE))
    assert len(sequence.logprobs) == 20 and torch.isfinite(torch.tensor(sequence.logprobs)).all()
