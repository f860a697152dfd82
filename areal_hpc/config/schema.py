"""Every knob of a run, as frozen dataclasses. The string under a field is its help text and its only documentation.

A field without a default is required. Values that follow from others (ring capacity, data-parallel size) are not
fields: ``resolve.py`` derives them, and checks what no single field can know. No torch, no I/O. Sections that would
make this page too long lie beside it, by subject; whoever needs one takes it from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_hpc.config.agents import AgentConfig, OnlineConfig, ToolFormatName
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.cluster import ClusterConfig
from areal_hpc.config.endurance import ArchiveConfig, CheckpointConfig, LimitsConfig, ReplayConfig
from areal_hpc.config.engines import EngineName, GenerationConfig, TransportName, WeightsConfig
from areal_hpc.config.lora import LoraConfig

__all__ = [  # of the sections beside this page; what is defined here needs no list
    "AgentConfig",
    "ArchiveConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "EngineName",
    "GenerationConfig",
    "LimitsConfig",
    "LoraConfig",
    "OnlineConfig",
    "ReplayConfig",
    "ToolFormatName",
    "TransportName",
    "WeightsConfig",
]


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class TrainerBackendName(StrEnum):
    REFERENCE = "reference"
    MEGATRON = "megatron"


class Recompute(StrEnum):
    NONE = "none"
    ATTENTION = "attention"
    LAYERS = "layers"


class Attention(StrEnum):
    EXACT = "exact"
    FLASH = "flash"
    ASCEND = "ascend"
    TRANSFORMER_ENGINE = "transformer_engine"


class Schedule(StrEnum):
    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class Sink(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str
    """Hugging Face checkpoint directory on disk: config.json, safetensors, tokenizer with a chat template."""
    maker: str = ""
    """Dotted path `module:function` that writes the directory when it does not exist; called with (path, seed)."""
    dtype: Dtype = Dtype.FLOAT32
    """Number format of the weights in the trainer and the engines."""
    max_tokens: int = 4096
    """Longest sequence (prompt and answer together) that is generated or trained on, in tokens."""
    routing_replay: bool = False
    """Mixtures of experts: engines tell which experts computed a token, and the trainer has the same ones compute it.
    Costs layers times experts of a token in bytes for each token (twice that from 256 experts on), in the ring and the
    archive; with sglang and megatron."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters that are trained in place of the model's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsConfig:
    train: str
    """Training prompts: a .jsonl or .parquet file, a `datasets` directory on disk, or a task `module:Class`."""
    eval: str = ""
    """Evaluation prompts, same forms; empty means none."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a text, or a list of chat messages."""
    answer_key: str = "answer"
    """Column that holds the expected answer, handed to the reward as it is. Offline: the answer to learn or to prefer;
    empty for `sft` on whole conversations, whose every assistant turn is learned."""
    rejected_key: str = "rejected"
    """Column that holds the worse answer of a pair, for `dpo` and `reward_model`."""
    system: str = ""
    """System message put before every prompt that is a plain text; empty means none."""
    shuffle: bool = True
    """Draw prompts in an order seeded by `seed` and the data epoch; false keeps the order of the file."""
    limit: int = 0
    """Use only the first so many training prompts; 0 means all."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for a task given as `module:Class`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the trainer computes log-probs at the same one."""
    top_p: float = 1.0
    """Nucleus sampling: smallest set of tokens whose probability reaches this; 1.0 is off. Behaviour log-probs are then
    of what is left, as with `top_k` and `min_p`, and the trainer's of all tokens: a token's ratio proximal / behaviour
    is lower by the share that was cut off."""
    top_k: int = -1
    """Sample among the k likeliest tokens; -1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0.0 is off."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, besides the model's own end-of-turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    zero_variance: bool = True
    """Refuse a group whose rewards are all equal: it carries no gradient under group-relative advantages. Under others
    it does, and what is left is a biased sample: with `ppo` and `reinforce_pp` this is false unless it is written."""
    max_overlong_fraction: float = 1.0
    """Refuse a group in which more than this share of answers was cut by length; 1.0 is off."""
    min_group_size: int = 2
    """Refuse a group with fewer episodes left after failures; at least 2 for group-relative advantages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    reward: str = ""
    """Reward function as a dotted path `module:function`, called as f(completion text, answer, prompt); or a directory,
    written with a `/`, that holds a reward model as `areal-hpc export` writes it. Every run with episodes needs one."""
    workflow: str = "areal_hpc.rollout.workflows:SingleTurn"
    """Workflow class as a dotted path: how one episode runs."""
    group_size: int = 8
    """Episodes for each prompt."""
    workers: int = 1
    """Rollout processes."""
    concurrency: int = 64
    """Prompts (groups of episodes) in flight in one rollout process, and in the evaluator."""
    timeout_s: float = 600.0
    """Time limit of one episode; past it the sample is failed."""
    attempts: int = 3
    """How often a failed group is tried before its prompt is dropped as failed."""
    reward_workers: int = 1
    """Processes that compute rewards, for each rollout process."""
    reward_timeout_s: float = 10.0
    """Time limit of one reward; past it the process is killed and the sample is failed."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How training answers are sampled."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which finished groups are worth training on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferConfig:
    max_staleness: int = 2
    """Oldest weights a trained token may come from, in optimizer steps behind; 0 is synchronous training."""
    segment_mb: float = 64.0
    """Size at which a segment file of the ring is sealed and the next begun, in MiB."""
    max_mb: float | None = None
    """Most that the ring may hold on the disk, in MiB; null is no limit. At the limit workers wait, and a checkpoint is
    made early if the ring can delete more after it. Room for (2.2 * max_staleness + 5) * algorithm.groups_per_step
    groups of full length, each rollout.group_size * model.max_tokens * 13 bytes, is enough for nobody to wait; with
    less than one step needs, the run ends and says how much would do."""
    commit_s: float = 0.2
    """Longest time a finished group waits in memory before it is made durable, in seconds. Trainer and workers look for
    each other's news at most once in that time, or in 5 times that on a file system with a server, as NFS or Lustre."""
    min_free_mb: float = 256.0
    """Free space below which no new prompt is begun, in MiB. It leaves room for what is in flight, and for a checkpoint
    that is made early then, since the ring may delete more after it; 0 is off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    beta1: float = 0.9
    """First moment's decay."""
    beta2: float = 0.95
    """Second moment's decay."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    grad_clip: float = 1.0
    """Largest gradient norm over all parameters."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    schedule: Schedule = Schedule.CONSTANT
    """How the learning rate falls after the warm-up, until `trainer.total_steps`."""
    min_lr: float = 0.0
    """Learning rate at the end of a falling schedule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    tensor: int = 1
    """Ranks that share each layer's matrices."""
    pipeline: int = 1
    """Stages that the layers are split into."""
    virtual_pipeline: int = 1
    """Chunks of layers for each stage, for the interleaved schedule."""
    context: int = 1
    """Ranks that share each sequence."""
    expert: int = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor: int = 1
    """Ranks that share each expert's matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    total_steps: int
    """Optimizer steps of the whole run."""
    backend: TrainerBackendName = TrainerBackendName.REFERENCE
    """`reference`: plain torch, data-parallel. `megatron`: Megatron-core."""
    ranks: int = 1
    """Trainer processes, one for each GPU; data parallel = ranks / (tensor * pipeline * context)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How one model is split over ranks."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""
    tokens_per_microbatch: int = 8192
    """Token budget of one forward and backward on one rank."""
    recompute: Recompute = Recompute.NONE
    """What backward computes again instead of forward keeping it: `attention`, or whole `layers`; `megatron` only."""
    attention: Attention = Attention.EXACT
    """Kernel of `megatron`: `exact` runs everywhere, a call of torch's for each sequence; in one call for all sequences
    and in bfloat16 `flash` is flash-attn's, `transformer_engine` Transformer Engine's, `ascend` torch_npu's."""
    fp8: bool = False
    """Matrix products of a dense model's layers in FP8 (E4M3 forward, E5M2 backward, each tensor scaled by its own
    largest number), by Transformer Engine; `megatron` in bfloat16 only."""
    threads: int = 1
    """CPU threads of one trainer process."""
    torchrun_variables: bool = False
    """Give the trainer's ranks RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun does, for code of
    yours that enters a group by them; LOCAL_RANK counts the devices that a rank sees, which on a cluster is its own."""
    gap_alarm: float = 0.05
    """Warn where trainer and engines differ by more, in nats a token, on what the same weights sampled; 0 is off. Only
    `algorithm.proximal: recompute` has the log-probs for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    every_steps: int = 0
    """Evaluate each so many optimizer steps, and after the last; 0 evaluates never."""
    at_start: bool = True
    """Also evaluate the weights the run starts from; the first optimizer step waits until it is done."""
    num_prompts: int = 128
    """Evaluation prompts, the first ones of `prompts.eval`."""
    samples: int = 1
    """Answers for each prompt."""
    temperature: float = 1.0
    """Sampling temperature of evaluation; 0 is greedy."""
    pass_reward: float = 1.0
    """An answer with at least this reward has passed, for pass@k."""
    checkpoint: str = ""
    """Only evaluate, and this: a Hugging Face directory or a run. `areal-hpc eval` sets it; empty is a run as usual."""
    step: int = 0
    """Optimizer step of that run's checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    sinks: tuple[Sink, ...] = ()
    """Trackers fed besides the JSONL files that every run writes."""
    wandb_mode: str = "offline"
    """Mode of the wandb sink: offline, online or disabled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The whole of one experiment."""

    name: str
    """Name of the experiment; its run directory is run_root/name. Letters, digits, `.`, `_`, `-`."""
    model: ModelConfig
    """The language model."""
    prompts: PromptsConfig
    """Where prompts come from."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How prompts become scored trajectories."""
    trainer: TrainerConfig
    """How trajectories become weights."""
    seed: int = 1
    """Seed of every random stream of the run."""
    deterministic: bool = False
    """The same weights, bit for bit, however often the run is killed; on CPU, and with generation.max_running = 1."""
    run_root: str = "runs"
    """Directory that run directories are made in; relative to where the command is typed."""
    run_group: str = ""
    """Unix group whose members may look at the run, stop it, and go on with it when its owner cannot; empty: nobody but
    its owner. Secrets are of who runs it: a member who takes over makes new ones."""
    layout: str = ""
    """Compact layout such as `sglang:d4t2+megatron:d2p2t2`; fills `generation` and `trainer`, which must agree."""
    buffer: BufferConfig = field(default_factory=BufferConfig)
    """The rollout ring."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and loss."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """An agent that runs the episodes."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """The inference engines."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """How weights travel from trainer to engines."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When and how many."""
    archive: ArchiveConfig = field(default_factory=ArchiveConfig)
    """Trained groups kept for people and tools."""
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    """Training again on what another run has archived."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    """How long anything may take before it is an error with a name."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where the run runs."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Where numbers go."""
