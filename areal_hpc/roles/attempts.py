"""The attempts of one ``areal-hpc run``: each has an epoch of its own and goes on from the newest checkpoint.

    claim an epoch ── make the model, once ── start, watch and end its processes ── done, or stopped: how the run went
          ↑                                                 │
          └────────────── limits.attempts allows ───────────┘ a trainer rank died, or nobody got on any more

Attempts that commit new steps may follow each other for ever. A person's mistake, a process that was replaced too
often, a stop request or another owner end the run whatever the limit says. A node that has lost its devices ends this
start: the batch script has the job go on without that node (``left_out``), as often as ``limits.attempts`` allows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.buffer.epochs import check_fence, claim_epoch, read_start, sweep
from areal_hpc.checkpoint import CHECKPOINT_NAME
from areal_hpc.cluster.components import components_of
from areal_hpc.cluster.owner import Owner, whence
from areal_hpc.config.cluster import Shape, SignSockets
from areal_hpc.config.derived import is_served_by_others
from areal_hpc.config.describe import dump
from areal_hpc.config.schema import Config
from areal_hpc.errors import AttemptFailed, NodeLost, Stalled
from areal_hpc.exits import EXIT_STALLED
from areal_hpc.fs import publish, publish_json, read_if_listed
from areal_hpc.keys import make_key
from areal_hpc.liveness.alone import Lookout
from areal_hpc.liveness.guard import Guard
from areal_hpc.liveness.left_out import leave_out
from areal_hpc.liveness.resting import Recall
from areal_hpc.liveness.stopping import RESTARTING, RUNNING, Signals, asked_by, is_asked_to_stop
from areal_hpc.liveness.watchdog import Watchdog
from areal_hpc.mount import examine
from areal_hpc.report import LiveConsole
from areal_hpc.roles.restarts import attempts_in_vain, goes_on
from areal_hpc.roles.supervisor import Supervisor, judge_stopped, roles_of
from areal_hpc.roles.wiring.carried import wandb_id
from areal_hpc.roles.wiring.launchers import make_launcher
from areal_hpc.run_dir import AttemptDir, RunDir
from areal_hpc.signing import provide
from areal_hpc.telemetry import Recorder, RecordReader, Trackers, open_sinks

log = logging.getLogger(__name__)

IRREPLACEABLE = ("trainer", "generator")
"""The second in deterministic training only: an engine that starts anew lacks the older weights, by which some groups
are still to be sampled."""

FILES_A_LOOK = 16
"""Records of so many processes are read at each look of the supervisor, 64 files a second; of more in turn."""

Record = Callable[[str, Mapping[str, Any]], None]


@dataclass(slots=True, kw_only=True)
class Attempts:
    """One start of a run, from its first attempt to its last."""

    run: RunDir
    config: Config
    console: LiveConsole
    signals: Signals
    resume_from: int | None = None
    """Go on from the checkpoint of this step instead of the newest, unless an attempt of this start has done so."""
    progress: list[bool] = field(default_factory=list)
    """For each attempt that failed, whether it had committed a new step."""
    reason: str = ""
    """Why the last one failed."""
    lost: NodeLost | None = None
    """The node without which the job is to go on."""
    lookout: Lookout | None = None
    """The last attempt's watch for engines; None where the run has engines of its own."""

    def go(self, *, after: int) -> str:
        """How the last attempt went: "finished", "stopped" or "aborted". ``after``: the newest epoch there is.

        Raises:
            RunDirError: somebody else has started the run at the same moment, or the disk is full by now.
            AttemptFailed, RoleDied, NodeLost, Stalled, Fenced: the run has failed.
        """
        epoch, outcome = after, RESTARTING
        while outcome == RESTARTING:
            owner = Owner.this_process().record() | whence()
            epoch = claim_epoch(self.run, owner, after=epoch)
            outcome = self._attempt(epoch, owner, after)
        return outcome

    def _attempt(self, epoch: int, owner: Mapping[str, Any], after: int) -> str:
        """Run attempt ``epoch``; whatever happens, its state does not stay "running", and says why it failed."""
        attempt = self.run.attempt(epoch).create()
        outcome, why = "failed", ""
        publish_json(attempt.state, {"state": RUNNING, **owner})
        with closing(Recorder(attempt.records("launcher", 0), role="launcher", index=0, epoch=epoch)) as recorder:
            try:
                publish_json(attempt.mount, examine(self.run.root, self.config.buffer.min_free_mb).record())
                sweep(self.run, epoch)
                if self.resume_from is not None:
                    publish_json(attempt.resume_from, {"step": self.resume_from, "after": after})
                publish(self.run.config, dump(self.config).encode())
                make_key(self.run.token)
                self._sign_sockets(attempt)
                if self.reason:
                    recorder.record("restart", {"process": "run", "reason": self.reason, "pause_s": 0.0})
                has_model = self._make_model(attempt, owner)
                outcome = self._supervise(epoch, recorder.record) if has_model else "stopped"
                why = self._why_stopped(attempt) if outcome in ("stopped", "aborted") else ""
            except (AttemptFailed, Stalled) as died:
                why = in_short(died)
                self._require_another(epoch, died)
                outcome = RESTARTING
            except BaseException as error:
                why = in_short(error)
                raise
            finally:
                lost = {"lost": self.lost.node} if self.lost else {}
                publish_json(attempt.state, {"state": outcome, "about": why, **lost, **owner})
                recorder.record("run", {"event": outcome})
        return outcome

    def _sign_sockets(self, attempt: AttemptDir) -> None:
        cluster = self.config.cluster
        if unsigned := provide(attempt.signing, cluster.sign_sockets, self.run.signing):
            level = logging.INFO if cluster.shape is Shape.LOCAL else logging.WARNING
            log.log(level, "connections between ranks ask for no secret (cluster.sign_sockets): %s", unsigned)
        elif cluster.shape is not Shape.LOCAL and cluster.sign_sockets is not SignSockets.NEVER:
            log.info(
                "connections between ranks are signed; where NCCL goes over TCP, cluster.sign_sockets=never is faster"
            )

    def _why_stopped(self, attempt: AttemptDir) -> str:
        if self.lost:
            return in_short(self.lost)
        verdict = self.lookout.verdict if self.lookout else ""
        return verdict or asked_by(attempt, self.signals)

    def _make_model(self, attempt: AttemptDir, owner: Mapping[str, Any]) -> bool:
        """Make the model if it is missing. False if a stop was asked for while it was being made."""
        path = self.config.model.path
        if Path(path).is_dir():
            return True
        from areal_hpc.roles.wiring.models import make_model
        from areal_hpc.roles.wiring.preflight import check_made

        publish_json(attempt.state, {"state": RUNNING, "about": f"making the model {path}", **owner})
        try:
            with self.signals.interrupting():
                make_model(self.config)
                check_made(self.config)
        except KeyboardInterrupt:
            return False
        publish_json(attempt.state, {"state": RUNNING, **owner})
        return True

    def _require_another(self, epoch: int, died: AttemptFailed | Stalled) -> None:
        """Note that attempt ``epoch`` has failed.

        Raises:
            Fenced: a newer attempt owns the run.
            AttemptFailed, Stalled: somebody asked for a stop, or too many attempts in a row came to nothing.
        """
        check_fence(self.run, epoch)
        self.progress.append(committed_a_step(self.run, epoch))
        self.reason = in_short(died)
        limit = self.config.limits.attempts
        if limit == 0 or is_asked_to_stop(self.run.attempt(epoch), self.signals):
            raise died
        if not goes_on(self.progress, limit):
            in_vain = attempts_in_vain(self.progress)
            raise type(died)(f"{in_vain} attempts in a row committed no new step (limits.attempts); {died}") from died

    def _supervise(self, epoch: int, record: Record) -> str:
        """``supervise``; a node that has lost its devices stops the attempt where its job goes on without it.

        Raises:
            NodeLost: it does not.
            Fenced: a newer attempt owns the run, and this job is not to come again.
        """
        try:
            return self.supervise(epoch, record)
        except NodeLost as lost:
            check_fence(self.run, epoch)
            if self.run.attempt(epoch).stop_request.exists():
                raise
            requests = [component.request for component in components_of(self.config)]
            progress = [*lost_before(self.run, epoch), committed_a_step(self.run, epoch)]
            may = goes_on(progress, self.config.limits.attempts)
            leave_out(lost, os.environ, requests=requests, may=may)
            log.warning("%s", lost)
            log.warning("the job goes on without node %s", lost.node)
            self.lost = lost
            return "stopped"

    def supervise(self, epoch: int, record: Record) -> str:
        """Start every role of attempt ``epoch``, watch them, end them; how it went.

        Raises:
            AttemptFailed, RoleDied, Stalled, Fenced: see ``Supervisor.watch``; every process has ended.
        """
        config, attempt = self.config, self.run.attempt(epoch)
        roles = roles_of(config)
        launcher = make_launcher(config, self.run, epoch, roles)
        records = RecordReader(attempt.telemetry)
        trackers = Trackers(open_sinks(config.telemetry, self.run, lambda: wandb_id(self.run, epoch)))

        def show(most: int | None = FILES_A_LOOK) -> None:
            for one in records.poll(most):
                trackers.follow(one)
                self.console.feed([one])
            self.console.feed([])

        guard = Guard(self.run.root, config.limits.stall_s, lambda: launcher.stop(0.0), exit_code=EXIT_STALLED)
        self.lookout = Lookout(self.run, epoch, config.limits.alone_s) if is_served_by_others(config) else None
        looks = [Recall(self.run, epoch).look, *([self.lookout.look] if self.lookout else [])]

        def stop() -> bool:
            guard.beat()
            for look in looks:
                look()
            return is_asked_to_stop(attempt, self.signals)

        def at_once() -> bool:
            guard.beat()
            return self.signals.insist

        supervisor = Supervisor(
            launcher,
            config.limits,
            irreplaceable=IRREPLACEABLE if config.deterministic else IRREPLACEABLE[:1],
            stop=stop,
            show=show,
            record=record,
            check_fence=lambda: check_fence(self.run, epoch),
            watchdog=Watchdog(attempt, config.limits).look,
        )
        with guard, closing(trackers):
            try:
                supervisor.start(roles)
                outcome = supervisor.watch()
                if outcome == "stopped":
                    log.info(
                        "stopping: the step under way, then a checkpoint, within limits.stop_s = %g s; asked again, "
                        "all ends at once",
                        config.limits.stop_s,
                    )
            finally:
                ended = launcher.stop(config.limits.stop_s, at_once=at_once)
                show(most=None)
        if outcome == "stopped" and self.signals.insist:
            return "aborted"
        if outcome == "stopped":
            judge_stopped(launcher, ended)
        return outcome


def in_short(error: BaseException) -> str:
    """What happened, without what to do about it and what the logs say."""
    return str(error).partition("\n")[0].partition("; ")[0].rstrip(":") or type(error).__name__


def lost_before(run: RunDir, epoch: int) -> list[bool]:
    """Of the attempts right before ``epoch`` that were stopped by a lost node, the oldest first, whether each had
    committed a new step."""
    found: list[bool] = []
    for before in range(epoch - 1, 0, -1):
        if not (read_if_listed(run.attempt(before).state) or {}).get("lost"):
            break
        found.insert(0, committed_a_step(run, before))
    return found


def committed_a_step(run: RunDir, epoch: int) -> bool:
    """Whether attempt ``epoch`` has committed a later step than the one that it began with.

    Raises:
        RunDirError: somebody has deleted all checkpoints.
    """
    start = read_start(run, epoch)
    if start is None:
        return False
    names = (CHECKPOINT_NAME.fullmatch(name) for name in run.in_checkpoints())
    return any(int(name[2]) == epoch and int(name[1]) > start.version.step for name in names if name is not None)
