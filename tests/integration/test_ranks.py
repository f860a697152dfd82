"""What the trainer's ranks tell each other, in real processes."""

from __future__ import annotations

import math
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from forked import fork_server
from launched import CONFIG
from torch.distributed import ProcessGroup

from areal_hpc.config.load import load
from areal_hpc.errors import RoleDied
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.training import join_ranks
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder
from areal_hpc.training.ranks import Ranks
from tests.ranks import TIMEOUT_S, run_ranks


def exchange(group: ProcessGroup | None) -> dict[str, Any]:
    ranks = Ranks(group)
    mine = {"rank": ranks.rank, "text": "ď" * ranks.rank, "nothing": None, "nan": math.nan}
    return {
        "gathered": ranks.gather(mine),
        "shared": ranks.share({"plan": [[0, 1], []]} if ranks.leads else None),
        "floats": [one.tolist() for one in ranks.gather_floats(np.arange(3 * ranks.rank, dtype=np.float32) / 3)],
        "nothing": [one.size for one in ranks.gather_floats(np.zeros(0, dtype=np.float32))],
        "any": [ranks.any(ranks.rank == 1), ranks.any(False)],
        "any_each": ranks.any_each(np.arange(3) == ranks.rank).tolist(),
    }


def test_every_rank_learns_the_same() -> None:
    results = run_ranks(2, exchange)
    for result in results:
        assert [(one["rank"], one["text"]) for one in result["gathered"]] == [(0, ""), (1, "ď")]
        assert all(math.isnan(one["nan"]) and one["nothing"] is None for one in result["gathered"])
        assert result["shared"] == {"plan": [[0, 1], []]}
        assert result["floats"] == [[], [0.0, float(np.float32(1 / 3)), float(np.float32(2 / 3))]]
        assert result["nothing"] == [0, 0]
        assert result["any"] == [True, False]
        assert result["any_each"] == [True, True, False]


def test_one_rank_is_its_own_company() -> None:
    result = exchange(None)
    assert [one["rank"] for one in result["gathered"]] == [0]
    assert result["shared"] == {"plan": [[0, 1], []]}
    assert result["any"] == [False, False]
    assert result["any_each"] == [True, False, False]


def outlive(group: ProcessGroup) -> str:
    ranks = Ranks(group)
    ranks.barrier()
    if ranks.rank == 1:
        return "ended"
    with pytest.raises(RoleDied) as failure:
        ranks.barrier()
    return str(failure.value)


def test_a_rank_that_ends_is_noticed_by_the_others() -> None:
    told, ended = run_ranks(2, outlive)
    assert ended == "ended"
    assert told.startswith("trainer rank 0 of 2 lost the other ranks (")


def meet_by_environment(root: Path, index: int, words: list[str]) -> dict[str, Any]:
    """A trainer rank, and in it code that knows nothing of this package and enters a group as under torchrun."""
    run = RunDir.open(root)
    process = RoleProcess(
        role="trainer",
        index=index,
        run=run,
        epoch=1,
        config=load([run.config], words),
        token="t",
        recorder=Recorder(run.attempt(1).records("trainer", index), role="trainer", index=index, epoch=1),
    )
    ranks = join_ranks(process)
    dist.init_process_group("gloo")
    mine = torch.tensor([10.0**index])
    dist.all_reduce(mine)
    answer = {
        "rank": (ranks.rank, dist.get_rank(), int(os.environ["RANK"])),
        "size": (ranks.size, dist.get_world_size(), int(os.environ["WORLD_SIZE"])),
        "local": (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]),
        "sum": float(mine),
        "any": ranks.any(index == 1),
    }
    dist.destroy_process_group()
    return answer


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_code_that_wants_torchruns_variables_finds_the_store_of_rank_0(tmp_path: Path, num_ranks: int) -> None:
    run = RunDir.create(tmp_path / "run")
    run.config.write_text(yaml.safe_dump({**CONFIG, "model": {"path": "none"}}), encoding="utf-8")
    run.attempt(1).create()
    words = [f"trainer.ranks={num_ranks}", "trainer.torchrun_variables=true", "cluster.shape=local"]
    with ProcessPoolExecutor(num_ranks, mp_context=fork_server()) as pool:
        futures = [pool.submit(meet_by_environment, run.root, rank, words) for rank in range(num_ranks)]
        answers = [future.result(timeout=TIMEOUT_S) for future in futures]
    for rank, answer in enumerate(answers):
        assert answer == {
            "rank": (rank, rank, rank),
            "size": (num_ranks, num_ranks, num_ranks),
            "local": (str(rank), str(num_ranks)),
            "sum": [1.0, 11.0][num_ranks - 1],
            "any": num_ranks == 2,
        }
