"""What a run without generation works with: a data set in place of the ring, no engines, and its own evaluation.

    rank 0      OfflineReader       reads, tokenizes and claims, as from the ring
    all ranks   answers_at          the groups of their share, by position
    all ranks   HeldOut             the loss on `prompts.eval`, at the edge of a step, before it is committed

Loop, journal, checkpoints and proof are those of any run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from areal_hpc.buffer.epochs import StartRecord, write_start
from areal_hpc.buffer.offline import OfflineReader
from areal_hpc.checkpoint import Checkpoint
from areal_hpc.config.recipes import recipe_of
from areal_hpc.config.schema import Config
from areal_hpc.dialogue.demonstration import conversations_of, group_of
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import DataError
from areal_hpc.fs import publish_json
from areal_hpc.journal import Journal
from areal_hpc.prompts import (
    PromptStream,
    Split,
    check_identity,
    first_prompts,
    open_dataset,
    prompt_of,
    stream_identity,
)
from areal_hpc.protocols import TrainerBackend
from areal_hpc.roles.process import RoleProcess
from areal_hpc.roles.wiring.evaluations import is_asked_for
from areal_hpc.roles.wiring.fleet import NoEngines, RunCoroutine
from areal_hpc.roles.wiring.training import TrainerSide
from areal_hpc.training.batching import pack
from areal_hpc.training.credit import assess
from areal_hpc.training.loop import Weights
from areal_hpc.training.ranks import Ranks
from areal_hpc.types import Prompt, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark

log = logging.getLogger(__name__)


def grouping(config: Config) -> Callable[[Prompt], TrajectoryGroup]:
    """What makes a group of a prompt's given answers."""
    renderer, data = ChatRenderer(config.model.path), recipe_of(config.algorithm.name).data
    return lambda prompt: group_of(prompt, renderer, data, config.prompts.rejected_key)


def answers_at(config: Config) -> Callable[[int], TrajectoryGroup]:
    """The group at each position of the endless stream of training answers."""
    stream = PromptStream(open_dataset(config.prompts, "train", config.seed), config.prompts, seed=config.seed)
    make = grouping(config)
    return lambda position: make(stream.at(position))


def make_offline_side(process: RoleProcess, parent: Checkpoint | None, _: RunCoroutine) -> TrainerSide:
    """What rank 0 has, where the data set is what it was."""
    config = process.config
    identity = stream_identity(open_dataset(config.prompts, "train", config.seed), config.prompts, config.seed)
    if parent is not None:
        check_identity(parent.state["prompts"], identity)
    state = None if parent is None else parent.state["ring"]

    def begin(version: WeightVersion, carried: Mapping[str, Any]) -> None:
        consumed = Watermark() if state is None else Watermark.from_state(state["consumed"])
        own = None if parent is None else parent.version
        fingerprint = str(identity["fingerprint"])
        record = StartRecord(parent=own, version=version, consumed=consumed, fingerprint=fingerprint, carried=carried)
        write_start(process.run, process.epoch, record)

    return TrainerSide(
        reader=OfflineReader(
            answers_at(config), num_rows=identity["rows"], max_tokens=config.model.max_tokens, state=state
        ),
        fleet=NoEngines(),
        identity=identity,
        journal=Journal(process.run, process.epoch),
        begin=begin,
        archiver=None,
    )


def keep_weights(version: int, weights: Weights) -> Mapping[str, float]:
    """In place of a publication: nobody is waiting for them, so they are not even gathered."""
    return {}


def check_answers(config: Config) -> None:
    """Look at every row's answers, and make one group, so that a bad row is found before the run.

    Raises:
        DataError: an answer is missing, or the model's chat template does not suit training; names the row.
    """
    data, prompts, make = recipe_of(config.algorithm.name).data, config.prompts, grouping(config)
    limits: dict[Split, int] = {"train": prompts.limit}
    if config.evaluation.every_steps:
        limits["eval"] = config.evaluation.num_prompts
    for split, limit in limits.items():
        dataset = open_dataset(prompts, split, config.seed)
        for row in range(min(limit or len(dataset), len(dataset))):
            conversations_of(prompt_of(dataset, prompts, row, row), data, prompts.rejected_key)
        make(prompt_of(dataset, prompts, 0, 0))


class HeldOut:
    """The evaluation of this rank: the first ``evaluation.num_prompts`` rows of ``prompts.eval``, divided over ranks.

    Its batch is made once. An evaluation is done before its step is committed, so no checkpoint lacks its own.

    Raises:
        DataError: every one of those rows is longer than ``model.max_tokens``.
    """

    def __init__(self, process: RoleProcess, ranks: Ranks, backend: TrainerBackend) -> None:
        config = process.config
        self._process, self._ranks, self._backend = process, ranks, backend
        make, dealt = grouping(config), backend.data_ranks
        dataset = open_dataset(config.prompts, "eval", config.seed)
        prompts = first_prompts(dataset, config.prompts, config.evaluation.num_prompts)
        groups = [make(prompt) for prompt in prompts[dealt.rank :: dealt.size]]
        fitting = [g for g in groups if max(t.token_ids.size for t in g.trajectories) <= config.model.max_tokens]
        self._num_rows = sum(dealt.gather(len(fitting)))
        if self._num_rows == 0:
            raise DataError(f"prompts.eval: every row is longer than model.max_tokens {config.model.max_tokens}")
        if too_long := len(prompts) - self._num_rows:
            log.warning("evaluation leaves out %d rows longer than model.max_tokens", too_long)
        trajectories = [trajectory for group in fitting for trajectory in group.trajectories]
        batch = pack(trajectories, [trajectory.reward for trajectory in trajectories])
        (self._batch,) = assess([batch], [batch.advantages.astype(float)], backend, config.algorithm, dealt)

    def measure(self, step: int) -> None:
        """Evaluate the weights of ``step`` if that is due; collective, told and kept by rank 0."""
        process = self._process
        if not is_asked_for(step, process.config.evaluation, process.config.trainer.total_steps):
            return
        began = time.monotonic()
        stats = {name: value for name, value in self._backend.evaluate(self._batch).items() if math.isfinite(value)}
        if self._ranks.leads:
            result = {"step": step, **stats, "samples": self._num_rows, "seconds": time.monotonic() - began}
            publish_json(process.run.evaluation(step), {"epoch": process.epoch, **result})
            process.recorder.record("evaluation", result)
