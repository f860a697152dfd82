"""Host memory of a node: held against what a worker and a trainer really keep there, and against what is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from frozen_models import LORA
from reference_steps import make, random_batch, small_model
from test_estimate import QWEN3_0_6B, config_of

from areal_hpc.cluster.estimate import GIB, model_size, size_of, trainer_bytes
from areal_hpc.cluster.host_memory import asked_bytes, host_lines, rank_bytes, trainer_rank_bytes
from areal_hpc.config.cluster import ComponentConfig
from areal_hpc.config.schema import Dtype
from areal_hpc.generation.served.merging import Merging, order
from areal_hpc.roles.supervisor import roles_of

SIZE = size_of(QWEN3_0_6B)
MODEL = 2 * 596_049_920
"""Bytes of it in bfloat16."""
PINNED = 28 * (2 * 2**21 + 2 * 2**20 + 3 * 2**22 + 2 * 2**10 + 2 * 2**7) + 2**28 + 2**10
"""Elements where each tensor takes a power of two: its feed-forward has 3 * 2**20 a matrix, its embedding 155 M."""
SGLANG = ("generation.backend=sglang", "generation.python=python", "model.dtype=bfloat16")
LORA_WORDS = ("model.lora.rank=8",)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    return f"model.path={tmp_path}"


def bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def test_of_an_engine_rank_it_is_what_a_worker_keeps_of_a_frozen_model(tmp_path: Path) -> None:
    path = small_model(tmp_path / "model")
    merging = Merging(order(str(path), Dtype.BFLOAT16, LORA) or {})
    merging.begin()
    merging.wait(30.0)
    assert merging._reading is not None
    config = config_of(f"model.path={path}", *SGLANG, *LORA_WORDS)
    size = model_size(config)
    assert size is not None
    assert rank_bytes(config, size, has_gpus=True) == bytes_of(merging._reading.result()[0])


def test_of_a_trainer_rank_it_is_what_a_checkpoint_copies(tmp_path: Path) -> None:
    path, batch = small_model(tmp_path / "model"), random_batch()
    backend = make(path)
    backend.train_step([batch.with_proximal(backend.logprobs(batch))])
    backend.snapshot()
    config = config_of(f"model.path={path}", "model.dtype=float32")
    size = model_size(config)
    assert size is not None
    kept = [backend._host_masters._tensors, backend._host_moments._tensors]
    pinned = sum(1 << (one.nbytes - 1).bit_length() for tensors in kept for one in tensors.values())
    assert trainer_rank_bytes(config, size, 0, has_gpus=True) == pytest.approx(pinned, rel=0.01)
    on_cpu = trainer_rank_bytes(config, size, 0, has_gpus=False) - sum(trainer_bytes(config, size))
    assert on_cpu == pytest.approx(sum(map(bytes_of, kept)), rel=0.01)
    assert trainer_rank_bytes(config, size, 1, has_gpus=True) == 0


def test_what_megatrons_ranks_keep_is_shared_and_without_gpus_all_is_in_host_memory() -> None:
    assert SIZE is not None
    config = config_of("trainer.backend=megatron", "trainer.ranks=4")
    assert trainer_rank_bytes(config, SIZE, 3, has_gpus=True) == 12 * PINNED / 4
    on_cpu = trainer_rank_bytes(config, SIZE, 3, has_gpus=False)
    assert on_cpu == 12 * 596_049_920 / 4 + sum(trainer_bytes(config, SIZE))


def test_the_embedded_engine_keeps_no_second_model_for_adapters() -> None:
    assert SIZE is not None
    whole, adapters = config_of("model.dtype=bfloat16"), config_of("model.dtype=bfloat16", *LORA_WORDS)
    saved = rank_bytes(whole, SIZE, has_gpus=False) - rank_bytes(adapters, SIZE, has_gpus=False)
    assert saved == MODEL
    assert rank_bytes(whole, SIZE, has_gpus=True) == rank_bytes(whole, SIZE, has_gpus=False), "it computes on the CPU"


VLLM = ("generation.backend=vllm", "generation.python=python", "model.dtype=bfloat16")
DELTA, DISK, ADAPTERS = "weights.delta=true", "weights.transport=disk", "model.lora.rank=8"


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        (SGLANG, 0),  # loads what comes into the model on the device
        ((*SGLANG, ADAPTERS), 1),
        ((*SGLANG, DELTA), 1),
        ((*SGLANG, ADAPTERS, DISK, "generation.pipeline_parallel=2"), 0),
        (VLLM, 1),  # receives while it samples
        ((*VLLM, DISK), 0),
        ((*VLLM, DISK, DELTA), 1),
        ((*VLLM, DISK, ADAPTERS), 1),
    ],
)
def test_which_engines_have_a_model_in_host_memory_beside_that_on_the_device(
    words: tuple[str, ...], copies: int
) -> None:
    assert SIZE is not None
    assert rank_bytes(config_of(*words), SIZE, has_gpus=True) == copies * MODEL


@pytest.mark.parametrize("adapters", [(DELTA,), LORA_WORDS], ids=["delta", "lora"])
def test_every_rank_of_every_engine_on_a_node_counts_and_too_little_is_said(model: str, adapters: tuple[str]) -> None:
    """Two engines of four ranks on each of two nodes: eight copies a node."""
    words = [model, *SGLANG, *adapters, "cluster.shape=het", "cluster.all.gres=gpu:8", "cluster.all.mem=8G"]
    words += ["generation.replicas=4", "generation.tensor_parallel=4", "cluster.generation.nodes=2"]
    config = config_of(*words)
    lines = [line for line in host_lines(config, roles_of(config)) if "generation" in line]
    needed = f"{8 * MODEL / GIB:.2g}"
    assert lines[0] == f"host memory  at least {needed} GiB on a node of generation, of 8 asked for"
    assert lines[1].startswith(f"advice       generation gets 8 GiB of host memory on a node, and needs {needed} and ")
    assert "raise cluster.generation.mem" in lines[1]
    enough = config_of(*words, "cluster.generation.mem=64G")
    assert len([line for line in host_lines(enough, roles_of(enough)) if "generation" in line]) == 1


def test_a_satellite_is_a_job_of_its_own(model: str) -> None:
    words = [model, *SGLANG, *LORA_WORDS, "cluster.shape=satellites", "cluster.all.gres=gpu:4", "generation.replicas=0"]
    config = config_of(*words, "cluster.generation.mem_per_gpu=1G")
    lines = list(host_lines(config, roles_of(config)))
    needed = f"{4 * MODEL / GIB:.2g}"
    assert f"host memory  at least {needed} GiB on a node of satellite, of 4 asked for" in lines
    assert any(line.startswith("advice       satellite gets 4 GiB") for line in lines)


def test_of_a_model_that_is_not_there_nothing_is_said(tmp_path: Path) -> None:
    config = config_of(f"model.path={tmp_path}")
    assert list(host_lines(config, roles_of(config))) == []


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"mem": "64G"}, 64 * GIB),
        ({"mem": "64000"}, 64000 << 20),
        ({"mem": "1T"}, 1 << 40),
        ({"mem_per_cpu": "2g", "cpus": 16}, 32 * GIB),
        ({"mem_per_cpu": "2G"}, None),  # nobody says how many
        ({"mem_per_gpu": "100G"}, 400 * GIB),
        ({"mem": "0"}, None),  # all of the node
        ({}, None),
    ],
)
def test_what_is_asked_for_as_slurm_reads_it(request_: dict[str, str], expected: float | None) -> None:
    assert asked_bytes(ComponentConfig(**request_), 4) == expected  # type: ignore[arg-type]
