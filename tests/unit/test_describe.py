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

KNOBS = """\
name: str
model.path: str
model.maker: str
model.dtype: float32 | bfloat16
model.max_tokens: int
model.routing_replay: bool
model.lora.rank: int
model.lora.alpha: float
model.lora.target_modules: list of str
prompts.train: str
prompts.eval: str
prompts.prompt_key: str
prompts.answer_key: str
prompts.rejected_key: str
prompts.system: str
prompts.shuffle: bool
prompts.limit: int
prompts.task_args: mapping
rollout.reward: str
rollout.workflow: str
rollout.group_size: int
rollout.workers: int
rollout.concurrency: int
rollout.timeout_s: float
rollout.attempts: int
rollout.reward_workers: int
rollout.reward_timeout_s: float
rollout.sampling.max_new_tokens: int
rollout.sampling.temperature: float
rollout.sampling.top_p: float
rollout.sampling.top_k: int
rollout.sampling.min_p: float
rollout.sampling.stop: list of str
rollout.sampling.stop_token_ids: list of int
rollout.filter.zero_variance: bool
rollout.filter.max_overlong_fraction: float
rollout.filter.min_group_size: int
trainer.total_steps: int
trainer.backend: reference | megatron
trainer.ranks: int
trainer.parallel.tensor: int
trainer.parallel.pipeline: int
trainer.parallel.virtual_pipeline: int
trainer.parallel.context: int
trainer.parallel.expert: int
trainer.parallel.expert_tensor: int
trainer.optimizer.lr: float
trainer.optimizer.beta1: float
trainer.optimizer.beta2: float
trainer.optimizer.eps: float
trainer.optimizer.weight_decay: float
trainer.optimizer.grad_clip: float
trainer.optimizer.warmup_steps: int
trainer.optimizer.schedule: constant | linear | cosine
trainer.optimizer.min_lr: float
trainer.tokens_per_microbatch: int
trainer.recompute: none | attention | layers
trainer.attention: exact | flash | ascend | transformer_engine
trainer.fp8: bool
trainer.threads: int
trainer.torchrun_variables: bool
trainer.gap_alarm: float
seed: int
deterministic: bool
run_root: str
run_group: str
layout: str
buffer.max_staleness: int
buffer.segment_mb: float
buffer.max_mb: float or null
buffer.commit_s: float
buffer.min_free_mb: float
algorithm.name: str
algorithm.loss: str
algorithm.groups_per_step: int
algorithm.minibatches: int
algorithm.clip_low: float
algorithm.clip_high: float
algorithm.dual_clip: float or null
algorithm.length_normaliser: int
algorithm.sapo_tau_positive: float
algorithm.sapo_tau_negative: float
algorithm.m2_threshold: float or null
algorithm.decoupled: bool
algorithm.proximal: recompute | loglinear | reuse | behaviour
algorithm.rejection_sampling.metric: ratio | kl_k1 | kl_k2 | kl_k3 | binary_kl
algorithm.rejection_sampling.level: token | sequence
algorithm.rejection_sampling.action: mask | clamp
algorithm.rejection_sampling.agg: mean | sum | max
algorithm.rejection_sampling.lower: float or null
algorithm.rejection_sampling.upper: float or null
algorithm.reward_scale: float
algorithm.reward_bias: float
algorithm.reward_clip: float
algorithm.overlong.tokens: int
algorithm.overlong.factor: float
algorithm.reward_norm.mean: none | group | batch
algorithm.reward_norm.std: none | group | batch
algorithm.reward_norm.leave_one_out: bool
algorithm.reward_norm.unbiased: bool
algorithm.reward_norm.eps: float
algorithm.adv_norm.mean: none | group | batch
algorithm.adv_norm.std: none | group | batch
algorithm.adv_norm.leave_one_out: bool
algorithm.adv_norm.unbiased: bool
algorithm.adv_norm.eps: float
algorithm.gae.level: token | turn
algorithm.gae.discount: float
algorithm.gae.lam: float
algorithm.gae.alpha: float or null
algorithm.kl.coef: float
algorithm.kl.place: reward | loss
algorithm.kl.estimator: k1 | k2 | k3
algorithm.kl.reference: str
algorithm.kl.target: float or null
algorithm.kl.horizon: int
algorithm.critic.path: str
algorithm.critic.lr_scale: float
algorithm.critic.value_clip: float
algorithm.dpo.beta: float
algorithm.dpo.loss: sigmoid | ipo
algorithm.dpo.reference: str
agent.python: str
agent.args: mapping
agent.command: list of str
agent.env: list of str
agent.max_turns: int
agent.max_tokens: int
agent.max_s: float
agent.max_open: int
agent.discount: float
agent.tool_format: auto | hermes | qwen | qwen_coder | llama3 | deepseek_v3 | deepseek | glm | glm47 | kimi
agent.idle_s: float
agent.online.enabled: bool
agent.online.host: str
agent.online.port: int
agent.online.idle_s: float
agent.online.reward_wait_s: float
agent.online.baseline_window: int
generation.backend: embedded | sglang | vllm
generation.replicas: int
generation.tensor_parallel: int
generation.pipeline_parallel: int
generation.max_running: int
generation.max_requests: int
generation.max_outstanding_tokens: int
generation.threads: int
generation.python: str
generation.server_args: mapping
weights.transport: broadcast | disk
weights.bucket_mb: float
weights.delta: bool
weights.whole_every: int
weights.min_mb_per_s: float
evaluation.every_steps: int
evaluation.at_start: bool
evaluation.num_prompts: int
evaluation.samples: int
evaluation.temperature: float
evaluation.pass_reward: float
evaluation.checkpoint: str
evaluation.step: int
checkpoint.every_steps: int
checkpoint.keep: int
checkpoint.keep_every: int
checkpoint.keep_best: str
checkpoint.asynchronous: bool
archive.every_steps: int
replay.run: str
replay.from_step: int
replay.to_step: int
limits.start_s: float
limits.starve_s: float
limits.weight_update_s: float
limits.restarts: int
limits.restart_window_s: float
limits.attempts: int
limits.join_s: float
limits.rejoin_s: float
limits.checkpoint_s: float
limits.quiet_s: float
limits.engine_s: float
limits.worker_s: float
limits.stall_s: float
limits.stop_s: float
cluster.shape: local | het | split | satellites
cluster.share_nodes: bool
cluster.satellites: int
cluster.all.nodes: int
cluster.all.cpus: int
cluster.all.gpus: int
cluster.all.account: str
cluster.all.partition: str
cluster.all.qos: str
cluster.all.time: str
cluster.all.constraint: str
cluster.all.reservation: str
cluster.all.gres: str
cluster.all.gpus_per_node: str
cluster.all.gpus_per_task: str
cluster.all.mem: str
cluster.all.mem_per_cpu: str
cluster.all.mem_per_gpu: str
cluster.all.exclusive: str
cluster.all.nodelist: str
cluster.all.exclude: str
cluster.all.switches: str
cluster.all.licenses: str
cluster.all.network: str
cluster.all.raw: list of str
cluster.trainer.nodes: int
cluster.trainer.cpus: int
cluster.trainer.gpus: int
cluster.trainer.account: str
cluster.trainer.partition: str
cluster.trainer.qos: str
cluster.trainer.time: str
cluster.trainer.constraint: str
cluster.trainer.reservation: str
cluster.trainer.gres: str
cluster.trainer.gpus_per_node: str
cluster.trainer.gpus_per_task: str
cluster.trainer.mem: str
cluster.trainer.mem_per_cpu: str
cluster.trainer.mem_per_gpu: str
cluster.trainer.exclusive: str
cluster.trainer.nodelist: str
cluster.trainer.exclude: str
cluster.trainer.switches: str
cluster.trainer.licenses: str
cluster.trainer.network: str
cluster.trainer.raw: list of str
cluster.generation.nodes: int
cluster.generation.cpus: int
cluster.generation.gpus: int
cluster.generation.account: str
cluster.generation.partition: str
cluster.generation.qos: str
cluster.generation.time: str
cluster.generation.constraint: str
cluster.generation.reservation: str
cluster.generation.gres: str
cluster.generation.gpus_per_node: str
cluster.generation.gpus_per_task: str
cluster.generation.mem: str
cluster.generation.mem_per_cpu: str
cluster.generation.mem_per_gpu: str
cluster.generation.exclusive: str
cluster.generation.nodelist: str
cluster.generation.exclude: str
cluster.generation.switches: str
cluster.generation.licenses: str
cluster.generation.network: str
cluster.generation.raw: list of str
cluster.rollout.nodes: int
cluster.rollout.cpus: int
cluster.rollout.gpus: int
cluster.rollout.account: str
cluster.rollout.partition: str
cluster.rollout.qos: str
cluster.rollout.time: str
cluster.rollout.constraint: str
cluster.rollout.reservation: str
cluster.rollout.gres: str
cluster.rollout.gpus_per_node: str
cluster.rollout.gpus_per_task: str
cluster.rollout.mem: str
cluster.rollout.mem_per_cpu: str
cluster.rollout.mem_per_gpu: str
cluster.rollout.exclusive: str
cluster.rollout.nodelist: str
cluster.rollout.exclude: str
cluster.rollout.switches: str
cluster.rollout.licenses: str
cluster.rollout.network: str
cluster.rollout.raw: list of str
cluster.job_name: str
cluster.comment: str
cluster.dependency: str
cluster.mail_type: str
cluster.mail_user: str
cluster.signal_lead_s: int
cluster.requeue: bool
cluster.setup: list of str
cluster.prefix: str
cluster.container.runtime: none | apptainer | pyxis | shifter
cluster.container.image: str
cluster.container.mounts: list of str
cluster.container.args: list of str
cluster.mpi: str
cluster.python: str
telemetry.sinks: list of tensorboard | wandb
telemetry.wandb_mode: str
"""


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
    assert [f"{key.name}: {type_name(key.type)}" for key in keys().values()] == KNOBS.splitlines()


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
