"""The model directory, and clients of all engines."""

from __future__ import annotations

import hashlib
import hmac
import importlib
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_hpc.buffer.control import read_replaced
from areal_hpc.config.derived import engine_ranks, exported_model
from areal_hpc.config.paths import FROM_HERE
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError, DataError
from areal_hpc.fs import RunDir, fsync_directory
from areal_hpc.generation.client import EngineClient, Limits
from areal_hpc.generation.connection import Address
from areal_hpc.generation.router import Capacity, Router
from areal_hpc.roles.export import export
from areal_hpc.roles.process import RoleProcess
from areal_hpc.telemetry import add_secret

log = logging.getLogger(__name__)


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


def check_model_path(config: Config) -> None:
    """See that there is a model, or how to make it.

    Raises:
        DataError: it is not there, and nothing says how to make it.
        ConfigError: its maker cannot be imported.
    """
    path = Path(config.model.path)
    if path.is_dir() or _is_exported(config):
        return
    if not config.model.maker:
        raise DataError(
            f"model.path: there is no directory {path.absolute()} ({FROM_HERE}); give the path of a Hugging Face "
            "checkpoint"
        )
    dotted(config.model.maker, "model.maker")


def _is_exported(config: Config) -> bool:
    """Whether the model directory is made of a run's checkpoint, for `areal-hpc eval`."""
    return config.evaluation.checkpoint != "" and config.model.path == exported_model(config)


def make_model(config: Config) -> None:
    """Write the model directory if it is not there: only a launcher does that.

    Several runs may want it at once. Each makes its own beside it, and the first that is whole gets the name.

    Raises:
        CheckpointError, DataError: it is to be made of a checkpoint, and cannot; see ``export``.
    """
    path = Path(config.model.path)
    if path.is_dir():
        return
    if _is_exported(config):
        log.info("exporting step %d of %s", config.evaluation.step, config.evaluation.checkpoint)
        export(RunDir.open(Path(config.evaluation.checkpoint)), config.evaluation.step, path)
        return
    log.info("making the model %s (this happens once)", path)
    maker = dotted(config.model.maker, "model.maker")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as making:
        made = Path(making) / path.name
        maker(made, config.seed)
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            log.info("another run has made %s meanwhile; it is taken as it is", path)
    fsync_directory(path.parent)


def engine_token(run_token: str, epoch: int, index: int, incarnation: int) -> str:
    """What the server of one generator process asks for: no other process of the run takes it."""
    identity = f"{epoch}/generator-{index}/{incarnation}"
    return hmac.new(run_token.encode(), identity.encode(), hashlib.sha256).hexdigest()


def token_of(process: RoleProcess, index: int, incarnation: int) -> str:
    """The same for an engine of this attempt; kept out of this process's log."""
    token = engine_token(process.token, process.epoch, index, incarnation)
    add_secret(token)
    return token


def make_clients(process: RoleProcess) -> list[EngineClient]:
    """A client for every engine of the attempt, once they are up. Each follows its engine to where it is replaced."""
    return [_client(process, index) for index in range(process.config.generation.replicas)]


def _client(process: RoleProcess, index: int) -> EngineClient:
    config = process.config
    limits = Limits(
        generate_s=config.rollout.timeout_s, admin_s=config.limits.weight_update_s, load_s=config.limits.weight_update_s
    )

    def address(endpoint: Mapping[str, Any]) -> Address:
        incarnation = int(endpoint["incarnation"])
        return Address(url=endpoint["url"], token=token_of(process, index, incarnation), incarnation=incarnation)

    def locate() -> Address | None:
        endpoint = read_replaced(process.attempt.endpoint("generator", index))
        return None if endpoint is None else address(endpoint)

    first = address(process.endpoint_of("generator", index))
    return EngineClient(
        f"generator-{index}",
        first.url,
        num_ranks=engine_ranks(config),
        token=first.token,
        limits=limits,
        incarnation=first.incarnation,
        locate=locate,
    )


def make_router(process: RoleProcess) -> Router:
    """All engines of the attempt as one. A request waits for a replacement as long as that may take to come up."""
    generation = process.config.generation
    capacity = Capacity(max_requests=generation.max_requests, max_tokens=generation.max_outstanding_tokens)
    return Router(make_clients(process), wait_s=process.config.limits.start_s, capacity=capacity)
