"""A reward model: a decoder and one number for each conversation, read off the state after its last token.

On disk it is what `transformers` calls a sequence classifier with one label, so any tool that knows those can load it.
Training makes it, the reward process asks it; neither knows the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from areal_hpc.errors import DataError

HEAD = "score.weight"


def load_scorer(path: Path, *, new_head: bool) -> Any:
    """The reward model at ``path`` in float32.

    Args:
        new_head: whether a language model will do, which gets a head of zeros: until it has learned, all scores are 0.

    Raises:
        DataError: ``path`` is no checkpoint directory, lacks weights, or is no reward model where it must be one.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a log file is no terminal
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # what is missing is judged below
    if not (path / "config.json").is_file():
        raise DataError(f"{path} holds no config.json; give a Hugging Face checkpoint directory")
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except ValueError as error:  # transformers has no classifier of this family
        raise DataError(f"{path} cannot be a reward model: {error}; take another model family") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing == [HEAD] and new_head:
        torch.nn.init.zeros_(model.score.weight)
        missing = []
    if missing:
        raise DataError(
            f"{path} is no reward model: it lacks {len(missing)} weights, first {missing[0]}; give a directory that "
            "`areal-hpc export` wrote of a run with algorithm.name = reward_model"
        )
    return model


def scores(model: Any, hidden: Tensor) -> Tensor:
    """The score of each state; sums over the width in float32 whatever the model computes in. [N, H] -> float32 [N]"""
    return linear(hidden.float(), model.score.weight.float()).squeeze(-1)
