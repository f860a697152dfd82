"""How far a trainer is, and what its steps are made of, whichever backend computes them.

progress = Progress(algorithm, trainer, terms)
told = progress.take(minibatches, dealt_among, update=..., tell=..., critic=...)     one step
write = progress.writer(num_updates)            what a checkpoint says of it, as it is now
num_updates = progress.read(path)               and from there on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_hpc.algorithms.kl import adapted
from areal_hpc.algorithms.stats import Stats
from areal_hpc.config.algorithm import AlgorithmConfig
from areal_hpc.config.schema import TrainerConfig
from areal_hpc.errors import CheckpointError
from areal_hpc.fs import publish_json, read_json
from areal_hpc.training.lora import require_same_terms
from areal_hpc.training.ranks import Ranks
from areal_hpc.training.schedule import learning_rate
from areal_hpc.training.shards import PROGRESS
from areal_hpc.training.updates import account, each_update, loss_divisors, sums
from areal_hpc.types import Batch

Update = Callable[[Batch, int, float], tuple[list[Stats], float]]
"""``stats, norm = update(minibatch, divisor, lr)``: one optimizer update by the gradient of (sum of losses / divisor),
left out where its norm is not finite; the statistics are those of this rank's micro-batches."""
Learn = Callable[[Sequence[Batch], Sequence[int], float], dict[str, float]]
"""``told = learn(minibatches, totals, lr)``: has whatever else learns (a critic) learn from them, and gives what it
tells; ``totals`` are the trainable tokens of each minibatch on all ranks."""


class Progress:
    """The trainer's step, its KL coefficient, and the order in which a step is computed.

    Args:
        terms: what must be the same for a checkpoint of adapters to be loaded (``pretrained.lora.terms_of``); empty
            where no adapters are trained.
    """

    def __init__(self, algorithm: AlgorithmConfig, trainer: TrainerConfig, terms: Mapping[str, Any]) -> None:
        self._algorithm, self._trainer, self._terms = algorithm, trainer, terms
        self.step = 0
        self.kl_coef = algorithm.kl.coef

    @property
    def version_now(self) -> int:
        """The version that the step under way makes."""
        return self.step + 1

    def take(
        self,
        minibatches: Sequence[Batch],
        ranks: Ranks,
        *,
        update: Update,
        tell: Callable[[Sequence[Stats]], dict[str, float]],
        critic: Learn,
    ) -> Mapping[str, float]:
        """One update for each minibatch that has a trainable token; statistics of all ranks.

        Args:
            ranks: those among which sequences are dealt.
            tell: makes one account of the statistics of all ranks' micro-batches.
        """
        lr = learning_rate(self.version_now, self._trainer.optimizer, self._trainer.total_steps)
        totals = sums([batch.num_trainable for batch in minibatches], ranks)
        divisors = loss_divisors(minibatches, totals, self._algorithm, ranks)
        stats, norms = each_update(minibatches, totals, divisors, lambda batch, divisor: update(batch, divisor, lr))
        told = tell(stats)
        self.kl_coef = adapted(self.kl_coef, told.get("reference_kl", math.nan), self._algorithm.kl)
        learned = critic(minibatches, totals, lr)
        self.step += 1
        coefficient = {"kl_coef": self.kl_coef} if self._algorithm.kl.coef > 0 else {}
        return {**account(told, norms, totals, lr), **learned, **coefficient}

    def writer(self, num_updates: int) -> Callable[[Path], None]:
        """What is returned writes it into a directory, as it is now, in any thread."""
        saved = {"step": self.step, "num_updates": num_updates, "kl_coef": self.kl_coef, "lora": self._terms}
        return lambda path: publish_json(path / PROGRESS, saved)

    def read(self, path: Path) -> int:
        """Go on from the checkpoint ``path``; its number of updates.

        Raises:
            CheckpointError: it is none, or of other adapters.
        """
        if not (path / PROGRESS).is_file():
            raise CheckpointError(f"{path} has no {PROGRESS}; give a checkpoint of a run")
        saved = read_json(path / PROGRESS)
        require_same_terms(path, saved.get("lora") or {}, self._terms)
        self.step = saved["step"]
        if self._algorithm.kl.target is not None:  # one that does not adapt is the configuration's, also a changed one
            self.kl_coef = saved.get("kl_coef") or self.kl_coef  # 0 was off: nothing to go on from
        num_updates: int = saved["num_updates"]
        return num_updates
