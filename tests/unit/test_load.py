"""Layers, overrides and strict types: every mistake is named with its key, its place and what to do."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.config.algorithm import Level, Metric
from areal_hpc.config.load import build, load, places, read
from areal_hpc.config.schema import Config, Sink, TrainerBackendName
from areal_hpc.config.source import MAX_BYTES, MAX_DEPTH, parse
from areal_hpc.errors import ConfigError

MINIMAL = """\
name: small
model:
  path: /models/tiny
prompts:
  train: data/train.jsonl
rollout:
  reward: areal_hpc.rollout.rewards:exact
trainer:
  total_steps: 10
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str | bytes, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refused(paths: list[Path], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(paths, overrides)
    return str(caught.value)


def test_a_minimal_file_gives_the_defaults_of_everything_else(write: Any) -> None:
    config = load([write(MINIMAL)])
    assert config.name == "small"
    assert config.algorithm.clip_high == 0.2
    assert config.trainer.backend is TrainerBackendName.REFERENCE


def test_later_layers_win_mappings_merge_and_lists_replace(write: Any) -> None:
    below = write(MINIMAL + "generation: {server_args: {a: 1, b: {c: 2}}, replicas: 3}\ntelemetry: {sinks: [wandb]}\n")
    above = write("generation: {server_args: {b: {d: 3}}}\ntelemetry: {sinks: [tensorboard]}\n", "site.yaml")
    config = load([below, above], ["generation.server_args.a=9", "seed=7"])
    assert config.generation.server_args == {"a": 9, "b": {"c": 2, "d": 3}}
    assert config.generation.replicas == 3
    assert config.telemetry.sinks == (Sink.TENSORBOARD,)
    assert config.seed == 7


def test_values_keep_their_exact_types(write: Any) -> None:
    text = MINIMAL + (
        "algorithm:\n  clip_high: 1\n  dual_clip: 3\n  rejection_sampling: {upper: null, metric: kl_k3}\n"
        "limits: {stop_s: 1.5e+1}\n"
    )
    config = load(
        [write(text)], ['rollout.sampling.stop=["</answer>", "on"]', "rollout.sampling.stop_token_ids=[1, 2]"]
    )
    assert type(config.algorithm.clip_high) is float
    assert config.algorithm.dual_clip == 3.0
    assert config.algorithm.rejection_sampling.upper is None
    assert config.algorithm.rejection_sampling.metric is Metric.KL_K3
    assert config.limits.stop_s == 15.0
    assert config.rollout.sampling.stop == ("</answer>", "on")
    assert config.rollout.sampling.stop_token_ids == (1, 2)


def test_a_section_given_in_part_keeps_its_own_defaults_not_those_of_its_type(write: Any) -> None:
    """`adv_norm` is a NormConfig whose default levels are none, while a NormConfig's are group."""
    config = load([write(MINIMAL)], ["algorithm.adv_norm.eps=1e-6"])
    assert config.algorithm.adv_norm.mean is Level.NONE
    assert config.algorithm.adv_norm.eps == 1e-6
    assert config.algorithm.reward_norm.mean is Level.GROUP


def test_J15_weights_in_fp8_are_refused_so_that_nothing_here_scales_a_block_of_zeros(write: Any) -> None:
    """An engine's own quantisation is the engine's: what is sent to it is float32 or bfloat16."""
    with pytest.raises(ConfigError, match=r"model\.dtype: expected float32 \| bfloat16, got .*float8_e4m3fn"):
        load([write(MINIMAL)], ["model.dtype=float8_e4m3fn"])


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-1.5e-3", -1.5e-3),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2001-01-01", "2001-01-01"),
        ("<<", "<<"),
        (".inf", ".inf"),
        ("'1e-6'", "1e-6"),
        ("9" * 30, "9" * 30),
    ],
)
def test_plain_words_follow_yaml_1_2(word: str, value: Any) -> None:
    tree = parse(f"key: {word}", "text")
    assert tree is not None
    found = tree.plain()["key"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("written", ["8", "007", "1e3", "2.50", "-1"])
def test_a_number_where_a_text_belongs_is_the_text_that_was_written(write: Any, written: str) -> None:
    file = write(MINIMAL + f"cluster: {{all: {{account: {written}, raw: [{written}]}}}}\n")
    config = load([file], [f"cluster.trainer.gpus_per_node={written}"])
    assert config.cluster.all.account == config.cluster.trainer.gpus_per_node == config.cluster.all.raw[0] == written


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed='3'", "seed: expected int, got the text '3' (override `seed='3'`); write a number, without quotes"),
        ("seed=true", "seed: expected int, got true (override `seed=true`); change it"),
        ("seed=3.0", "seed: expected int, got the number 3.0 (override `seed=3.0`); change it"),
        ("name=true", "name: expected str, got true (override `name=true`); put the value in quotes"),
        ("name=", "name: expected str, got null (override `name=`); put the value in quotes"),
        (
            "prompts.shuffle=no",
            "prompts.shuffle: expected bool, got the text 'no' (override `prompts.shuffle=no`); write true or false",
        ),
        (
            "algorithm.reward_norm.std=grup",
            "algorithm.reward_norm.std: expected none | group | batch, got the text 'grup' "
            "(override `algorithm.reward_norm.std=grup`); change it",
        ),
        (
            "algorithm.dual_clip=high",
            "algorithm.dual_clip: expected float or null, got the text 'high' (override `algorithm.dual_clip=high`); "
            "write a number, without quotes",
        ),
        (
            "telemetry.sinks=wandb",
            "telemetry.sinks: expected list of tensorboard | wandb, got the text 'wandb' "
            "(override `telemetry.sinks=wandb`); write it in brackets: [...]",
        ),
        (
            "rollout.sampling.stop_token_ids=[1, x]",
            "rollout.sampling.stop_token_ids[1]: expected int, got the text 'x' "
            "(override `rollout.sampling.stop_token_ids=[1, x]`); write a number, without quotes",
        ),
        (
            "model=tiny",
            "model: expected a section with keys of its own, got the text 'tiny' (override `model=tiny`); change it",
        ),
        ("seed.x=1", "seed: expected int, got a mapping (override `seed.x=1`); change it"),
        (
            "prompts.task_args=3",
            "prompts.task_args: expected mapping, got the number 3 (override `prompts.task_args=3`); change it",
        ),
    ],
)
def test_a_wrong_type_names_key_type_value_and_place(write: Any, override: str, message: str) -> None:
    assert refused([write(MINIMAL)], override) == message


def test_J2_a_misspelt_key_names_its_line_and_the_nearest_key(write: Any) -> None:
    path = write(MINIMAL + "algorithm:\n  clip_hgih: 0.3\n")
    message = refused([path])
    assert message.startswith(f"algorithm.clip_hgih: unknown key ({path} line 11); did you mean algorithm.clip_high?")


def test_a_key_in_the_wrong_section_is_told_where_it_belongs(write: Any) -> None:
    message = refused([write(MINIMAL)], "trainer.lr=1e-5")
    assert message.startswith("trainer.lr: unknown key (override `trainer.lr=1e-5`); did you mean trainer.optimizer.lr")


def test_a_misspelt_section_names_the_section(write: Any) -> None:
    assert "did you mean algorithm?" in refused([write(MINIMAL)], "algoritm={clip_high: 0.3}")
    assert "did you mean rollout.sampling.top_p?" in refused([write(MINIMAL)], "rollout.top_p=0.5")


def test_a_key_like_no_other_is_simply_unknown(write: Any) -> None:
    assert refused([write(MINIMAL)], "qqq=1") == "qqq: unknown key (override `qqq=1`); remove it"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("name: a\nseed: 1\nname: b\n", (3, 1)),
        ("model:\n  path: a\n  dtype: float32\n  path: b\n", (4, 2)),
        ("generation:\n  server_args:\n    inner: {x: 1,\n      x: 2}\n", (4, 3)),
    ],
)
def test_J6_a_key_given_twice_names_both_lines(write: Any, text: str, lines: tuple[int, int]) -> None:
    path = write(text)
    message = refused([path])
    assert f"{path} line {lines[0]}: key" in message
    assert f"before ({path} line {lines[1]})" in message


def test_all_problems_come_in_one_error(write: Any) -> None:
    message = refused([write("name: [1]\nmodel: {dtype: int4}\nsed: 3\nprompts: {train: a}\nrollout: {reward: b}\n")])
    assert message.startswith("the configuration has 5 problems:\n")
    for key in (
        "name: expected",
        "model.dtype: expected",
        "model.path: required",
        "trainer.total_steps",
        "sed: unknown",
    ):
        assert f"  - {key}" in message


def test_a_missing_key_says_what_it_means(write: Any) -> None:
    message = refused([write(MINIMAL.replace("  total_steps: 10\n", "  ranks: 1\n"))])
    assert message == (
        "trainer.total_steps: required but missing (Optimizer steps of the whole run); "
        "set it in a file or as `trainer.total_steps=...`"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the file is empty"),
        (b"# nothing\n", "the file is empty"),
        (b"- a\n- b\n", "line 1: a configuration is a mapping"),
        (b"just words\n", "line 1: a configuration is a mapping"),
        (b"name: a\nrun_root: \xff\n", "line 2: not UTF-8"),
        (b"name: [a\nseed: 1\n", "not valid YAML"),
        (b"name: a\n\tseed: 1\n", "line 2: not valid YAML"),
        (b"name: a\n---\nname: b\n", "not valid YAML"),
        (b"name: \x00\n", "character U+0000"),
        (
            b"name: !!python/object/apply:os.system [ls]\n",
            "line 1: tag tag:yaml.org,2002:python/object/apply:os.system",
        ),
        (b"name: !!str a\n", "line 1: tag tag:yaml.org,2002:str is not allowed"),
        (b"name: &n a\nrun_root: *n\n", "line 2: alias *n is not allowed"),
        (b"1: a\n", "line 1: a key must be a name; put '1' in quotes"),
        (b"[a]: b\n", "line 1: a key must be a name"),
        (b"seed: 1e999\n", "line 1: 1e999 is too large for a number"),
        (b"a: " + b"[" * 5000, f"nested deeper than {MAX_DEPTH} levels"),
        (b"#" * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes"),
    ],
)
def test_a_broken_file_names_the_file_and_the_line(write: Any, text: bytes, message: str) -> None:
    path = write(text)
    found = refused([path])
    assert str(path) in found
    assert message in found


def test_an_alias_bomb_is_refused_at_once(write: Any) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "alias *a0" in refused([write("\n".join(rows))])


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=1", ".seed=1", "seed.=1", ".".join("a" * 2000) + "=1", ""])
def test_an_override_without_form_shows_the_form(write: Any, override: str) -> None:
    message = refused([write(MINIMAL)], override)
    assert message == f"override `{override}`: write it as dotted.key=value, such as algorithm.clip_high=0.28"


def test_a_broken_override_names_itself(write: Any) -> None:
    assert refused([write(MINIMAL)], "seed=[1").startswith("override `seed=[1`: not valid YAML")
    assert refused([write(MINIMAL)], "generation.server_args={a: 1, a: 2}").startswith(
        "override `generation.server_args"
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refused([tmp_path / "no.yaml"]) == (
        f"cannot read configuration {tmp_path / 'no.yaml'}: No such file or directory; check the path"
    )
    assert "Is a directory" in refused([tmp_path])


def test_J14_the_locale_does_not_matter(write: Any) -> None:
    path = write(MINIMAL + "run_root: Läufe/今日\n")
    code = (
        "import sys; from pathlib import Path; from areal_hpc.config.load import load;"
        "print(ascii(load([Path(sys.argv[1])]).run_root))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == ascii("Läufe/今日")


def test_keys_that_somebody_wrote_have_a_place(write: Any) -> None:
    file = write("name: a\nmodel: {path: b}\n")
    override = "generation.replicas=1"
    expected = {
        "name": f"{file} line 1",
        "model.path": f"{file} line 2",
        "generation.replicas": f"override `{override}`",
    }
    assert places(read([file], [override])) == expected


def test_reading_is_separate_from_typing(write: Any) -> None:
    assert read([write("anything: {at: [all]}\n")]).plain() == {"anything": {"at": ["all"]}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    width: float = 2.0
    """How wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """Some other dataclass: the loader knows no key by name."""

    size: int
    """How large."""
    inner: Inner = field(default_factory=lambda: Inner(width=3.0))
    """What is in it."""
    rest: Mapping[str, Any] = field(default_factory=dict)
    """Anything."""


def test_any_dataclass_can_be_built() -> None:
    tree = parse("size: 4\nrest: {a: [1, 2]}\n", "text")
    assert tree is not None
    assert build(Outer, tree) == Outer(size=4, rest={"a": [1, 2]})
    assert build(Outer, tree).inner.width == 3.0
    with pytest.raises(ConfigError, match=re.escape("size: required but missing (How large)")):
        build(Outer, parse("rest: {}", "text") or pytest.fail())


def test_every_error_of_a_configuration_is_a_config_error_that_can_cross_processes(write: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load([write("name: 1\n")])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_loading_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, areal_hpc.config.load, areal_hpc.config.resolve, areal_hpc.config.describe;"
        "sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_deepest_file_is_refused_not_recursed_into(write: Any) -> None:
    assert "nested deeper" in refused([write(b"- " * (MAX_BYTES // 2))])


def test_config_is_what_load_returns(write: Any) -> None:
    assert type(load([write(MINIMAL)])) is Config
