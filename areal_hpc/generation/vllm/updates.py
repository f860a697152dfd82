"""How new weights come into vLLM: whole or not at all.

    join(address, rank)
    begin()
    load_bucket(...)   any number    every worker receives and proves it, and samples on meanwhile
    end()                            every weight of the checkpoint has come: the model is made of them

    load_directory(path)             the same from safetensors on disk; names and shapes are checked before

For the last step generation must be paused: in between the model is in parts. After an update that fails the trainer
has newer weights, and the model perhaps none that are worth anything, so the engine is quarantined: it serves nothing
until a whole update has been loaded.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from areal_hpc.errors import WeightUpdateError
from areal_hpc.generation.vllm.engine import VllmEngine
from areal_hpc.pretrained.files import DERIVED_SUFFIX, check_shapes, read_shapes
from areal_hpc.transfer import GroupAddress, TensorSpec
from areal_hpc.waits import LEADER, waiting
from areal_hpc.weight_files import shapes_in

HEAD = "lm_head.weight"
POLL_S = 0.01
"""Between two looks at what workers wait for in a thread."""

T = TypeVar("T")


@dataclass(slots=True)
class _Session:
    """One weight update between ``begin`` and ``end``."""

    names: set[str] = field(default_factory=set)
    version: str | None = None
    flush_cache: bool = False


class WeightUpdates:
    """Blocking calls, made from worker threads, one after the other.

    Every method raises WeightUpdateError when the weights could not be taken as asked.

    Args:
        loop: the engine's.
        timeout_s: longest time of one step.
        keeps: whether the workers keep a copy in host memory, so that changes alone may come.
    """

    def __init__(
        self, engine: VllmEngine, loop: asyncio.AbstractEventLoop, *, timeout_s: float, keeps: bool = False
    ) -> None:
        self.keeps = keeps
        self._engine, self._loop = engine, loop
        self._timeout_s = timeout_s
        self._groups: set[str] = set()
        self._session: _Session | None = None
        self._turn = threading.Lock()
        shapes = read_shapes(engine.model_path)
        self._shapes = {name: shape for name, shape in shapes.items() if not name.endswith(DERIVED_SUFFIX)}
        tied = bool(getattr(engine.llm.model_config.hf_config, "tie_word_embeddings", False))
        self._optional = {HEAD} if tied else set()

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not ended."""
        return self._session is not None

    # -- groups

    def join(self, address: GroupAddress, rank: int) -> None:
        """Enter the trainer's group with all workers, the first as ``rank``; returns when all its ranks are there."""
        with self._turn:
            if address.name in self._groups:
                raise WeightUpdateError(f"group {address.name!r} has already been created; use a fresh name")
            with waiting(f"group {address.name} to form", LEADER, limit_s=self._timeout_s):
                self._coming(self._workers, "areal_join", asdict(address), rank, self._timeout_s)
            self._groups.add(address.name)

    def leave(self, name: str) -> None:
        with self._turn:
            if name not in self._groups:
                raise WeightUpdateError(f"group {name!r} does not exist; join it first")
            self._groups.discard(name)
            self._workers("areal_leave", name)

    # -- an update in buckets

    def begin(self) -> None:
        """Open an update. One that was open is given up."""
        with self._turn:
            self._taking("areal_begin", self.keeps)
            self._session = _Session()

    def load_bucket(
        self,
        group: str,
        specs: Sequence[TensorSpec],
        *,
        flattened: bool,
        checked: bool,
        version: str | None,
        flush_cache: bool,
        abort_all: bool,
    ) -> None:
        """Receive the tensors of ``specs`` from rank 0 of ``group``; arguments as for the embedded engine."""
        with self._turn:
            session = self._opened()
            if group not in self._groups:
                raise WeightUpdateError(f"group {group!r} does not exist; join it first")
            if not flattened:
                raise WeightUpdateError("vLLM takes flattened buckets only; send load_format flattened_bucket")
            self._known(specs)
            if twice := session.names & {spec.name for spec in specs}:
                raise WeightUpdateError(f"parameters {sorted(twice)[:3]} came twice in one update; send each once")
            if abort_all:
                self._await(self._engine.abort(None))
            with waiting("a bucket of weights", LEADER, limit_s=self._timeout_s):
                self._coming(self._taking, "areal_receive", group, [asdict(spec) for spec in specs], checked)
            session.names |= {spec.name for spec in specs}
            session.version = version or session.version
            session.flush_cache |= flush_cache

    def end(self) -> None:
        """Close the update: all parameters have come. Closing twice is closing once."""
        with self._turn:
            if self._session is None:
                return
            self._paused()
            session, self._session = self._session, None
            if missing := sorted(self._shapes.keys() - self._optional - session.names):
                self._quarantine("an update of its weights lacked parameters")
                raise WeightUpdateError(
                    f"{len(missing)} parameters did not come, such as {missing[:3]}; the engine is quarantined until "
                    "a whole update comes"
                )
            self._taking("areal_load")
            self._serve(session.version, flush_cache=session.flush_cache)

    # -- an update from disk

    def load_directory(self, directory: Path, version: str | None, *, flush_cache: bool, abort_all: bool) -> int:
        """Load all weights from safetensors in ``directory``; how many requests went on under them.

        Raises:
            DataError: the directory does not hold this model; nothing has changed.
        """
        with self._turn:
            self._paused()
            needed = {name: shape for name, shape in self._shapes.items() if name not in self._optional}
            check_shapes(directory, needed, shapes_in(directory))
            if abort_all:
                self._await(self._engine.abort(None))
            self._session = None
            self._taking("areal_read", str(directory), self.keeps)
            self._serve(version, flush_cache=flush_cache)
            return sum(self._engine.load()[name] for name in ("num_running", "num_waiting"))

    def name_version(self, version: str, *, abort_all: bool) -> None:
        """Call the weights that the engine has ``version``."""
        with self._turn:
            if abort_all:
                self._await(self._engine.abort(None))
            self._await(self._engine.name_version(version))

    # -- with the engine

    def _paused(self) -> None:
        if not self._engine.paused:
            raise WeightUpdateError("generation is not paused, and vLLM takes weights apart to load new ones; pause it")

    def _quarantine(self, why: str) -> None:
        self._engine.quarantined = why
        self._await(self._engine.abort(None))

    def _opened(self) -> _Session:
        if self._session is None:
            raise WeightUpdateError(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        return self._session

    def _known(self, specs: Sequence[TensorSpec]) -> None:
        """Raises WeightUpdateError unless the checkpoint that the engine was started with has such tensors."""
        for spec in specs:
            if spec.num_changed is not None and not self.keeps:
                raise WeightUpdateError(
                    f"weight {spec.name!r} comes as a delta, and nothing is kept; set weights.delta"
                )
            expected = self._shapes.get(spec.name, spec.shape if spec.name in self._optional else None)
            if expected != spec.shape:
                raise WeightUpdateError(f"weight {spec.name!r} has shape {spec.shape}, the model's is {expected}")

    def _serve(self, version: str | None, *, flush_cache: bool) -> None:
        if flush_cache:
            self._await(self._engine.forget_cache())
        if version is not None:
            self._await(self._engine.name_version(version))
        self._engine.quarantined = ""

    def _await(self, action: Coroutine[Any, Any, T]) -> T:
        """What the engine answers. One that does not in time never will, and ends, so that it is started anew.

        Raises:
            WeightUpdateError: it does not.
        """
        answer = asyncio.run_coroutine_threadsafe(action, self._loop)
        if not wait([answer], self._timeout_s).done:
            answer.cancel()
            self._engine.hangs = f"vLLM's engine has not answered for {self._timeout_s:g} s"
            raise WeightUpdateError(f"{self._engine.hangs}; it ends, to be started anew")
        return answer.result()

    def _coming(self, call: Callable[..., list[Any]], method: str, *arguments: Any) -> None:
        """Have the workers begin what depends on others, and return when it has ended on all; they compute on."""
        call(method, *arguments)
        while not all(call("areal_come")):
            time.sleep(POLL_S)

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """What each worker says to one call, made on all at once between two steps.

        Raises:
            WeightUpdateError: it failed on one of them. vLLM tells only that failure's text.
        """
        try:
            return self._await(self._engine.llm.collective_rpc(method, args=arguments))
        except WeightUpdateError:
            raise
        except Exception as error:  # whatever a worker raised: vLLM hands it on as a bare Exception
            raise WeightUpdateError(f"vLLM's workers could not {method.removeprefix('areal_')}: {error}") from error

    def _taking(self, method: str, *arguments: Any) -> list[Any]:
        """The same of a step after whose failure nobody knows what the model holds."""
        try:
            return self._workers(method, *arguments)
        except WeightUpdateError as error:
            self._session = None
            self._quarantine("an update of its weights failed half-way")
            raise WeightUpdateError(f"the weights were not taken; the engine is quarantined: {error}") from error
