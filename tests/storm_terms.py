"""What a kill storm is made of: the run that it is let loose on, whom it kills and when, and what it found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from areal_hpc.report import Breach, Proof

CONFIG: dict[str, Any] = {
    "name": "run",
    "model": {"max_tokens": 64},
    "prompts": {"train": "tiny_task:Numbers", "eval": "tiny_task:Numbers", "limit": 24},
    "rollout": {
        "reward": "tiny_task:uneven",
        "group_size": 2,
        "concurrency": 4,
        "attempts": 1,
        "workers": 2,
        "reward_workers": 1,
        "sampling": {"max_new_tokens": 8},
    },
    "buffer": {"max_staleness": 1, "commit_s": 0.02},
    "algorithm": {"groups_per_step": 2},
    "trainer": {"total_steps": 1_000_000, "optimizer": {"lr": 1.0e-4}},
    "weights": {"bucket_mb": 0.02},
    "checkpoint": {"every_steps": 2},
    "evaluation": {"every_steps": 10, "num_prompts": 2, "at_start": False},
}
"""A data epoch is 12 steps or fewer, so that several end during a storm; some prompts fail and some are filtered."""


class Phase(StrEnum):
    """What the attempt was at when it was hit."""

    START = "start"
    STEP = "step"
    BROADCAST = "broadcast"
    CHECKPOINT = "checkpoint"


class How(StrEnum):
    """How real the run is."""

    PROCESSES = "processes"
    FORKS = "forks"
    STAND_INS = "stand-ins"


class Victim(StrEnum):
    """Who is killed."""

    TRAINER = "trainer"
    GENERATOR = "generator"
    ROLLOUT = "rollout"
    EVALUATOR = "evaluator"
    LAUNCHER = "launcher"
    EVERYTHING = "everything"
    FROZEN = "launcher, trainer frozen"


WEIGHTS = {
    Victim.TRAINER: 6,
    Victim.GENERATOR: 4,
    Victim.ROLLOUT: 4,
    Victim.EVALUATOR: 1,
    Victim.LAUNCHER: 2,
    Victim.EVERYTHING: 4,
    Victim.FROZEN: 1,
}
PHASES = {Phase.START: 3, Phase.STEP: 4, Phase.BROADCAST: 4, Phase.CHECKPOINT: 4}


@dataclass
class Outcome:
    """What a storm found so far; plain data, so that a storm can be broken off and continued."""

    kills: int = 0
    attempts: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    victims: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    to_first_step: list[float] = field(default_factory=list)
    """Seconds from the command to the attempt's first optimizer step."""
    from_start_record: list[float] = field(default_factory=list)
    """Of those, the seconds after the trainer's start record; before it come interpreters, imports and the model."""

    def facts(self, proof: Proof) -> dict[str, Any]:
        breaches = Counter(violation.breach for violation in proof.violations)
        return {
            "kills": self.kills,
            "attempts": self.attempts,
            "lost": breaches[Breach.LOST],
            "twice": breaches[Breach.TWICE],
            "failed_resumes": len(self.failures),
            "failures": self.failures,
            "kills_by_victim": self.victims,
            "kills_by_phase": self.phases,
            "seconds_to_first_step": quantiles(self.to_first_step),
            "seconds_from_start_record": quantiles(self.from_start_record),
            "seconds": round(self.seconds, 1),
            "proof": proof.facts(),
        }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 95th percentile and number of ``values``; None of none."""
    if not values:
        return None
    median, p95 = np.quantile(values, [0.5, 0.95])
    return {"median": round(float(median), 2), "p95": round(float(p95), 2), "number": len(values)}
