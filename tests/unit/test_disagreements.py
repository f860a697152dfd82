"""Every combination of values that cannot be, each by the check that finds it."""

from __future__ import annotations

from typing import Any

import pytest
from good_config import GOOD, changed, refused

from areal_hpc.config.algorithm import Level
from areal_hpc.config.checks import CHECKS
from areal_hpc.config.cluster import Runtime, Shape
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import Attention, Dtype, EngineName, Recompute, Schedule, TrainerBackendName, TransportName

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "check_name": ({"name": "my run"}, "name: 'my run' cannot be a directory's name"),
    "check_not_empty": ({"model__path": ""}, "model.path: empty"),
    "check_dotted_paths": ({"rollout__reward": "tasks.reward"}, "rollout.reward: 'tasks.reward' is no dotted path"),
    "check_agent": (
        {"agent__python": "my:Agent", "agent__command": ("run",)},
        "agent: both `python` and `command` are given; keep one of the two",
    ),
    "check_agent, workflow": (
        {"agent__python": "my:Agent", "rollout__workflow": "my:Workflow"},
        "rollout.workflow: an agent runs the episodes, so my:Workflow would not; leave it out",
    ),
    "check_online": (
        {"agent__online__enabled": True, "agent__python": "my:Agent"},
        "agent.online.enabled: agents in daily use run themselves; leave agent.python and agent.command out",
    ),
    "check_online, workers": (
        {"agent__online__enabled": True, "rollout__workers": 2},
        "rollout.workers: 2 would be as many services, and agents know one; set it to 1",
    ),
    "check_online, evaluation": (
        {
            "agent__online__enabled": True,
            "evaluation__every_steps": 2,
            "prompts__eval": "my:Task",
            "rollout__reward": "",
        },
        "evaluation.every_steps: no rollout.reward measures anything; set it, or evaluation.every_steps to 0",
    ),
    "check_online, deterministic": (
        {"agent__online__enabled": True, "deterministic": True},
        "deterministic: what people ask, and when, is not; set it to false, or agent.online.enabled to false",
    ),
    "check_online, offline": (
        {"agent__online__enabled": True, "algorithm__name": "sft", "rollout__reward": ""},
        "agent.online.enabled: algorithm.name sft learns from a data set; choose another",
    ),
    "check_wandb_mode": ({"telemetry__wandb_mode": "on"}, "telemetry.wandb_mode: 'on' is no mode"),
    "check_trainer_ranks": (
        {"trainer__backend": TrainerBackendName.MEGATRON, "trainer__ranks": 6, "trainer__parallel__tensor": 4},
        "trainer.ranks: 6 is no multiple of tensor * pipeline * context = 4",
    ),
    "check_trainer_ranks, experts": (
        {"trainer__backend": TrainerBackendName.MEGATRON, "trainer__ranks": 4, "trainer__parallel__expert": 8},
        "trainer.ranks: 4 is no multiple of expert * expert_tensor * pipeline = 8",
    ),
    "check_virtual_pipeline": (
        {"trainer__backend": TrainerBackendName.MEGATRON, "trainer__parallel__virtual_pipeline": 2},
        "trainer.parallel.virtual_pipeline: 2 chunks need more than one pipeline stage",
    ),
    "check_reference_backend": (
        {"trainer__ranks": 2, "trainer__parallel__tensor": 2},
        "trainer.backend: reference is data-parallel only",
    ),
    "check_reference_backend, recompute": (
        {"trainer__recompute": Recompute.LAYERS},
        "trainer.recompute: reference keeps every activation, so layers does nothing",
    ),
    "check_attention": (
        {"trainer__attention": Attention.FLASH},
        "trainer.attention: flash needs trainer.backend=megatron",
    ),
    "check_attention, context": (
        {
            "model__dtype": Dtype.BFLOAT16,
            "trainer__backend": TrainerBackendName.MEGATRON,
            "trainer__attention": Attention.ASCEND,
            "trainer__ranks": 2,
            "trainer__parallel__context": 2,
        },
        "trainer.attention: ascend needs trainer.backend=megatron, model.dtype=bfloat16 and trainer.parallel.context=1",
    ),
    "check_attention, fp8": (
        {"trainer__backend": TrainerBackendName.MEGATRON, "trainer__fp8": True},
        "trainer.fp8: needs trainer.backend=megatron and model.dtype=bfloat16",
    ),
    "check_engine_ranks": ({"generation__tensor_parallel": 2}, "generation.backend: embedded runs the model whole"),
    "check_engine_ranks, stages": (
        {"generation__backend": EngineName.SGLANG, "generation__pipeline_parallel": 2},
        "generation.pipeline_parallel: the ranks of 2 stages cannot enter one weight group of SGLang; set weights.",
    ),
    "check_engine_ranks, changes": (
        {
            "generation__backend": EngineName.SGLANG,
            "generation__pipeline_parallel": 2,
            "weights__transport": TransportName.DISK,
            "weights__delta": True,
        },
        "weights.delta: the stages of an engine do not agree on whether all have taken a change; set it to false",
    ),
    "check_server_args": ({"generation__server_args": {"a": 1}}, "generation.server_args: the embedded engine"),
    "check_routing": (
        {"model__routing_replay": True, "trainer__backend": TrainerBackendName.MEGATRON},
        "model.routing_replay: embedded does not tell which experts computed a token; set it to false, or generation",
    ),
    "check_routing, trainer": (
        {"model__routing_replay": True, "generation__backend": EngineName.SGLANG},
        "model.routing_replay: reference cannot choose experts by a record; set it to false, or trainer.backend=",
    ),
    "check_routing, stages": (
        {
            "model__routing_replay": True,
            "trainer__backend": TrainerBackendName.MEGATRON,
            "generation__backend": EngineName.SGLANG,
            "generation__pipeline_parallel": 2,
            "weights__transport": TransportName.DISK,
        },
        "generation.pipeline_parallel: one stage of an engine does not tell which experts the layers of another chose",
    ),
    "check_lora": ({"model__lora__alpha": 8.0}, "model.lora: does nothing with model.lora.rank = 0"),
    "check_lora, nothing": (
        {"model__lora__rank": 8, "model__lora__target_modules": ()},
        "model.lora.target_modules: empty trains nothing",
    ),
    "check_lora, no layer": (
        {"model__lora__rank": 8, "model__lora__target_modules": ("q_proj", "fc1")},
        "model.lora.target_modules: generation.backend=embedded knows no fc1; choose among q_proj",
    ),
    "check_lora, a head": (
        {"model__lora__rank": 8, "algorithm__name": "reward_model", "prompts__answer_key": "a", "rollout__reward": ""},
        "model.lora.rank: a reward model has a new head",
    ),
    "check_lora, megatron": (
        {
            "model__lora__rank": 8,
            "model__lora__target_modules": ("q_proj", "v_proj"),
            "trainer__backend": TrainerBackendName.MEGATRON,
        },
        "model.lora.target_modules: trainer.backend=megatron computes q_proj, k_proj, v_proj as one",
    ),
    "check_algorithm_settings": ({"algorithm__decoupled": False}, "algorithm.decoupled"),
    "check_lengths, overlong": ({"algorithm__overlong__tokens": 513}, "algorithm.overlong.tokens: a penalty zone"),
    "check_algorithm_settings, E14: a group of one": (
        {"rollout__group_size": 1, "rollout__filter__min_group_size": 1, "rollout__filter__zero_variance": False},
        "rollout.group_size",
    ),
    "check_time_limits, worker": (
        {"limits__worker_s": 20.0},
        "limits.worker_s: 20 s replaces a hung worker before limits.quiet_s 25 s has let it be named",
    ),
    "check_time_limits, stall": (
        {"limits__stall_s": 20.0},
        "limits.stall_s: 20 s ends a stalled attempt before limits.quiet_s 25 s has let it be named",
    ),
    "check_time_limits, engine": (
        {"limits__engine_s": 20.0},
        "limits.engine_s: 20 s replaces a hung engine before limits.quiet_s 25 s has let it be named",
    ),
    "check_groups": ({"rollout__filter__min_group_size": 1}, "rollout.filter.min_group_size: 1 lets groups of one"),
    "check_groups, refuses all": (
        {"rollout__filter__min_group_size": 9},
        "rollout.filter.min_group_size: 9 refuses every group of rollout.group_size 8",
    ),
    "check_groups, no variance": (
        {
            "rollout__group_size": 1,
            "rollout__filter__min_group_size": 1,
            "algorithm__reward_norm__mean": Level.BATCH,
            "algorithm__reward_norm__std": Level.BATCH,
        },
        "rollout.filter.zero_variance: true refuses every group of one episode",
    ),
    "check_minibatches": ({"algorithm__minibatches": 17}, "algorithm.minibatches: 17 exceeds the 16 groups of a step"),
    "check_lengths": (
        {"rollout__sampling__max_new_tokens": 4096},
        "rollout.sampling.max_new_tokens: 4096 leaves no room for a prompt in model.max_tokens 4096",
    ),
    "check_lengths, micro-batch": (
        {"trainer__tokens_per_microbatch": 4095},
        "trainer.tokens_per_microbatch: a sequence of model.max_tokens 4096 exceeds a micro-batch of 4095 tokens",
    ),
    "check_top_k": ({"rollout__sampling__top_k": 0}, "rollout.sampling.top_k: 0 keeps no token; write -1 for off"),
    "check_schedule": ({"trainer__optimizer__warmup_steps": 100}, "trainer.optimizer.warmup_steps: 100 is the"),
    "check_schedule, min_lr": (
        {"trainer__optimizer__min_lr": 1.0, "trainer__optimizer__schedule": Schedule.LINEAR},
        "trainer.optimizer.min_lr: 1.0 is above",
    ),
    "check_schedule, constant": (
        {"trainer__optimizer__lr": 1e-3, "trainer__optimizer__min_lr": 1e-4},
        "trainer.optimizer.min_lr: 0.0001 is where a falling learning rate ends, and trainer.optimizer.schedule is con",
    ),
    "check_ring": ({"rollout__workers": 49}, "rollout.workers: 49 workers share"),
    "check_quota": ({"buffer__max_mb": 0.0005}, "buffer.max_mb: 0.0005 MiB cannot hold the algorithm.groups_per_step"),
    "check_time_limits": ({"rollout__reward_timeout_s": 601.0}, "rollout.reward_timeout_s: 601 s is longer"),
    "check_time_limits, starve": ({"limits__starve_s": 599.0}, "limits.starve_s: 599 s ends the run while an episode"),
    "check_evaluation": ({"evaluation__every_steps": 5}, "evaluation.every_steps: there is nothing to evaluate on"),
    "check_evaluated": (
        {"evaluation__checkpoint": "runs/a"},
        "evaluation.checkpoint: runs/a is not what model.path",
    ),
    "check_evaluated, step": ({"evaluation__step": 5}, "evaluation.step: is of evaluation.checkpoint, which is empty"),
    "check_deterministic": (
        {"deterministic": True, "generation__backend": EngineName.SGLANG},
        "generation.backend: sglang is not known to be deterministic; choose embedded, or set deterministic to false",
    ),
    "check_deterministic, trainer": (
        {"deterministic": True, "trainer__backend": TrainerBackendName.MEGATRON},
        "trainer.backend: megatron is not known to be deterministic; choose reference, or set deterministic to false",
    ),
    "check_job": (
        {"cluster__shape": Shape.SPLIT, "cluster__signal_lead_s": 5},
        "cluster.signal_lead_s: 5 s is too short for a stop, which may take limits.stop_s 10 s; raise it, or set it to",
    ),
    "check_replicas": (
        {"generation__replicas": 0, "cluster__shape": Shape.SPLIT},
        "generation.replicas: 0 leaves generation to satellites, which this run does not take; raise it, or set",
    ),
    "check_shared_nodes": (
        {"cluster__share_nodes": True, "cluster__generation__nodes": 2},
        "cluster.generation: asks for nothing with cluster.share_nodes, which puts the engines on the trainer's nodes",
    ),
    "check_container": (
        {"cluster__container__runtime": Runtime.PYXIS},
        "cluster.container.image: required by cluster.container.runtime pyxis; set it",
    ),
    "check_container, none": (
        {"cluster__container__mounts": ("/scratch",)},
        "cluster.container.runtime: none starts no container; choose apptainer, pyxis or shifter, or remove the rest",
    ),
    "check_container, A41 a name": (
        {
            "cluster__container__runtime": Runtime.PYXIS,
            "cluster__container__image": "a.sqsh",
            "cluster__container__args": ("--container-name=mine",),
        },
        "cluster.container.args: --container-name would hand a later job on the node what this one has written",
    ),
    "check_replay": (
        {"replay__run": "runs/a", "archive__every_steps": 5},
        "replay.run: a replay generates nothing, so there is nothing to evaluate and nothing new to archive",
    ),
    "check_reward": ({"rollout__reward": ""}, "rollout.reward: required but missing; set it to a function"),
    "check_microbatch": (
        {"model__max_tokens": 9000},
        "trainer.tokens_per_microbatch: a sequence of model.max_tokens 9000 exceeds a micro-batch of 8192 tokens",
    ),
    "check_offline": (
        {"algorithm__name": "sft"},
        "rollout.reward: tasks:reward does nothing with algorithm.name = sft, which generates nothing; remove it",
    ),
    "check_pairs": (
        {"algorithm__name": "dpo", "rollout__reward": "", "model__max_tokens": 5000},
        "trainer.tokens_per_microbatch: a pair of model.max_tokens 5000 each exceeds a micro-batch of 8192 tokens",
    ),
    "check_pairs, online": (
        {"prompts__rejected_key": "worse"},
        "prompts.rejected_key: worse does nothing with algorithm.name = grpo; remove it",
    ),
    "check_conversations": ({"prompts__answer_key": ""}, "prompts.answer_key: empty is for algorithm.name = sft"),
    "check_replay, no steps": (
        {"replay__from_step": 4, "replay__to_step": 4},
        "replay.to_step: 4 is not after replay.from_step 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_J3_values_that_do_not_fit_each_other_are_one_named_problem(case: str) -> None:
    values, message = BAD[case]
    assert message in refused(changed(**values))
    assert "problems" not in refused(changed(**values))


def test_deterministic_training_is_of_one_machine_unless_somebody_says_otherwise_which_is_refused() -> None:
    assert resolve(GOOD).cluster.shape is Shape.HET
    assert resolve(changed(deterministic=True)).cluster.shape is Shape.LOCAL
    message = refused(changed(deterministic=True), ("cluster.shape",))
    assert "cluster.shape: het may mix kinds of CPUs, which round differently; set it to local" in message


def test_every_check_has_a_case() -> None:
    assert {check.__name__ for check in CHECKS} == {case.partition(",")[0] for case in BAD}
