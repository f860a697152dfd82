"""The quickstart's tiny model, made once and kept in pytest's cache for as long as its makers do not change."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import pytest

import areal_hpc.tasks
from areal_hpc.tasks import tiny_model

SEED = 1


def quickstart_model(cache: pytest.Cache) -> Path:
    """Its directory; making it takes half a minute."""
    path = cache.mkdir("quickstart-model") / _fingerprint()
    if not path.is_dir():
        tiny_model.make(path, SEED)
    return path


def _fingerprint() -> str:
    """Of all that decides the model's bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(next(iter(areal_hpc.tasks.__path__))).glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(" ".join(version(name) for name in ("torch", "transformers", "tokenizers")).encode())
    return digest.hexdigest()
