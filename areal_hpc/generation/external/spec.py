"""What an engine's server is started with, whichever engine it is, as pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_hpc.accelerator import Accelerator
from areal_hpc.config.lora import NO_LORA, LoraConfig

FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables that would bring modules of this process's environment into the engine's."""
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""An engine asks itself over HTTP while it starts, and fetches nothing: its model is a directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One node's part of a server that spans several nodes."""

    num_nodes: int
    node: int
    """Number of the node; node 0 answers requests."""
    address: str
    """Where the server's ranks meet, "host:port", on node 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server."""

    model_path: str
    dtype: str
    host: str
    key: str = field(repr=False)
    """What every request must bring as ``Authorization: Bearer``."""
    accelerator: Accelerator
    max_running: int
    """Sequences decoded at once."""
    max_tokens: int
    """Longest sequence, prompt and answer together."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    share: Share | None = None
    """This node's share of the server; None where the server is whole on this node."""
    tells_experts: bool = False
    """It records which experts compute each token, for requests that ask."""
    seed: int = 0
    version: str = "0"
    """Version of the weights in ``model_path``."""
    update_timeout_s: float = 120.0
    """Longest time of one step of a weight update, in seconds; not every engine is told it."""
    keeps_weights: bool = False
    """Whether its workers keep a copy of the weights in host memory, so that an update may send deltas."""
    lora: LoraConfig = NO_LORA
    """Where its rank is not 0: updates bring only these adapters, and the worker merges them into the model."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Arguments under the engine's own names; they override those chosen here."""


def named(extra: Mapping[str, Any]) -> dict[str, Any]:
    """``extra`` with normalised names: no leading dashes, underscores in place of dashes."""
    return {name.lstrip("-").replace("-", "_"): value for name, value in extra.items()}


def argument(name: str, value: Any) -> list[str]:
    """One argument as words: a flag for true, nothing for false and null, JSON for a mapping, a list word by word."""
    option = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    if isinstance(value, Mapping):
        return [option, json.dumps(dict(value))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [option, *map(str, value)]
    return [option, str(value)]


def words(arguments: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    """The words of a command line: ``arguments``, overridden by ``extra``."""
    return [word for name, value in ({**arguments, **named(extra)}).items() for word in argument(name, value)]


def own_environment(inherited: Mapping[str, str], but: Iterable[str] = ()) -> dict[str, str]:
    """``inherited`` without what belongs to this process alone, and without ``but``.

    Devices stay as they are: whoever started this process has chosen them.
    """
    dropped = {*FOREIGN, *PROXIES, *(name.upper() for name in PROXIES), *but}
    kept = {name: value for name, value in inherited.items() if name not in dropped}
    return kept | {"HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}  # run by path: the files beside it are no modules
