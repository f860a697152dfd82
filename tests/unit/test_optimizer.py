from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from areal_hpc.config.schema import OptimizerConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.training.optimizer import Optimizer

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.1, grad_clip=0.5)


def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Sequential, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, Optimizer(model.named_parameters(), CONFIG, dtype)


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_updates_equal_torch_with_clipping_and_decay_of_matrices() -> None:
    model, optimizer = make()
    theirs, _ = make()
    adamw = torch.optim.AdamW(
        [{"params": [theirs[0].weight, theirs[2].weight], "weight_decay": 0.1},
         {"params": [theirs[0].bias, theirs[2].bias], "weight_decay": 0.0}],
        betas=(CONFIG.beta1, CONFIG.beta2),
    )  # fmt: skip
    for lr in (0.1, 0.05, 0.02):
        optimizer.zero_grad()
        (10 * model(inputs()).square()).sum().backward()
        norm = optimizer.step(lr)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.zero_grad()
        (10 * theirs(inputs()).square()).sum().backward()
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), CONFIG.grad_clip)
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert norm > CONFIG.grad_clip
        adamw.step()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)


def test_a_device_makes_no_temporaries_as_large_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch would take all weights at once, as it does on devices, ours are updated one after the other."""
    at_once: list[int] = []
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    monkeypatch.setattr(adam, "_multi_tensor_adam", lambda params, *_, **__: at_once.append(len(params)))
    model, optimizer = make()
    before = model[0].weight.detach().clone()
    model(inputs()).sum().backward()
    optimizer.step(0.1)
    assert not at_once and not torch.equal(model[0].weight, before)


def test_gradients_of_several_backwards_add_up() -> None:
    model, optimizer = make()
    for part in inputs().split(2):
        model(part).sum().backward()
    once, theirs = make()
    once(inputs()).sum().backward()
    for name, master in theirs.masters.items():
        torch.testing.assert_close(optimizer.masters[name].grad, master.grad)


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """256 ones in bfloat16 stay 256 when one more is added; in float32 they do not."""
    model, optimizer = make(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    for _ in range(300):
        (model[2].bias * 1.0).sum().backward()
    assert optimizer.masters["2.bias"].grad == 300.0


def test_bfloat16_weights_are_the_rounded_masters_and_small_updates_are_not_lost() -> None:
    model, optimizer = make(torch.bfloat16)
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs(torch.bfloat16)).sum().backward()
        optimizer.step(1e-5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, optimizer.masters[name].bfloat16())
        assert not torch.equal(optimizer.masters[name], before[name])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, optimizer = make()
    model(inputs()).sum().backward()
    optimizer.step(0.1)
    before = [t.clone() for t in (*model.parameters(), *optimizer.state_dict().values())]
    optimizer.zero_grad()
    (model(inputs()).sum() * bad).backward()
    assert not torch.isfinite(torch.tensor(optimizer.step(0.1)))
    assert optimizer.num_updates == 1
    after = [*model.parameters(), *optimizer.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("updates", [0, 2])
def test_C9_moments_survive_a_restart(dtype: torch.dtype, updates: int) -> None:
    def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs(dtype)).sum().backward()
            optimizer.step(0.01)

    model, optimizer = make(dtype)
    train(model, optimizer, updates)
    other, restored = make(dtype, seed=9)
    train(other, restored, 1)
    restored.load_state_dict(optimizer.masters, optimizer.state_dict(), optimizer.num_updates)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # before any step
    train(model, optimizer, 2)
    train(other, restored, 2)
    for name, master in optimizer.masters.items():
        assert torch.equal(master, restored.masters[name])


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    _, optimizer = make()
    weights, moments = dict(optimizer.masters), optimizer.state_dict()
    with pytest.raises(CheckpointError, match=r"2\.bias"):
        optimizer.load_state_dict({k: t for k, t in weights.items() if k != "2.bias"}, moments, 0)
    with pytest.raises(CheckpointError, match=r"exp_avg_sq\.0\.weight"):
        optimizer.load_state_dict(weights, {k: t for k, t in moments.items() if k != "exp_avg_sq.0.weight"}, 0)
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \(4, 8\) instead of \(8, 4\)"):
        optimizer.load_state_dict({**weights, "0.weight": weights["0.weight"].T}, moments, 0)
