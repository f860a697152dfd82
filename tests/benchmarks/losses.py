"""What advantages and the loss cost beside the models: 512 answers of up to 4,096 tokens, against plain loops.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/losses.py [--verl PYTHON] [--answers N] [--tokens N]

Three things are done to the same numbers, in turns, ``REPEATS`` times each, and their results compared:

    advantages    ours (one number an answer, spread over its tokens) | a plain Python loop over groups and answers
    loss          ours (decoupled, with rejection and statistics)     | a plain Python loop over tokens
    verl          its ``compute_grpo_outcome_advantage``, if ``--verl`` names the interpreter of an environment that can
                  import verl (``pip install verl`` in one of its own); skipped, and said so, without

The loops are what the formulas say, in float64, and are run on ``LOOP_ANSWERS`` of the answers, since they take minutes
for all; their time is scaled up by tokens, and the row says so. Writes ``losses.json`` beside this file; exits with 1
where values differ.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe

from areal_hpc.algorithms.advantages import AdvantageInputs, trajectory_advantages
from areal_hpc.algorithms.losses import clipped_loss
from areal_hpc.algorithms.objective import LossInputs
from areal_hpc.config.algorithm import AlgorithmConfig, NormConfig, RejectionConfig

REPEATS = 5
GROUP = 8
LOOP_ANSWERS = 8
EPS = 1e-6
"""verl's default."""
CONFIG = AlgorithmConfig(reward_norm=NormConfig(eps=EPS), rejection_sampling=RejectionConfig(lower=0.5, upper=5.0))
VERL = """
import json, sys, time
import numpy as np, torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
data = np.load(sys.argv[1])
rewards, mask = torch.from_numpy(data["token_rewards"]), torch.from_numpy(data["mask"])
torch.set_num_threads(1)
times = []
for _ in range(int(sys.argv[3]) + 1):
    began = time.perf_counter()
    advantages, _ = compute_grpo_outcome_advantage(rewards.clone(), mask, data["groups"])
    times.append(time.perf_counter() - began)
np.save(sys.argv[2], advantages.numpy())
print(json.dumps(min(times[1:])))
"""


def numbers(answers: int, tokens: int) -> dict[str, Any]:
    """Rewards of 0 and 1, lengths from a sixteenth of ``tokens`` to all of them, policies a little apart."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(tokens // 16, tokens + 1, answers)
    total = int(lengths.sum())
    behaviour = generator.uniform(-4, -0.01, total).astype(np.float32)
    proximal = behaviour + generator.normal(scale=0.4, size=total).astype(np.float32)
    return {
        "lengths": lengths,
        "rewards": generator.integers(0, 2, answers).astype(np.float64),
        "behaviour": behaviour,
        "proximal": proximal,
        "current": proximal + generator.normal(scale=0.2, size=total).astype(np.float32),
    }


def our_advantages(given: dict[str, Any]) -> np.ndarray[Any, Any]:
    """[T]"""
    answers = given["lengths"].size
    inputs = AdvantageInputs(
        rewards=given["rewards"],
        groups=np.arange(answers) // GROUP,
        generated=given["lengths"],
        truncated=np.zeros(answers, dtype=np.bool_),
        episodes=np.arange(answers) % GROUP,
        max_new_tokens=int(given["lengths"].max()),
    )
    of_answers = trajectory_advantages(inputs, CONFIG).astype(np.float32)
    spread: np.ndarray[Any, Any] = np.repeat(of_answers, given["lengths"])
    return spread


def looped_advantages(given: dict[str, Any]) -> list[float]:
    """As the paper has it, a token at a time."""
    found: list[float] = []
    for start in range(0, len(given["rewards"]), GROUP):
        rewards = [float(reward) for reward in given["rewards"][start : start + GROUP]]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        for reward, length in zip(rewards, given["lengths"][start : start + GROUP], strict=True):
            for _ in range(int(length)):
                found.append((reward - mean) / (deviation + EPS))  # noqa: PERF401  a loop is what is measured
    return found


def our_loss(given: dict[str, Any], advantages: np.ndarray[Any, Any]) -> float:
    """The sum of all token losses, with its gradient."""
    current = torch.from_numpy(given["current"]).requires_grad_()
    output = clipped_loss(
        LossInputs(
            current=current,
            proximal=torch.from_numpy(given["proximal"]),
            behaviour=torch.from_numpy(given["behaviour"]),
            advantages=torch.from_numpy(advantages),
            mask=torch.ones(current.shape, dtype=torch.bool),
            segments=torch.from_numpy(np.repeat(np.arange(given["lengths"].size), given["lengths"])),
            versions=torch.zeros(current.shape, dtype=torch.int32),
            version_now=1,
        ),
        CONFIG,
    )
    total = output.per_token.double().sum()
    total.backward()  # type: ignore[no-untyped-call]
    return total.item()


def looped_loss(given: dict[str, Any], advantages: Sequence[float]) -> float:
    total = 0.0
    tokens = zip(
        given["current"].tolist(), given["proximal"].tolist(), given["behaviour"].tolist(), advantages, strict=True
    )
    for current, proximal, behaviour, advantage in tokens:
        weight = math.exp(proximal - behaviour)
        if 0.5 <= weight <= 5.0:
            ratio = math.exp(current - proximal)
            clipped = min(max(ratio, 1 - CONFIG.clip_low), 1 + CONFIG.clip_high)
            total += weight * max(-advantage * ratio, -advantage * clipped)
    return total


def first(given: dict[str, Any], answers: int) -> dict[str, Any]:
    """The first answers alone."""
    tokens = int(given["lengths"][:answers].sum())
    return {key: value[: answers if key in ("lengths", "rewards") else tokens] for key, value in given.items()}


def timed(function: Callable[[], Any], repeats: int = REPEATS) -> tuple[float, Any]:
    """The shortest of several times, after one that does not count; and what came out."""
    times, result = [], function()
    for _ in range(repeats):
        began = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - began)
    return min(times), result


def by_verl(python: str, given: dict[str, Any]) -> tuple[float, np.ndarray[Any, Any]]:
    """Its time and its advantages [T], from its padded layout."""
    width = int(given["lengths"].max())
    mask = np.arange(width) < given["lengths"][:, None]
    token_rewards = np.zeros(mask.shape, dtype=np.float32)
    token_rewards[np.arange(len(mask)), given["lengths"] - 1] = given["rewards"]
    with tempfile.TemporaryDirectory() as directory:
        paths = [f"{directory}/in.npz", f"{directory}/out.npy"]
        groups = np.arange(len(mask)) // GROUP
        np.savez(paths[0], token_rewards=token_rewards, mask=mask.astype(np.float32), groups=groups)
        told = subprocess.run(
            [python, "-c", VERL, *paths, str(REPEATS)], stdout=subprocess.PIPE, check=True, text=True, cwd=directory
        )
        return float(told.stdout.splitlines()[-1]), np.load(paths[1])[mask]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", default="", metavar="PYTHON")
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    torch.set_num_threads(1)
    given = numbers(options.answers, options.tokens)
    part = first(given, LOOP_ANSWERS)
    total, in_part = given["behaviour"].size, part["behaviour"].size
    rows: list[dict[str, Any]] = []

    def note(what: str, ours: float, theirs: float, largest: float, about: str) -> None:
        rows.append(
            {"what": what, "ours_s": ours, "theirs_s": theirs, "times_faster": theirs / ours, "difference": largest}
            | {"about": about}
        )

    ours_s, advantages = timed(lambda: our_advantages(given))
    loop_s, looped = timed(lambda: looped_advantages(part), 1)
    difference = float(np.abs(our_advantages(part) - np.array(looped)).max())
    scaled = f"loop timed on {in_part:,} tokens and scaled"
    note("advantages / Python loop", ours_s, loop_s * total / in_part, difference, scaled)
    if options.verl:
        verl_s, theirs = by_verl(options.verl, given)
        note("advantages / verl", ours_s, verl_s, float(np.abs(advantages - theirs).max()), "all tokens, padded there")
    else:
        print("verl: skipped; name an interpreter that can import it with --verl")
    ours_s, _ = timed(lambda: our_loss(given, advantages))
    loop_s, expected = timed(lambda: looped_loss(part, looped), 1)
    found = our_loss(part, our_advantages(part))
    note("loss / Python loop", ours_s, loop_s * total / in_part, abs(found - expected) / abs(expected), scaled)
    for row in rows:
        print(
            f"{row['what']:<26} {1e3 * row['ours_s']:>9.2f} ms  {1e3 * row['theirs_s']:>10.2f} ms  "
            f"{row['times_faster']:>8.1f} times faster, largest difference {row['difference']:.1e} ({row['about']})"
        )
    result = {"machine": describe(), "answers": options.answers, "tokens": total, "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["difference"] < 1e-3 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
