"""A configuration for people: YAML that loads back equal, differences, and the list of all knobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config.algorithm import AlgorithmConfig, RejectionConfig
from areal_hpc.config.describe import diff, dump, render_diff, render_reference, written
from areal_hpc.config.keys import REQUIRED, help_of, keys, type_name, value_of
from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import (
    Config,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
    PromptsConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from areal_hpc.errors import ConfigError

KNOBS = Path(__file__).parents[1] / "data/knobs.txt"


def config_of(**options: Any) -> Config:
    required = {
        "name": "small",
        "model": ModelConfig(path="models/tiny"),
        "prompts": PromptsConfig(train="train.jsonl"),
        "rollout": RolloutConfig(reward="tasks:reward"),
        "trainer": TrainerConfig(total_steps=10),
    }
    return Config(**(required | options))


def test_a_new_knob_is_a_decision() -> None:
    """Whoever changes this list has decided that a user must know one thing more, or one less."""
    found = [f"{key.name}: {type_name(key.type)}" for key in keys().values()]
    assert found == KNOBS.read_text(encoding="utf-8").splitlines()


def test_every_knob_and_every_section_has_help() -> None:
    for name in keys():
        while name:
            assert len(help_of(name)) > 5, name
            name = name.rpartition(".")[0]  # noqa: PLW2901
    assert help_of("algorithm.clip_high") == "The ratio current / proximal is clipped above at 1 + this."
    assert help_of("algorithm") == "Advantages and loss."


@pytest.mark.parametrize("name", ["algorithm.clip_hi", "trainer.clip_high", "algorithm.clip_high.more"])
def test_help_for_no_key_names_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: there is no such key; did you mean .*algorithm\.clip_high"):
        help_of(name)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
number = st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
words = st.sampled_from(
    [
        "\x85",
        "a\u2028b",
        "1e-6",
        "no",
        "on",
        "~",
        "",
        "null",
        "1:30",
        "010",
        "0x1",
        "true",
        "=",
        "<<",
        "2001-01-01",
        ".inf",
    ]
)


@settings(max_examples=40)
@given(data=st.data())
def test_what_is_dumped_loads_back_equal(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = config_of(
        name=data.draw(text | words),
        seed=data.draw(st.integers(-(10**17), 10**17)),
        rollout=RolloutConfig(
            reward=data.draw(text),
            timeout_s=data.draw(number),
            sampling=SamplingConfig(stop=tuple(data.draw(st.lists(text | words, max_size=3))), stop_token_ids=(1, 2)),
        ),
        algorithm=AlgorithmConfig(rejection_sampling=RejectionConfig(lower=data.draw(st.none() | number), upper=None)),
        trainer=TrainerConfig(total_steps=1, optimizer=OptimizerConfig(lr=1e-6, eps=data.draw(number))),
        generation=GenerationConfig(server_args=data.draw(st.dictionaries(text | words, plain | words, max_size=3))),
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    assert load([path]) == config


def test_a_layout_that_was_applied_loads_back_and_agrees(tmp_path: Path) -> None:
    config = resolve(config_of(layout="sglang:d4t2+megatron:d2p2t2"))
    (tmp_path / "config.yaml").write_text(dump(config), encoding="utf-8")
    again = load([tmp_path / "config.yaml"])
    assert again == config
    assert resolve(again, frozenset(keys())) == config


def test_other_readers_of_yaml_see_the_same_texts() -> None:
    """PyYAML reads YAML 1.1, where `no` is false: such texts must be in quotes."""
    config = config_of(rollout=RolloutConfig(reward="no", sampling=SamplingConfig(stop=("on", "1e-6", "1:30", "~"))))
    read = yaml.safe_load(dump(config))
    assert read["rollout"]["reward"] == "no"
    assert read["rollout"]["sampling"]["stop"] == ["on", "1e-6", "1:30", "~"]
    assert read["trainer"]["optimizer"]["lr"] == 1e-6


def test_the_same_list_twice_is_written_twice(tmp_path: Path) -> None:
    shared = ["a"]
    config = config_of(generation=GenerationConfig(server_args={"x": shared, "y": shared}))
    (tmp_path / "config.yaml").write_text(dump(config), encoding="utf-8")
    assert load([tmp_path / "config.yaml"]) == config


def test_a_diff_holds_what_is_not_default() -> None:
    assert diff(config_of(seed=3)) == [
        ("name", REQUIRED, "small"),
        ("model.path", REQUIRED, "models/tiny"),
        ("prompts.train", REQUIRED, "train.jsonl"),
        ("rollout.reward", "", "tasks:reward"),
        ("trainer.total_steps", REQUIRED, 10),
        ("seed", 1, 3),
    ]


def test_a_rendered_diff_shows_each_value_beside_its_default() -> None:
    lines = render_diff(config_of(seed=3, layout="no")).splitlines()
    assert [line.split() for line in lines if line.startswith(("seed", "layout"))] == [
        ["seed:", "3", "#", "default:", "1"],
        ["layout:", "'no'", "#", "default:", "''"],
    ]
    assert lines[0] == "name: small"


def test_a_section_with_defaults_of_its_own_shows_them() -> None:
    assert keys()["algorithm.adv_norm.mean"].default == "none"
    assert keys()["algorithm.reward_norm.mean"].default == "group"
    config = config_of()
    for name, key in keys().items():
        assert key.default in (REQUIRED, value_of(config, name)) or name == "rollout.reward"


def test_the_reference_shows_every_knob_with_type_default_and_help() -> None:
    shown = render_reference()
    lines = [line.split() for line in shown.splitlines() if not line.startswith(" ")]
    assert [line[0] for line in lines] == list(keys())
    assert "algorithm.clip_high" in shown
    flat = " ".join(shown.split())
    assert "algorithm.dual_clip float or null = null Bound c > 1" in flat
    assert "model.path str required Hugging Face checkpoint directory" in flat
    assert "trainer.backend reference | megatron = reference `reference`: plain torch" in flat
    assert all(" ".join(key.help.split()) in flat for key in keys().values())


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1e-6, "1.0e-06"), (None, "null"), (True, "true"), ("", "''"), ("no", "'no'"), ((), "[]"), ({"a": 1}, "{a: 1}")],
)
def test_a_value_is_shown_as_it_is_written(value: Any, shown: str) -> None:
    assert written(value) == shown
