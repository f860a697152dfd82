"""What ranks write in pieces is one state: whole, each element once, and torch's own reader finds the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from areal_hpc.errors import CorruptRecord
from areal_hpc.training import shards as module
from areal_hpc.training.shards import Shard, ShardFiles, join_shards, policy_weights, write_shards
from areal_hpc.training.snapshot import same_bits


def rows(name: str, tensor: Tensor, start: int, end: int) -> Shard:
    offset = (start, *[0] * (tensor.ndim - 1))
    return Shard(name=name, data=tensor[start:end].clone(), offset=offset, whole=tuple(tensor.shape))


def columns(name: str, tensor: Tensor, start: int, end: int) -> Shard:
    data = tensor[:, start:end].clone(memory_format=torch.contiguous_format)
    return Shard(name=name, data=data, offset=(0, start), whole=tuple(tensor.shape))


def written(directory: Path, of_ranks: list[list[Shard]]) -> Path:
    for rank, shards in enumerate(of_ranks):
        write_shards(shards, directory, rank)
    join_shards(directory, len(of_ranks))
    return directory


@given(data=st.data())
def test_any_division_among_any_ranks_is_read_as_the_whole(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    num_ranks = data.draw(st.integers(1, 4), "ranks")
    tensors = {
        "matrix": torch.randn(7, 3),
        "vector": torch.tensor([-0.0, torch.nan, 1.0, torch.inf, 2.0]),
        "rounded": torch.randn(4, 2).bfloat16(),
    }
    of_ranks: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        cuts = sorted(data.draw(st.sets(st.integers(1, tensor.shape[0] - 1)), f"cuts of {name}"))
        for start, end in zip([0, *cuts], [*cuts, tensor.shape[0]], strict=True):
            of_ranks[data.draw(st.integers(0, num_ranks - 1))].append(rows(name, tensor, start, end))
    directory = written(tmp_path_factory.mktemp("state"), of_ranks)
    files = ShardFiles(directory)
    assert files.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    by_torch = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load(by_torch, storage_reader=FileSystemReader(directory), no_dist=True)
    for name, tensor in tensors.items():
        assert same_bits(files.read(name), tensor), name
        assert same_bits(by_torch[name], tensor), name


def test_pieces_may_be_columns(tmp_path: Path) -> None:
    tensor = torch.randn(3, 5)
    directory = written(tmp_path / "state", [[columns("w", tensor, 0, 2)], [columns("w", tensor, 2, 5)]])
    assert torch.equal(ShardFiles(directory).read("w"), tensor)


def test_the_policy_is_its_masters_rounded_and_nothing_else(tmp_path: Path) -> None:
    tensor = torch.randn(6, 2)
    names = ("master.model.b", "master.model.a", "exp_avg.model.a", "exp_avg_sq.model.a")
    written(tmp_path / "state", [[rows(name, tensor, 0, 6) for name in names]])
    found = list(policy_weights(tmp_path / "state", "bfloat16"))
    assert [name for name, _ in found] == ["model.a", "model.b"]
    assert all(torch.equal(weight, tensor.bfloat16()) for _, weight in found)


@pytest.mark.parametrize(
    ("spans", "found"), [([(0, 2), (3, 4)], 6), ([(0, 2), (2, 4), (2, 4)], 12), ([(0, 2), (0, 2)], 8)]
)
def test_an_element_that_nobody_wrote_or_several_did_is_named(
    tmp_path: Path, spans: list[tuple[int, int]], found: int
) -> None:
    tensor = torch.randn(4, 2)
    with pytest.raises(CorruptRecord, match=f"{found} of the 8 elements of lost were written"):
        written(tmp_path / "state", [[rows("lost", tensor, *span)] for span in spans])


def test_what_the_disk_did_not_keep_is_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that reads back as something else, here by one bit of one element."""
    stored = module._loaded

    def flipped(data: bytes) -> Tensor:
        tensor = stored(data)
        tensor.view(torch.int32)[0, 0] ^= 1
        return tensor

    monkeypatch.setattr(module, "_loaded", flipped)
    with pytest.raises(CorruptRecord, match=r"__3_0.distcp: w does not hold what was written; check the disk"):
        write_shards([rows("w", torch.randn(2, 2), 0, 2)], tmp_path / "state", 3)
