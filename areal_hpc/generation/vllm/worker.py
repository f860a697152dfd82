"""In each of vLLM's workers: weight groups, and new weights beside the model that the worker computes with.

vLLM mixes this class into its own worker and calls its methods by name, on all workers at once, between two steps.

    areal_join(address, rank_offset)   in a thread, while the worker computes on
    areal_entered(name)                whether it has entered that group
    areal_leave(name)                  it is no member of that group, or of none that forms too late
    areal_begin(keeps, adapters)       what came of an earlier update and was not loaded is forgotten
    areal_receive(group, specs)        any number, in another thread: a bucket is received and proven
    areal_come()                       whether the thread has done what it was last told to
    areal_idle()                       the same, however that ended
    areal_ready()                      whether all is there that does not come: what adapters are merged into
    areal_load(loaded)                 in a pause: all that has come takes the place of the old weights
    areal_read(directory, loaded)      in a pause, after a beginning: the same, of all that is in a directory

What comes is put into host memory, since a device seldom has room for a model twice: ``served/arrivals.py``. A load
that fails leaves the model whole, with weights that are worth nothing; it takes the next update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.served.arrivals import Arrivals
from areal_hpc.generation.served.entering import entering, leave
from areal_hpc.generation.served.merging import Tensors
from areal_hpc.transfer import GroupAddress, TensorSpec
from areal_hpc.weight_files import read_update

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Receiver:
    """Mixed into a worker: what it names of itself begins with ``areal_``, the rest is the worker's."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any
    _areal_coming: Future[None] | None = None
    """The bucket that the thread was last told to take."""

    @property
    def areal_arrivals(self) -> Arrivals:
        """Made when it is first asked for: vLLM calls no constructor of ours."""
        if "_areal_arrivals" not in self.__dict__:
            self.__dict__["_areal_arrivals"] = Arrivals()
        arrivals: Arrivals = self.__dict__["_areal_arrivals"]
        return arrivals

    @property
    def areal_entries(self) -> dict[str, Future[ProcessGroup]]:
        """The groups that this worker is in, or enters, by name."""
        entries: dict[str, Future[ProcessGroup]] = self.__dict__.setdefault("_areal_entries", {})
        return entries

    def areal_join(self, address: Mapping[str, Any], rank_offset: int, timeout_s: float) -> None:
        """Begin to enter the trainer's group."""
        group = GroupAddress(**address)
        self.areal_entries[group.name] = entering(group, rank_offset + self.rank, timeout_s)

    def areal_entered(self, name: str) -> bool:
        """Whether it has.

        Raises:
            RuntimeError, ValueError: it could not.
        """
        entry = self.areal_entries[name]
        if entry.done():
            self.areal_arrivals.groups[name] = entry.result()
        return entry.done()

    def areal_leave(self, name: str) -> None:
        """Leave a group, also one that has not formed yet."""
        self.areal_arrivals.groups.pop(name, None)
        if (entry := self.areal_entries.pop(name, None)) is not None:
            leave(entry)

    def areal_begin(self, keeps: bool, adapters: Mapping[str, Any] | None) -> None:
        assert self.areal_idle(), "something is still coming"
        self.areal_arrivals.begin(keeps=keeps, adapters=adapters)

    def areal_receive(self, group: str, specs: Sequence[Mapping[str, Any]], checked: bool) -> None:
        """Begin to take one bucket."""
        arrivals = self.areal_arrivals
        tensors = [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in specs]
        self._areal_coming = arrivals.pool.submit(arrivals.receive, group, tensors, self.device, checked=checked)

    def areal_come(self) -> bool:
        """Whether what was begun has ended.

        Raises:
            WeightUpdateError, RuntimeError: it has failed.
        """
        coming = self._areal_coming
        if coming is None or not coming.done():
            return coming is None
        self._areal_coming = None
        coming.result()
        return True

    def areal_idle(self) -> bool:
        """Whether what was begun has ended, well or not: nobody wants it any more."""
        if self._areal_coming is not None and self._areal_coming.done():
            self._areal_coming = None
        return self._areal_coming is None

    def areal_ready(self) -> bool:
        """Whether the frozen weights have been read that adapters are merged into; true where no adapters come."""
        return self.areal_arrivals.is_ready()

    def areal_load(self, loaded: str) -> None:
        """Let the model compute with what has come.

        Args:
            loaded: a file that is touched for each tensor.

        Raises:
            WeightUpdateError: of adapters others came than are asked for; the model is as it was.
        """
        arrivals = self.areal_arrivals
        if lacks := arrivals.lacks():
            raise WeightUpdateError(lacks)
        self.areal_replace(_touching(Path(loaded), arrivals.weights(self.device)))
        arrivals.settle()

    def areal_read(self, directory: str, loaded: str) -> None:
        """The same with what is in a directory.

        Raises:
            WeightUpdateError: a tensor is not what the trainer wrote; or as for ``areal_load``.
        """
        arrivals = self.areal_arrivals
        coming = arrivals.taken(read_update(Path(directory)))
        if arrivals.merging is None:  # one by one, since there may be room for no other model
            noted = _noting(coming, arrivals.new if arrivals.keeps else None)
            self.areal_replace(_touching(Path(loaded), noted))
            arrivals.settle()
            return
        arrivals.new.update(coming)
        self.areal_load(loaded)

    def areal_replace(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reload the model from ``weights``, layer by layer; it cannot compute meanwhile."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights)
            finally:
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            prepare_tied(model)


def _touching(loaded: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for weight in weights:
        loaded.touch()
        yield weight


def _noting(weights: Iterable[tuple[str, torch.Tensor]], kept: Tensors | None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if kept is not None:
            kept[name] = tensor
        yield name, tensor


def prepare_tied(model: torch.nn.Module) -> None:
    """Make ready again what computes with a parameter of another layer.

    vLLM prepares a layer once its own weights have come. A head that is tied to the embedding gets none, and on a CPU,
    where it computes with a packed copy, it would go on with the old weights.
    """
    seen: set[int] = set()
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        method = getattr(layer, "quant_method", None)
        if id(weight) in seen and method is not None:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))
