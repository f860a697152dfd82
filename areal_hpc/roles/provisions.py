"""What a run needs on disk before it starts, checked without torch: nodes of many sites cannot fetch anything later."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from areal_hpc.config.schema import Config, PromptsConfig

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
INDEX = "model.safetensors.index.json"


def missing(config: Config) -> Iterator[str]:
    """What is not there, a sentence each, which ends with what to do."""
    image = config.cluster.container.image
    if image.startswith("/") and not Path(image).exists():
        yield f"there is no {image}; set cluster.container.image to a file that all nodes see"
    if not (config.model.maker and not Path(config.model.path).exists()):
        yield from missing_of_model(Path(config.model.path))
    if config.replay.run:
        return
    yield from _missing_data(config.prompts, "train")
    if config.evaluation.every_steps:
        yield from _missing_data(config.prompts, "eval")


def missing_of_model(directory: Path) -> Iterator[str]:
    """What a Hugging Face checkpoint directory lacks."""
    get = f"model.path: fetch it where there is a network, such as with `hf download MODEL --local-dir {directory}`"
    if not directory.is_dir():
        yield f"there is no directory {directory}; {get}"
        return
    names = set(os.listdir(directory))
    if "config.json" not in names:
        yield f"{directory} has no config.json; {get}"
    if not names & set(TOKENIZERS):
        yield f"{directory} has no tokenizer ({', '.join(TOKENIZERS)}); {get}"
    shards = _shards(directory) if INDEX in names else {name for name in names if name.endswith(".safetensors")}
    if not shards:
        yield f"{directory} has no weights (*.safetensors); {get}"
    for name in sorted(shards - names):
        yield f"{directory}/{name} is in the index of the weights, and not there; {get}"
    empty = [name for name in sorted(shards & names) if not (directory / name).stat().st_size]
    if empty:
        yield f"{directory}/{empty[0]} is empty; {get}"


def _shards(directory: Path) -> set[str]:
    return set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values())


def _missing_data(prompts: PromptsConfig, key: str) -> Iterator[str]:
    """A task given as module:Class makes its prompts itself."""
    where = getattr(prompts, key)
    if ":" not in where and not Path(where).exists():
        yield f"there is no {where}; set prompts.{key} to a file or directory that all nodes see"
