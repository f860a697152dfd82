"""The model directory: seen to be there, or made."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from areal_hpc.config.derived import exported_model
from areal_hpc.config.paths import FROM_HERE
from areal_hpc.config.schema import Config
from areal_hpc.errors import DataError
from areal_hpc.fs import fsync_directory, make_durable
from areal_hpc.roles.export import export
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.run_dir import RunDir

log = logging.getLogger(__name__)


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
        export(RunDir.open(Path(config.evaluation.checkpoint)), config.evaluation.step, path, merged=True)
        return
    log.info("making the model %s (this happens once)", path)
    maker = dotted(config.model.maker, "model.maker")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as making:
        made = Path(making) / path.name
        maker(made, config.seed)
        make_durable(made)  # a maker need not: it is anybody's code
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():
                raise
            log.info("another run has made %s meanwhile; it is taken as it is", path)
    fsync_directory(path.parent)
