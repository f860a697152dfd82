"""What the trainer's ranks tell each other, in real processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torch.distributed import ProcessGroup

from areal_hpc.errors import RoleDied
from areal_hpc.training.ranks import Ranks
from tests.ranks import run_ranks


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
