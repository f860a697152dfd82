"""Packages that only some runs need: imported when they are, and where one is missing, how to install it is said.

    parquet = optional("pyarrow.parquet", extra="data", what="a Parquet data set")

The extras are those of ``pyproject.toml``.
"""

from __future__ import annotations

import importlib
from typing import Any

from areal_hpc.errors import ConfigError


def optional(module: str, *, extra: str, what: str) -> Any:
    """The module, imported.

    Args:
        extra: which extra of this package installs it.
        what: needs it; the subject of the error's sentence.

    Raises:
        ConfigError: it, or something that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} needs the package {module.partition('.')[0]}, which cannot be imported ({error}); run "
            f"`pip install 'areal-hpc[{extra}]'`, or in a clone of the repository `pip install -e '.[{extra}]'`"
        ) from error
