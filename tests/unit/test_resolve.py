"""What follows from a configuration, and how what is wrong with it is told."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from good_config import GOOD, changed, refused

from areal_hpc.config.checks import CHECKS
from areal_hpc.config.derived import engine_ranks, model_ranks, ring_capacity
from areal_hpc.config.keys import keys, type_name, value_of, with_value
from areal_hpc.config.ranges import RANGES
from areal_hpc.config.reading import problems_of
from areal_hpc.config.resolve import read_config, resolve
from areal_hpc.config.schema import (
    EngineName,
    TrainerBackendName,
)
from areal_hpc.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_values_that_follow() -> None:
    resolved = resolve(
        changed(
            buffer__max_staleness=2,
            algorithm__groups_per_step=5,
            trainer__backend=TrainerBackendName.MEGATRON,
            trainer__ranks=16,
            trainer__parallel__tensor=2,
            trainer__parallel__pipeline=2,
            generation__backend=EngineName.SGLANG,
            generation__replicas=3,
            generation__tensor_parallel=2,
            model__max_tokens=1000,
            rollout__sampling__max_new_tokens=300,
        )
    )
    assert ring_capacity(resolved) == 15
    assert model_ranks(resolved) == 4
    assert engine_ranks(resolved) == 2


@pytest.mark.parametrize("staleness", [0, 1, 8])
def test_E27_synchronous_training_still_has_slots(staleness: int) -> None:
    resolved = resolve(changed(buffer__max_staleness=staleness))
    assert ring_capacity(resolved) == (staleness + 1) * 16


def numbers() -> Iterator[str]:
    for name, key in keys().items():
        choices = typing.get_args(key.type) or (key.type,)
        if {int, float} & set(choices) and not type_name(key.type).startswith("list"):
            yield name


def test_every_number_has_a_range_and_every_default_is_in_it() -> None:
    """A new knob is a decision; so is which values it may have."""
    assert list(RANGES) == list(numbers())
    assert resolve(GOOD) == GOOD


@pytest.mark.parametrize("name", RANGES)
def test_a_number_outside_of_its_range_is_named(name: str) -> None:
    interval = RANGES[name]
    low, high = (float(end) for end in interval[1:-1].split(","))
    outside = [float("nan"), float("inf"), float("-inf")]
    outside += [low - 1] if interval[0] == "[" else [low]
    outside += [high + 1] if interval[-1] == "]" else [high]
    for value in outside:
        assert f"{name}: {value} is not in {interval}" in refused(with_value(GOOD, name, value))


def test_all_disagreements_come_in_one_error() -> None:
    message = refused(changed(name="a/b", algorithm__minibatches=17, algorithm__name="grop", rollout__workers=49))
    assert message.startswith("the configuration has 4 problems:")


def test_deterministic_training_computes_one_sequence_at_a_time() -> None:
    config = changed(deterministic=True, generation__max_running=128)
    assert resolve(config, ("generation.max_running",)).generation.max_running == 1
    assert resolve(with_value(config, "deterministic", False)).generation.max_running == 128


def test_long_sequences_fit_where_context_ranks_share_them() -> None:
    config = changed(
        trainer__backend=TrainerBackendName.MEGATRON,
        trainer__ranks=2,
        trainer__parallel__context=2,
        trainer__tokens_per_microbatch=2048,
    )
    assert model_ranks(resolve(config)) == 2


def test_a_layout_fills_what_nobody_said() -> None:
    config = resolve(changed(layout="sglang:d4t2+megatron:d2p2t2"))
    assert config.generation.replicas == 4
    assert config.generation.backend is EngineName.SGLANG
    assert config.trainer.ranks == 8
    assert resolve(config) == config


def test_a_layout_must_agree_with_what_somebody_said() -> None:
    layout = "sglang:d4t2+megatron:d2p2t2"
    message = refused(changed(layout=layout, generation__replicas=3, trainer__parallel__tensor=4))
    assert f"generation.replicas: 3 disagrees with layout {layout}, which says 4; change either" in message
    assert "trainer.parallel.tensor: 4 disagrees" in message
    agreeing = changed(layout=layout, generation__replicas=4)
    assert resolve(agreeing, ("generation.replicas",)).generation.replicas == 4


def test_a_default_that_somebody_wrote_is_no_default_for_the_layout() -> None:
    config = changed(layout="sglang:d4t2+megatron:d2p2t2")
    assert "generation.replicas: 1 disagrees with layout" in refused(config, ("generation.replicas",))


def test_a_layout_is_checked_like_what_it_stands_for() -> None:
    assert "data-parallel only; write fsdp:d8" in refused(changed(layout="sglang:d1+fsdp:d4t2"))


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda path: path.name)
def test_every_configuration_in_the_repository_fits(path: Path) -> None:
    """Its first comment is the command that runs it, with the files that it is a layer over."""
    command = path.read_text(encoding="utf-8").splitlines()[0].split()
    assert command[:2] == ["#", "areal-hpc"]
    assert command[2] == ("submit" if path.parent.name == "site" else "run")
    paths = [ROOT / word for word in command[3:] if word.endswith(".yaml")]
    overrides = [word for word in command[3:] if not word.endswith(".yaml")]
    assert path in paths
    assert value_of(read_config(paths, overrides), "name")


# All that is wrong in one error

LAYER = """\
name: small
model: {path: models/tiny}
prompts: {train: train.jsonl}
rollout: {reward: tasks:reward}
trainer: {total_steps: 10}
"""


def found_in(path: Path, text: str, *overrides: str) -> list[str]:
    """The problems of a file, each on its line."""
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_config([path], overrides)
    head, *lines = str(caught.value).splitlines()
    return [line.removeprefix("  - ") for line in lines] if lines else [head]


def test_unknown_keys_types_ranges_and_disagreements_come_together_with_their_places(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    text = LAYER + "algorithm: {minibatches: 17, clip_hihg: 0.3}\nweights: {bucket_mb: fast}\nseed: -1\n"
    assert found_in(file, text, "rollout.workers=49", "model.max_tokens=9000") == [
        f"algorithm.clip_hihg: unknown key ({file} line 6); did you mean algorithm.clip_high?",
        f"weights.bucket_mb: expected float, got the text 'fast' ({file} line 7); write a number, without quotes",
        f"seed: -1 is not in [0, 4294967296); choose a value inside ({file} line 8)",
        "algorithm.minibatches: 17 exceeds the 16 groups of a step; lower it, or raise algorithm.groups_per_step "
        f"({file} line 6)",
        "trainer.tokens_per_microbatch: a sequence of model.max_tokens 9000 exceeds a micro-batch of 8192 tokens "
        "(times trainer.parallel.context); raise it, or lower model.max_tokens (model.max_tokens: override "
        "`model.max_tokens=9000`)",
        "rollout.workers: 49 workers share (buffer.max_staleness + 1) * algorithm.groups_per_step = 48 groups, so some "
        "could never start one; lower rollout.workers (override `rollout.workers=49`)",
    ]


@pytest.mark.parametrize(
    ("wrong", "also"),
    [
        # each would be a second problem of a stand-in, and is none
        ("evaluation: {every_steps: 5}\nprompts: {train: a.jsonl, evals: b.jsonl}\n", "prompts.evals: unknown key"),
        ("algorithm: {minibatches: 17, groups_per_step: many}\n", "algorithm.groups_per_step: expected int"),
        ("algorithm: {minibatches: 17, groups_per_step: 0}\n", "algorithm.groups_per_step: 0 is not in"),
        ("algorithm: {name: [ppo], critic: {value_clip: 0.3}}\n", "algorithm.name: expected str"),
        ("layout: sglang:d4\ngeneration: {tensor_parallel: 2}\n", "layout: 'sglang:d4' names 1 engines and 0 trainers"),
        ("algorithm: {name: sapo, decoupled: true}\n", "algorithm.decoupled: True disagrees with algorithm.name sapo"),
        ("trainer: 10\n", "trainer: expected a section with keys of its own"),
    ],
)
def test_what_hangs_on_a_mistake_is_not_reported_besides(wrong: str, also: str, tmp_path: Path) -> None:
    sections = {line.partition(":")[0] for line in wrong.splitlines()}
    kept = [line for line in LAYER.splitlines() if line.partition(":")[0] not in sections]
    (problem,) = found_in(tmp_path / "bad.yaml", "\n".join([*kept, wrong]))
    assert problem.startswith(also)


def test_every_layer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    lines = found_in(tmp_path / "bad.yaml", "name: a\nname: b\n", "trainer", "model.path=[")
    assert [line.partition(": ")[0] for line in lines] == [
        f"{tmp_path}/bad.yaml line 2",
        "override `trainer`",
        "override `model.path=[`",
    ]


@pytest.mark.parametrize("name", keys())
def test_a_check_never_judges_a_value_that_is_not_there(name: str) -> None:
    """Whichever key is unusable, the checks neither fail nor complain of a configuration that is good without it."""
    assert list(problems_of(CHECKS, GOOD, {name})) == []
