"""What a Hugging Face checkpoint directory needs besides the weights."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from areal_hpc.fs import publish_json, read_json

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


def follow_umask(directory: Path) -> None:
    """Let others read the files as far as they may read the directory; safetensors and we create private ones."""
    mode = stat.S_IMODE(directory.stat().st_mode) & 0o666
    for path in directory.iterdir():
        path.chmod(mode)
