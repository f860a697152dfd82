"""The same on a CPU and on a GPU: every process takes its device as a trainer's rank does.

The CPU's half shows that these tests can pass; who has GPUs runs the other half by ``bash tests/run -m gpu``.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import make, make_reference, save, train, trainer, weights_of, whole_batch

from areal_hpc import accelerator
from areal_hpc.collective import broadcast, host_store, join_group, leave_group
from areal_hpc.config.schema import Attention, Dtype, ParallelConfig
from areal_hpc.training.ranks import Ranks
from areal_hpc.transfer import GroupAddress

SPAWN = multiprocessing.get_context("spawn")
LIMIT_S = 20.0
GPUS = torch.cuda.device_count()


def on_gpus(*values: Any, num: int = 1, package: str = "torch") -> Any:
    """A case that needs GPUs, and a package that may be missing."""
    missing = importlib.util.find_spec(package) is None
    needs = pytest.mark.skipif(num > GPUS or missing, reason=f"needs {num} CUDA devices and {package}")
    return pytest.param(*values, marks=[pytest.mark.gpu, needs])


def trained(device: str, backend: str, attention: Attention, dtype: Dtype, path: Path, saved: Path) -> list[Any]:
    """Log-probs before, and weights after three steps, before the last of which the trainer is another one."""
    mine = accelerator.take_device(0)
    assert mine.partition(":")[0] == device
    ranks = Ranks(device=mine)

    def made() -> Any:
        if backend == "reference":
            return make_reference(path, dtype, device=mine)
        config = replace(trainer(ParallelConfig()), attention=attention)
        return make(ranks, config.parallel, path, dtype, trainer=config)

    before = made()
    logprobs = before.logprobs(whole_batch())
    train(before, before.data_ranks, 1, 2)
    save(ranks, before, saved)
    after = made()
    after.load(str(saved))
    train(after, after.data_ranks, 3, 3)
    return [logprobs, weights_of(after)]


@pytest.mark.megatron
@pytest.mark.parametrize("family", ["qwen3", on_gpus("qwen3_moe")])
@pytest.mark.parametrize(
    ("device", "backend", "attention", "dtype"),
    [
        ("cpu", "megatron", Attention.EXACT, Dtype.BFLOAT16),
        on_gpus("cuda", "reference", Attention.EXACT, Dtype.FLOAT32),
        on_gpus("cuda", "megatron", Attention.EXACT, Dtype.FLOAT32),
        on_gpus("cuda", "megatron", Attention.EXACT, Dtype.BFLOAT16),
        on_gpus("cuda", "megatron", Attention.FLASH, Dtype.BFLOAT16, package="flash_attn"),
        on_gpus("cuda", "megatron", Attention.TRANSFORMER_ENGINE, Dtype.BFLOAT16, package="transformer_engine"),
    ],
)
def test_a_device_trains_as_the_reference_does_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    models: dict[str, Path],
    tmp_path: Path,
    device: str,
    backend: str,
    attention: Attention,
    dtype: Dtype,
    family: str,
) -> None:
    if device == "cpu":
        monkeypatch.setenv(accelerator.CUDA.visible_devices, "")
    reference = make_reference(models[family], device="cpu")
    expected_logprobs = reference.logprobs(whole_batch())
    train(reference, reference.data_ranks, 1, 3)
    with ProcessPoolExecutor(1, mp_context=SPAWN) as process:
        job = process.submit(trained, device, backend, attention, dtype, models[family], tmp_path / "checkpoint")
        logprobs, weights = job.result()
    near = 1e-3 if dtype is Dtype.FLOAT32 else 0.15
    assert np.abs(logprobs - expected_logprobs).max() < near
    for name, expected in weights_of(reference).items():
        # Where a gradient is nearly nothing AdamW goes a whole step by its sign, so only most of them can be equal.
        error = np.median(np.abs(weights[name] - expected) / (np.abs(expected) + 0.01))
        assert error < (1e-4 if dtype is Dtype.FLOAT32 else 2**-7), name  # bfloat16 itself rounds to 2**-9 of a value


def send(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    """As weights are sent and received."""
    with accelerator.beside(tensor.device):
        broadcast(tensor, group)


def member(address: GroupAddress, rank: int, pipe: Connection) -> None:
    """Both take part in a broadcast; then rank 1 is killed, and rank 0 says what becomes of the next, and of it."""
    device = "cpu" if address.backend == "gloo" else f"cuda:{rank}"
    group, tensor = join_group(address, rank, LIMIT_S), torch.full((1000,), float(rank), device=device)
    send(tensor, group)
    pipe.send(float(tensor.sum()))
    if rank == 1:
        time.sleep(10 * LIMIT_S)
    pipe.recv()
    began = time.monotonic()
    try:
        send(tensor, group)
    except RuntimeError as error:
        pipe.send((time.monotonic() - began, type(error).__name__))
    leave_group(group)
    alone = replace(address, name="alone", world_size=1)
    group = join_group(alone, 0, LIMIT_S)
    send(tensor, group)
    pipe.send(float(tensor.sum()))
    leave_group(group)


@pytest.mark.parametrize("backend", ["gloo", on_gpus("nccl", num=2)])
def test_fault_45_who_sends_weights_outlives_who_receives_them(backend: str) -> None:
    """And has its device to itself again. By NCCL's own watch it would end with the other."""
    store = host_store(timeout_s=LIMIT_S)
    address = GroupAddress(host="127.0.0.1", port=store.port, name="both", world_size=2, backend=backend)
    pipes = [SPAWN.Pipe() for _ in range(2)]
    ranks = [SPAWN.Process(target=member, args=(address, rank, pipes[rank][1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for ours, _ in pipes:
        assert ours.poll(6 * LIMIT_S) and ours.recv() == 0.0  # what rank 0 has
    ranks[1].kill()
    ranks[1].join(LIMIT_S)
    ours, _ = pipes[0]
    ours.send("the other is dead")
    assert ours.poll(2 * LIMIT_S), "rank 0 has ended with it, or waits for it"
    seconds, error = ours.recv()
    assert seconds < 1.5 * LIMIT_S and error
    assert ours.poll(2 * LIMIT_S) and ours.recv() == 0.0
    ranks[0].join(LIMIT_S)
    assert ranks[0].exitcode == 0
