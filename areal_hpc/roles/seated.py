"""The engines of one machine that joins a run: each on a seat of the attempt, and on devices of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from areal_hpc.accelerator import devices_named
from areal_hpc.cluster.components import engines_of_node, satellite_of
from areal_hpc.cluster.devices import BINDING, visible_devices
from areal_hpc.cluster.local import NO_VARIABLES, Ended, LocalLauncher
from areal_hpc.config.derived import engine_ranks, threads_of
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError
from areal_hpc.liveness import seats
from areal_hpc.liveness.seats import Seat
from areal_hpc.roles.wiring.launchers import devices_here
from areal_hpc.run_dir import RunDir

log = logging.getLogger(__name__)


class SeatedLauncher(LocalLauncher):
    """Starts each engine on a seat of the attempt, and leaves the seat when the engine has ended.

    Args:
        blocks: which of this machine's devices each engine gets; as many engines can run at once.
        first: the lowest seat.
        holder: what the seats tell of who has taken them.
    """

    def __init__(
        self,
        config: Config,
        run: RunDir,
        epoch: int,
        host: str,
        *,
        blocks: Sequence[tuple[int, ...]],
        holder: Mapping[str, object],
    ) -> None:
        super().__init__(run, epoch, threads_of(config, len(os.sched_getaffinity(0))), host=host)
        self._first, self._holder, self._blocks = config.generation.replicas, holder, list(blocks)
        self._taken: dict[int, tuple[Seat, tuple[int, ...]]] = {}

    @property
    def own_seats(self) -> Mapping[int, Seat]:
        """The seats of the engines that run here, by index."""
        return {index: seat for index, (seat, _) in self._taken.items()}

    @property
    def num_blocks(self) -> int:
        """How many engines can be started now."""
        return len(self._blocks)

    def start(self, role: str, index: int, variables: Mapping[str, str] = NO_VARIABLES) -> None:
        """Start one engine on whatever seat is free; ``index`` only tells how many have been asked for."""
        # One that the run has given up may still run here.
        seat = seats.take(self.attempt, self._first, self._holder, besides=self._taken)
        devices = self._blocks.pop(0)
        self._taken[seat.index] = seat, devices
        self.num_starts[role, seat.index] = seat.incarnation
        super().start(role, seat.index, {**visible_devices(devices, os.environ), **variables})
        log.info("joined attempt %d as %s%s", self.attempt.epoch, seat.name, _on(devices))

    def died(self) -> list[Ended]:
        return [self._left(ended) for ended in super().died()]

    def stop(self, timeout_s: float, at_once: Callable[[], bool] = lambda: False) -> list[Ended]:
        return [self._left(ended) for ended in super().stop(timeout_s, at_once)]

    def _left(self, ended: Ended) -> Ended:
        seat, devices = self._taken.pop(ended.index)
        seat.leave()
        self._blocks.append(devices)
        return ended


def _on(devices: tuple[int, ...]) -> str:
    return f" on device {', '.join(map(str, devices))}" if devices else ""


def device_blocks(config: Config, num_engines: int | None, environment: Mapping[str, str]) -> list[tuple[int, ...]]:
    """The devices of each engine, by their numbers among those that this process may use; none where it has none.

    It may use those that it is bound to; else those that a satellite of the run asks for; else all of the machine.

    Raises:
        ConfigError: there are too few.
    """
    bound = next((environment[name] for name in BINDING if environment.get(name)), "")
    num_devices = len(devices_named(bound)) if bound else satellite_of(config).gpus or devices_here(config)
    size = engine_ranks(config)
    most = engines_of_node(config, num_devices)
    number = most if num_engines is None else num_engines
    if number < 1 or (num_devices and number * size > num_devices):
        raise ConfigError(
            f"--engines {number}: each needs {size} of the {num_devices} devices here; give another number"
        )
    if not num_devices:
        return [()] * number
    return [tuple(range(first, first + size)) for first in range(0, number * size, size)]
