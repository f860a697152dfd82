"""What a Hugging Face checkpoint directory needs besides the weights, and adapters as the package ``peft`` has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from areal_hpc.config.lora import LoraConfig
from areal_hpc.fs import publish_json, read_json
from areal_hpc.pretrained.files import save_tensors
from areal_hpc.pretrained.lora import BASE, PEFT_PREFIX, Named, peft_config
from areal_hpc.privacy import follow_directory

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
GENERATION = "generation_config.json"
SHARD_BYTES = 4 << 30


def add_what_older_readers_need(config: Path) -> None:
    """Say in ``config.json`` at the top what transformers 5 says inside ``rope_parameters`` and under ``dtype``.

    Readers of the older layout would take their own default for a missing ``rope_theta``: no error, other positions.
    """
    settings = read_json(config)
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope:
        settings.setdefault("rope_theta", rope["rope_theta"])
    if "dtype" in settings:
        settings.setdefault("torch_dtype", settings["dtype"])
    publish_json(config, settings)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer byte for byte: loading and saving it again would rewrite it."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_checkpoint(
    weights: Iterable[tuple[str, Tensor]],
    source: Path,
    target: Path,
    *,
    scorer: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face checkpoint directory: ``weights`` in files of about ``shard_bytes``, the rest as ``source``.

    At most one file's tensors are in memory at a time.

    Args:
        scorer: whether it is a reward model: a sequence classifier with one label, in transformers' words.
    """
    target.mkdir(parents=True, exist_ok=True)
    file_of: dict[str, int] = {}
    dtypes: set[str] = set()
    num_bytes = 0
    for number, shard in enumerate(_shards(weights, shard_bytes)):
        save_tensors(shard, target / f"{number}.part", {"format": "pt"})
        file_of |= dict.fromkeys(shard, number)
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
        dtypes |= {str(tensor.dtype).removeprefix("torch.") for tensor in shard.values()}
    names = _file_names(max(file_of.values()) + 1)
    for number, name in enumerate(names):
        (target / f"{number}.part").rename(target / name)
    if len(names) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": {name: names[n] for name, n in file_of.items()}}
        publish_json(target / "model.safetensors.index.json", index)
    (dtype,) = dtypes
    config = {**read_json(source / "config.json"), "dtype": dtype, "torch_dtype": dtype}
    publish_json(target / "config.json", {**config, **(_one_label(config) if scorer else {})})
    add_what_older_readers_need(target / "config.json")
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, target / GENERATION)
    copy_tokenizer(source, target)
    follow_directory(target)


def write_adapters(adapters: Named, source: Path, target: Path, config: LoraConfig) -> None:
    """Write a directory that ``peft`` loads: adapters alone, their description, the tokenizer of ``source``.

    Args:
        adapters: by our names, and the fingerprint of the weights that they stand on, which the file's header keeps.
        source: directory of those weights.
    """
    tensors = {name: tensor.to("cpu").contiguous() for name, tensor in adapters}
    base = int(tensors.pop(BASE))
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(
        {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()},
        target / "adapter_model.safetensors",
        {"format": "pt", BASE: str(base)},
    )
    publish_json(target / "adapter_config.json", peft_config(config, str(source)))
    copy_tokenizer(source, target)
    follow_directory(target)


def _one_label(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a classifier's ``config.json`` says in place of a language model's."""
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or ()]
    return {"architectures": names, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def _shards(weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in host memory, in pieces that are full once they have ``shard_bytes``."""
    shard: dict[str, Tensor] = {}
    for name, tensor in weights:
        shard[name] = tensor.to("cpu", copy=True)
        if sum(one.nbytes for one in shard.values()) >= shard_bytes:
            yield shard
            shard = {}
    if shard:
        yield shard


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
