"""Weight updates beside sampling in SGLang, through its interface for plugins: ``hooks.py`` says where.

SGLang receives a bucket and loads it in the loop that samples, and waits for running requests before it does, unless it
is paused. Here a bucket is received and proven in a thread, into host memory, while requests run, and only what the
client asks for last, in a pause, touches the model:

    client                        tokenizer's process       each scheduler
    begin_weight_update           passes it on at once      forgets what came before
    update_weights_from_...       passes it on at once      a thread receives the bucket, and proves it
    pause_generation
    end_weight_update                                       all ranks have all of it, or nothing happens: the
                                                            model's weights are loaded, as SGLang loads them

With weights that are kept, changes alone may come, and a directory may hold changes. Of adapters that come alone the
weights are made that SGLang loads. A request whose load format is not ours is SGLang's own affair.

Imported by SGLang alone, in the environment that SGLang is installed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation import manifest
from areal_hpc.generation.served.arrivals import Arrivals
from areal_hpc.generation.sglang.votes import all_agree
from areal_hpc.weight_files import MANIFEST, read_update

# -- in the tokenizer's process, which else waits until no request runs


async def begin_at_once(original: Callable[..., Any], self: Any, communicator: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    if not isinstance(request, BeginWeightUpdateReqInput):
        return await original(self, communicator, request)
    return await _passed_on(self, communicator, request)


async def receive_at_once(original: Callable[..., Any], self: Any, request: Any, *more: Any) -> Any:
    if not _is_ours(request):
        return await original(self, request, *more)
    return await _passed_on(self, self.update_weights_from_distributed_communicator, request)


async def _passed_on(tokenizer: Any, communicator: Any, request: Any) -> tuple[bool, str]:
    from sglang.srt.managers.communicator import FanOutCommunicator

    tokenizer.auto_create_handle_loop()
    merged: tuple[bool, str] = FanOutCommunicator.merge_results(await communicator(request))
    return merged


def _is_ours(request: Any) -> bool:
    return (request.load_format or "").startswith(manifest.PREFIX)


# -- in each scheduler


@dataclass(slots=True)
class Staged:
    """The weight update of this rank: what it has received and not loaded yet.

    Args:
        limit_s: longest wait for the thread that receives.
        keeps: whether what was loaded stays in host memory.
        adapters: what ``merging.order`` says, where adapters come alone.
    """

    limit_s: float
    keeps: bool
    adapters: Mapping[str, Any] | None = None
    is_open: bool = False
    """Whether an update has begun, on this rank as on all others: whatever became of it here, they vote at its end."""
    failed: str = ""
    """Why this rank cannot take the update at hand."""
    coming: list[Future[None]] = field(default_factory=list)
    arrivals: Arrivals = field(default_factory=Arrivals)

    def begin(self, _: Callable[..., Any], updater: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

        return _told(BeginWeightUpdateReqOutput, self._open())

    def receive(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput as Output

        if not _is_ours(request):
            return original(updater, request)
        runner = updater.tp_worker.model_runner.weight_updater
        if not self.is_open:
            return _told(Output, "no update is open; begin one")
        if request.group_name not in runner._model_update_group:
            self.failed = f"there is no group {request.group_name!r}"
        if not (failed := self._failure()):
            self.arrivals.groups = runner._model_update_group
            specs = manifest.read(request.load_format, request.names, request.dtypes, request.shapes)
            # To SGLang it is "cuda", whichever this thread has chosen; the thread that receives has chosen none.
            device = torch.empty(0, device=runner.device).device
            job = partial(self.arrivals.receive, request.group_name, specs, device, checked=True)
            self.coming.append(self.arrivals.pool.submit(job))
        return _told(Output, failed)

    def end(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

        if not self.is_open:
            return original(updater, request)
        self._await()
        return _told(EndWeightUpdateReqOutput, self._put_into_place(updater))

    def read(self, original: Callable[..., Any], updater: Any, request: Any) -> Any:
        """An update from a directory; SGLang itself reads whole tensors alone, and proves nothing."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

        directory = Path(request.model_path)
        is_theirs = not (directory / MANIFEST).is_file()
        if all_agree(updater, is_theirs):  # a file system may show it to one rank sooner than to another
            return original(updater, request)
        if is_theirs:
            self._open()
            self.failed = f"{directory} cannot be taken: its {MANIFEST} is not to be seen from here"
        elif not self._open():
            try:
                self.arrivals.new.update(self.arrivals.taken(read_update(directory)))
            except (WeightUpdateError, SafetensorError, OSError) as error:
                self.failed = f"{directory} cannot be taken: {error}"
            self._await()
        if not (failed := self._put_into_place(updater)):
            updater.flush_cache_after_weight_update(request)
            updater.record_weight_version_after_update(request.weight_version)
        return _told(UpdateWeightFromDiskReqOutput, failed, num_paused_requests=0)

    def tell(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        told = original(scheduler, request)
        told.internal_state["areal_hpc"] = {"deltas": self.keeps}
        return told

    def _open(self) -> str:
        """Begin an update, and give up one that is open; why that cannot be."""
        self.is_open, self.failed = True, ""
        if wait(self.coming, self.limit_s).not_done:  # its group is gone, so it ends by that group's own limit
            self.failed = "a bucket of an earlier update is still coming"
            return self.failed
        self.arrivals.begin(keeps=self.keeps, adapters=self.adapters)
        self.coming = []
        return ""

    def _await(self) -> None:
        """Wait for what is to come, in bounded time."""
        deadline = time.monotonic() + self.limit_s
        if late := wait(self.coming, self.limit_s).not_done:
            self.failed = self.failed or f"{len(late)} buckets are late"
        elif self.arrivals.merging is not None:
            self.arrivals.merging.wait(deadline - time.monotonic())

    def _failure(self) -> str:
        """Why this rank cannot take the update, as far as is known."""
        errors = [job.exception() for job in self.coming if job.done()]
        met = next((f"a bucket was not received: {error}" for error in errors if error is not None), "")
        return self.failed or met

    def _put_into_place(self, updater: Any) -> str:
        """Load what has come: on all ranks of the engine, or on none; what went wrong."""
        self.is_open = False
        failed = self._failure() or self.arrivals.lacks()
        if not all_agree(updater, not failed):
            return failed or "another rank of this engine has not got all of the weights"
        updaters = [runner.weight_updater for _, runner in updater._select_runners()]
        for one in updaters:
            one.begin_weight_update()
        outcomes = [one.load_weights_from_distributed(self.arrivals.weights(one.device)) for one in updaters]
        for one in updaters:
            one.end_weight_update(run_post_load=False)
        wrong = next((message for success, message in outcomes if not success), "")
        if not all_agree(updater, not wrong):
            return wrong or "another rank of this engine could not load the weights"
        self.arrivals.settle()
        return ""


def _told(output: type[Any], failed: str, **more: Any) -> Any:
    return output(success=not failed, message=failed or "Success", **more)
