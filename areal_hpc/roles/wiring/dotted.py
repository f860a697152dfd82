"""What a dotted path in a configuration names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from areal_hpc.errors import ConfigError


def dotted(path: str, key: str) -> Any:
    """The object that ``module:name`` names.

    Raises:
        ConfigError: there is no such module or name; says which key asked for it.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key} = {path!r} cannot be imported: {error}; "
            f"give module:name of a module in {Path.cwd()} or on PYTHONPATH"
        ) from error
