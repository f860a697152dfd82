"""``areal-hpc join RUN``: engines of this machine for a run that goes on elsewhere; they leave it at any time.

    find        an attempt that works, waiting for it: the run may be in Slurm's queue, or between two attempts
    seats       one for each engine; the trainer brings it to the newest weights, then the rollout workers ask it
    watch       an engine that dies is replaced on a seat of its own, and one that the run has given up and that does
                not end (``eviction``); the trainer's heart beats
    leave       SIGTERM: seats are left, requests under way end or are asked anew of others, engines end
    again       the attempt is over and the run is not: the same for the next one
    rest        none comes for limits.rejoin_s: with ``--rest``, as the script of a satellite says, the nodes are given
                back, and the job is held until the run is there again (``resting``); so it is after engines that died
                too often, until the next attempt

Nothing of the run hangs on this process: whatever becomes of it and its node, the run goes on. What it may do is what
the run directory lets it: whoever can read the run's secret may serve the run.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.buffer.epochs import newest_epoch
from areal_hpc.cluster.components import engines_of_node, satellite_of
from areal_hpc.cluster.devices import BINDING, visible_devices
from areal_hpc.cluster.environment import job_of
from areal_hpc.cluster.local import LOOPBACK, NO_VARIABLES, Ended, LocalLauncher
from areal_hpc.cluster.owner import Owner
from areal_hpc.cluster.rendezvous import address_towards
from areal_hpc.config.derived import engine_ranks, takes_satellites, threads_of
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config, LimitsConfig
from areal_hpc.errors import ConfigError, DataError, RoleDied, RunDirError, WaitTimeout
from areal_hpc.exits import EXIT_DONE, EXIT_STOPPED, EXIT_UNNEEDED
from areal_hpc.fs import names_in, read_json, wait_for
from areal_hpc.liveness import resting, seats
from areal_hpc.liveness.heartbeat import Pulse, read_heartbeat
from areal_hpc.liveness.job import note_satellite
from areal_hpc.liveness.seats import Seat
from areal_hpc.liveness.stopping import ALIVE, RUNNING, Signals, state_of
from areal_hpc.privacy import is_secret
from areal_hpc.roles.eviction import Eviction
from areal_hpc.roles.supervisor import Supervisor
from areal_hpc.roles.wiring.launchers import devices_here
from areal_hpc.roles.wiring.servers import check_server
from areal_hpc.run_dir import AttemptDir, RunDir

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the run's files are looked at."""


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
        """Those of the engines that run here, by their index."""
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


def join_run(
    root: Path,
    *,
    num_engines: int | None,
    after: int,
    wait_s: float | None,
    environment: Mapping[str, str],
    may_rest: bool = False,
) -> int:
    """Serve the run in ``root`` until it ends, or until this process is told to leave.

    Args:
        num_engines: engines on this machine; None is as many as its devices are for, or one where it has none.
        after: attempts up to this epoch are the past: what is waited for is a later one.
        wait_s: longest time for an attempt to come; None is the run's own ``limits.rejoin_s``.
        may_rest: whether whoever started this in a Slurm job has the job rest when it is asked for.

    Returns:
        EXIT_DONE when the run has ended, EXIT_STOPPED when this process was told to leave one that goes on. With
        ``may_rest``, EXIT_UNNEEDED when no attempt came in time, or an engine died too often: the job is to rest.

    Raises:
        RunDirError, ConfigError, DataError: the run cannot be joined, or not from here.
        WaitTimeout: no attempt came in time.
        RoleDied: an engine died too often.
    """
    run, job = RunDir.open(root, waiting=True), job_of(environment)
    if job:
        note_satellite(run, job)
        resting.forget(run, job)  # it has been let go
    past = _Past(after)
    try:
        return _serve(run, job, num_engines, past, environment, wait_s=wait_s)
    except (WaitTimeout, RoleDied) as error:
        if not (job and may_rest):
            raise
        log.warning("%s", error)
        log.warning(
            "job %s gives its nodes back, and rests in the queue until attempt %d or later works", job, past.epoch + 1
        )
        resting.rest(run, job, past.epoch)
        return EXIT_UNNEEDED


@dataclass(slots=True)
class _Past:
    """The last attempt that is not to be served any more."""

    epoch: int


def _serve(
    run: RunDir, job: str, num_engines: int | None, past: _Past, environment: Mapping[str, str], *, wait_s: float | None
) -> int:
    """Serve one attempt after the other; ``past`` is kept."""
    with Signals(from_scheduler=bool(job)) as signals:
        while standing := _next_standing(run, past.epoch, wait_s, signals):
            if standing.attempt is None:
                log.info("%s: the run has ended: %s", run.root, standing.state)
                return EXIT_DONE
            visit = _Visit(run=run, attempt=standing.attempt, signals=signals)
            try:
                over = visit.stay(num_engines, environment, {"job": job, **Owner.this_process().record()})
            except RoleDied:
                past.epoch = standing.attempt.epoch  # there may be something wrong with this node
                raise
            past.epoch = max(past.epoch, over)
    log.info("left %s", run.root)
    return EXIT_STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a run stands, for who wants to serve it."""

    state: str
    attempt: AttemptDir | None = None
    """That works; None of a run that has ended."""


def standing_of(run: RunDir, after: int) -> Standing | None:
    """How the run stands; None while another attempt is to be expected, or this one is not ready yet."""
    attempt = run.newest_attempt() if run.attempts.is_dir() else None
    if attempt is None or attempt.epoch <= after:
        return None
    state, _ = state_of(run, attempt.epoch)
    if state not in (*ALIVE, "stopped") or (state == "stopped" and attempt.stop_request.name in names_in(attempt.root)):
        return Standing(state=state)
    return Standing(state=state, attempt=attempt) if _is_up(attempt) and _works(run, attempt) else None


def _is_up(attempt: AttemptDir) -> bool:
    """The trainer comes up when the launcher has written what all others read."""
    return attempt.endpoint("trainer", 0).name in names_in(attempt.endpoints)


def _comes_up(run: RunDir, after: int) -> bool:
    """Whether there is an attempt to serve that is not ready yet."""
    attempt = run.newest_attempt() if run.attempts.is_dir() else None
    return attempt is not None and attempt.epoch > after and _works(run, attempt) and not _is_up(attempt)


def _works(run: RunDir, attempt: AttemptDir) -> bool:
    """Whether the attempt goes on, as far as the files tell: of a launcher on another host they say what it said."""
    state, owner = state_of(run, attempt.epoch)
    return state == RUNNING and not owner.is_gone() and newest_epoch(run) == attempt.epoch


def _next_standing(run: RunDir, after: int, wait_s: float | None, signals: Signals) -> Standing | None:
    """How the run stands, once that is known; None if this process is told to leave first.

    Raises:
        WaitTimeout: it was not known in time.
    """
    limits = load([run.config], []).limits if run.config.is_file() else LimitsConfig()
    limit_s = limits.rejoin_s if wait_s is None else wait_s

    def known() -> Standing | int | None:
        return signals.count or standing_of(run, after)

    while True:
        answer = wait_for(
            f"an attempt of {run.root} to work",
            lambda: known() or _comes_up(run, after),
            limit_s,
            LOOK_S,
            party="the run's launcher",
            hint="start the run, or submit it; --wait or limits.rejoin_s allow for a longer time in the queue",
        )
        if answer is not True:
            return answer if isinstance(answer, Standing) else None
        wait_for(  # a large model takes its time, which is none in which nobody is needed
            f"the trainer of {run.root} to come up",
            lambda: known() or not _comes_up(run, after),
            limits.start_s,
            LOOK_S,
            party="trainer-0",
            hint="its log says why; limits.start_s allows for more",
        )


@dataclass(slots=True, kw_only=True)
class _Visit:
    """The time that this process serves one attempt."""

    run: RunDir
    attempt: AttemptDir
    signals: Signals
    pulse: Pulse = field(default_factory=Pulse)
    next_look: float = 0.0
    is_over: bool = False
    past: int = 0
    """The attempt's epoch if it is not to be expected to go on."""

    def stay(self, num_engines: int | None, environment: Mapping[str, str], holder: Mapping[str, object]) -> int:
        """Serve until the attempt is over or this process is told to leave; ``past``."""
        config = load([self.run.config], [])
        require_joinable(self.run, config)
        blocks = device_blocks(config, num_engines, environment)
        launcher = SeatedLauncher(
            config,
            self.run,
            self.attempt.epoch,
            self._address(),
            blocks=blocks,
            holder={**holder, "engines": len(blocks), "gpus": sum(map(len, blocks))},
        )
        eviction = Eviction(self.attempt, config.limits.stop_s)
        supervisor = Supervisor(
            launcher,
            config.limits,
            irreplaceable=(),
            finishing=("generator",),
            stop=lambda: self._is_to_end(config.limits.stall_s),
            show=lambda: None,
            record=lambda _, values: log.warning("%s; another one takes a seat", values["reason"]),
            check_fence=lambda: None,
            watchdog=lambda running: eviction.look(launcher.own_seats, running),
        )
        try:
            supervisor.start({"generator": launcher.num_blocks})
            supervisor.watch()
        finally:
            launcher.stop(config.limits.stop_s, at_once=lambda: self.signals.insist)
        return self.past

    def _address(self) -> str:
        """This machine's address for the run's processes.

        Raises:
            RunDirError: they can be reached only from the machine that they are on.
        """
        trainer = read_json(self.attempt.endpoint("trainer", 0))["host"]
        if not ipaddress.ip_address(trainer).is_loopback:
            return address_towards(trainer)
        _, owner = state_of(self.run, self.attempt.epoch)
        if owner.host != socket.gethostname():
            raise RunDirError(
                f"{self.run.root} runs on {owner.host} alone (cluster.shape=local), where nobody else can reach it; "
                "join it there, or run it with another cluster.shape"
            )
        return LOOPBACK

    def _is_to_end(self, silent_s: float) -> bool:
        if self.signals.count:
            return True
        if time.monotonic() < self.next_look:
            return self.is_over
        self.next_look = time.monotonic() + LOOK_S
        self.is_over = not _works(self.run, self.attempt)
        self.pulse.see(read_heartbeat(self.attempt, "trainer-0"))
        if not self.is_over and self.pulse.silent_s() > silent_s:
            log.warning(
                "trainer-0 of attempt %d has been silent for %g s: waiting for the next", self.attempt.epoch, silent_s
            )
            self.is_over, self.past = True, self.attempt.epoch
        return self.is_over


def require_joinable(run: RunDir, config: Config) -> None:
    """
    Raises:
        RunDirError: the run's secret is another user's, or lies open to others.
        ConfigError: the run takes no engines from outside, or they cannot be started here.
        DataError: there is no model here to start an engine with.
    """
    if not is_secret(run.token):
        raise RunDirError(f"{run.token} must be yours alone; run `chmod 600 {run.token}` as its owner, and join as him")
    if not takes_satellites(config):
        raise ConfigError(
            f"{run.root} takes no engines that join: it is deterministic, an evaluation or a replay, or it learns from "
            "a data set"
        )
    if not Path(config.model.path).is_dir():
        raise DataError(
            f"model.path: there is no directory {config.model.path} on {socket.gethostname()}; copy it there"
        )
    check_server(config)


def device_blocks(config: Config, num_engines: int | None, environment: Mapping[str, str]) -> list[tuple[int, ...]]:
    """The devices of each engine, by their numbers among those that this process may use; none where it has none.

    It may use those that it is bound to; else those that a satellite of the run asks for; else all of the machine.

    Raises:
        ConfigError: there are too few.
    """
    bound = next((environment[name] for name in BINDING if environment.get(name)), "")
    num_devices = len(bound.split(",")) if bound else satellite_of(config).gpus or devices_here(config)
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
