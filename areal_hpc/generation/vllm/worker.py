"""In each of vLLM's workers: weight groups, and new weights into the model that the worker computes with.

vLLM mixes this class into its own worker and calls its methods by name, on all workers at once, between two steps.

    areal_join(address, rank_offset)
    areal_begin()                      every layer waits for its tensors
    areal_receive(group, specs)        any number; or areal_read(directory)
    areal_end()                        the layers are put together and take the place of the old ones

Between ``areal_begin`` and ``areal_end`` the model cannot compute, so generation is paused. What was begun and failed
is ended, too: the model is whole then, with weights that are worth nothing, and takes the next update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal_hpc.buckets import num_bytes, unpack
from areal_hpc.collective import join_group, leave_group
from areal_hpc.delta import Weight
from areal_hpc.errors import WeightUpdateError
from areal_hpc.types import GroupAddress, TensorSpec
from areal_hpc.weight_files import read_update


class Receiver:
    """Mixed into a worker: what it names of itself begins with ``areal_``, the rest is the worker's."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any

    _areal_open = False

    def areal_join(self, address: Mapping[str, Any], rank_offset: int, timeout_s: float) -> None:
        """Enter the trainer's group."""
        group = join_group(GroupAddress(**address), rank_offset + self.rank, timeout_s)
        self.__dict__.setdefault("_areal_groups", {})[address["name"]] = group

    def areal_leave(self, name: str) -> None:
        leave_group(self.__dict__["_areal_groups"].pop(name))

    def areal_begin(self) -> None:
        """Open an update. One that was open is given up."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.areal_end()
        initialize_layerwise_reload(self.model_runner.get_model())
        self._areal_open = True

    def areal_receive(self, group: str, specs: Sequence[Mapping[str, Any]], checked: bool) -> None:
        """Take one bucket that rank 0 broadcasts.

        Raises:
            WeightUpdateError: it is not what was sent.
        """
        tensors = [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in specs]
        # Layers keep views of it until all of theirs have come, so each bucket has memory of its own.
        buffer = torch.empty(sum(map(num_bytes, tensors)), dtype=torch.uint8, device=self.device)
        dist.broadcast(buffer, group=self.__dict__["_areal_groups"][group], group_src=0)
        self._areal_load(unpack(buffer, tensors, checked=checked))

    def areal_read(self, directory: str) -> None:
        """Take all weights from a directory.

        Raises:
            WeightUpdateError: a tensor is not what the trainer wrote.
        """
        self._areal_load(read_update(Path(directory)))

    def _areal_load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(_whole(weights))

    def areal_end(self) -> None:
        """Close the update, if one is open."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._areal_open:
            return
        self._areal_open = False
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            prepare_tied(model)


def _whole(weights: Iterable[tuple[str, Weight]]) -> Iterable[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        if not isinstance(weight, torch.Tensor):
            raise WeightUpdateError(f"weight {name!r} came as a delta; set weights.delta=false")
        yield name, weight


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
