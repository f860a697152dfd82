"""``areal-hpc join RUN``: engines of this machine for a run that goes on elsewhere; they leave it at any time.

    find        an attempt that works, waiting for it: the run may be in Slurm's queue, or between two attempts
    seats       one for each engine; the trainer brings it to the newest weights, then the rollout workers ask it
    watch       an engine that dies is replaced on a seat of its own, and one that the run has given up and that does
                not end (``eviction``); the trainer's heart beats
    leave       SIGTERM: seats are left, requests under way end or are asked anew of others, engines end
    again       the attempt is over and the run is not: the same for the next one
    rest        none comes for limits.rejoin_s: with ``--rest``, as the script of a satellite says, the nodes are given
                back, and the job is held until the run is there again (``resting``); so it is after engines that died
                too often, until the next attempt. A node that has lost its devices is given back as well, and the job
                comes again without it (``left_out``). Of a job of several nodes none is given back while any serves

Nothing of the run hangs on this process: whatever becomes of it and its node, the run goes on. What it may do is what
the run directory lets it: whoever can read the run's secret may serve the run.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_hpc.buffer.epochs import newest_epoch
from areal_hpc.cluster.components import satellite_of
from areal_hpc.cluster.environment import job_of
from areal_hpc.cluster.local import LOOPBACK
from areal_hpc.cluster.owner import Machine, Owner, namesakes
from areal_hpc.cluster.rendezvous import address_towards
from areal_hpc.config.derived import takes_satellites
from areal_hpc.config.load import load
from areal_hpc.config.schema import Config, LimitsConfig
from areal_hpc.errors import ConfigError, DataError, NodeLost, RoleDied, RunDirError, WaitTimeout
from areal_hpc.exits import EXIT_DONE, EXIT_ELSEWHERE, EXIT_STOPPED, EXIT_UNNEEDED
from areal_hpc.fs import names_in, read_json, wait_for
from areal_hpc.liveness import resting, seats
from areal_hpc.liveness.heartbeat import Pulse, read_heartbeat
from areal_hpc.liveness.job import note_satellite
from areal_hpc.liveness.left_out import leave_out
from areal_hpc.liveness.stopping import ALIVE, RUNNING, Signals, state_of
from areal_hpc.privacy import is_secret
from areal_hpc.roles.eviction import Eviction
from areal_hpc.roles.seated import SeatedLauncher, device_blocks
from areal_hpc.roles.supervisor import Supervisor
from areal_hpc.roles.wiring.servers import check_server
from areal_hpc.run_dir import AttemptDir, RunDir

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the run's files are looked at."""
LINGER_S = 5.0
"""How often a node that has given up looks whether others of its job still serve."""


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
        ``may_rest``, EXIT_UNNEEDED when no attempt came in time, or an engine died too often: the job is to rest; and
        EXIT_ELSEWHERE when this node has lost its devices: the job is to come again without it.

    Raises:
        RunDirError, ConfigError, DataError: the run cannot be joined, or not from here.
        WaitTimeout: no attempt came in time.
        RoleDied: an engine died too often.
    """
    run, job = RunDir.open(root, waiting=True), job_of(environment)
    if job:
        note_satellite(run, job)
        resting.forget(run, job)  # it has been let go
    satellite = _Satellite(run=run, job=job, num_engines=num_engines, environment=environment, past=after)
    try:
        return satellite.serve(wait_s)
    except (WaitTimeout, RoleDied) as error:
        if not (job and may_rest):
            raise
        return satellite.give_back(error)


@dataclass(slots=True, kw_only=True)
class _Satellite:
    """This process, which serves one attempt of the run after the other."""

    run: RunDir
    job: str
    """The Slurm job that this is; empty outside of one."""
    num_engines: int | None
    environment: Mapping[str, str]
    past: int
    """Epoch of the last attempt that is not to be served any more."""

    def serve(self, wait_s: float | None) -> int:
        """Serve until the run has ended or this process is told to leave; the exit code.

        While other nodes of the job serve, this one stays as well: they are given back together.
        """
        run, began = self.run, self.past
        given_up: WaitTimeout | RoleDied | None = None
        with Signals(from_scheduler=bool(self.job)) as signals:
            while True:
                try:
                    standing = _next_standing(run, self.past, LINGER_S if given_up else wait_s, signals)
                    if standing is None or standing.attempt is None:
                        return _left(run, standing)
                    self._stay(_Visit(run=run, attempt=standing.attempt, signals=signals))
                    given_up = None
                except (WaitTimeout, RoleDied) as error:
                    if not _others_serve(run, self.job):
                        over = standing_of(run, began)
                        if over is not None and over.attempt is None:
                            return _left(run, over)
                        raise given_up or error from None
                    if given_up is None:
                        log.warning("%s; other nodes of job %s serve on, and this one stays with them", error, self.job)
                        given_up = error

    def _stay(self, visit: _Visit) -> None:
        """Serve one attempt until it is over."""
        try:
            over = visit.stay(self.num_engines, self.environment, {"job": self.job, **Owner.this_process().record()})
        except RoleDied:
            self.past = visit.attempt.epoch  # there may be something wrong with this node
            raise
        self.past = max(self.past, over)

    def give_back(self, why: WaitTimeout | RoleDied) -> int:
        """Leave word how the job is to come again; the exit code that has its script see to that."""
        if isinstance(why, NodeLost):
            config = load([self.run.config], [])
            try:
                leave_out(why, self.environment, requests=[satellite_of(config).request])
            except NodeLost as refused:
                why = refused
            else:
                log.warning("%s", why)
                log.warning("job %s comes again without node %s", self.job, why.node)
                return EXIT_ELSEWHERE
        log.warning("%s", why)
        log.warning(
            "job %s gives its nodes back, and rests in the queue until attempt %d or later works",
            self.job,
            self.past + 1,
        )
        resting.rest(self.run, self.job, self.past)
        return EXIT_UNNEEDED


def _left(run: RunDir, standing: Standing | None) -> int:
    """The exit code for leaving a run: whether it has ended, or (``standing`` is None) goes on."""
    if standing is None:
        log.info("left %s", run.root)
        return EXIT_STOPPED
    log.info("%s: the run has ended: %s", run.root, standing.state)
    return EXIT_DONE


def _others_serve(run: RunDir, job: str) -> bool:
    """Whether other processes of this job, which are on its other nodes, have engines for an attempt that works."""
    attempt = run.newest_attempt() if job and run.attempts.is_dir() else None
    if attempt is None or not _works(run, attempt):
        return False
    return any(seat.holder().get("job") == job for seat in seats.newest(attempt).values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The state of a run, as a process sees it that wants to serve it."""

    state: str
    attempt: AttemptDir | None = None
    """The one at work; None where the run has ended."""


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
    """Whether the attempt goes on, as far as its files tell: a launcher on another host may have died unseen."""
    state, owner = state_of(run, attempt.epoch)
    return state == RUNNING and not owner.is_gone() and newest_epoch(run) == attempt.epoch


def _next_standing(run: RunDir, after: int, wait_s: float | None, signals: Signals) -> Standing | None:
    """How the run stands, once that is known; None if this process is told to leave first.

    Raises:
        WaitTimeout: it was not known in time.
        RunDirError: see ``_refuse_namesake``.
    """
    limits = load([run.config], []).limits if run.config.is_file() else LimitsConfig()
    limit_s = limits.rejoin_s if wait_s is None else wait_s
    pulse = Pulse()

    def known() -> Standing | int | None:
        _refuse_namesake(run, after, pulse)
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


def _refuse_namesake(run: RunDir, after: int, pulse: Pulse) -> None:
    """Check that the run's launcher is not on another machine with this machine's hostname.

    Whoever asks here for the launcher's process would find none and take the run for dead, although it is not.

    Args:
        pulse: of the newest attempt's trainer.

    Raises:
        RunDirError: it is; names both machines.
    """
    attempt = run.newest_attempt() if run.attempts.is_dir() else None
    if attempt is None or attempt.epoch <= after:
        return
    state, owner = state_of(run, attempt.epoch)
    machines = {"the run's first": Machine(owner.host, owner.boot), "this one": Machine.here()}
    if state != RUNNING or not (problem := namesakes(machines)):
        return
    pulse.see(read_heartbeat(attempt, "trainer-0"))
    if pulse.moved:
        raise RunDirError(f"{run.root} cannot be joined from here: {problem}")


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
    """The attempt's epoch once it is known not to go on; 0 until then."""

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
    """Check that the run takes engines from here, and that they can be started here.

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
