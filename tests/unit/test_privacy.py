"""Who may see and change what a run writes, tried by real users: forks of this process that give up being root."""

from __future__ import annotations

import codecs
import grp
import os
import shutil
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from rollout_stores import group
from started import config_in, end_at_once, start

from areal_hpc import checkpoint
from areal_hpc.buffer.epochs import claim_epoch, claimed_by, newest_epoch
from areal_hpc.buffer.reader import RingReader
from areal_hpc.buffer.writer import RingWriter
from areal_hpc.cli import main
from areal_hpc.cluster.owner import Owner, whence
from areal_hpc.config.describe import dump
from areal_hpc.config.keys import with_value
from areal_hpc.config.schema import BufferConfig, Config
from areal_hpc.errors import RunDirError
from areal_hpc.exits import EXIT_USER_ERROR
from areal_hpc.fs import make_private_directory, publish, publish_json, read_json
from areal_hpc.journal import Journal
from areal_hpc.keys import make_key, read_key
from areal_hpc.liveness.stopping import stop_run
from areal_hpc.privacy import open_private
from areal_hpc.report import why_lines
from areal_hpc.roles.attempts import Attempts
from areal_hpc.roles.joining import require_joinable
from areal_hpc.roles.resuming import resumption
from areal_hpc.roles.wiring.online import standing_key
from areal_hpc.run_dir import RunDir
from areal_hpc.types import WeightVersion

GROUP = "users"
ALICE, BOB, MALLORY = 61001, 61002, 61003
"""Two members of the group, and somebody else; none of them is in /etc/passwd."""
RING = BufferConfig(max_staleness=1, segment_mb=0.001, commit_s=1e6, min_free_mb=0.0)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")


def as_user(uid: int, do: Callable[[], object], umask: int = 0o077) -> None:
    """Run ``do`` in a fork that belongs to ``uid``, with the umask of his shell; what it raises fails the test."""
    codecs.lookup("ascii")  # which is imported late, and the interpreter may lie where only root reads
    source, sink = os.pipe()
    if (pid := os.fork()) == 0:
        said = ""
        try:
            os.setgroups([] if uid == MALLORY else [grp.getgrnam(GROUP).gr_gid])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(umask)
            do()
        except BaseException:
            said = traceback.format_exc()
        os.write(sink, said.encode()[-4000:])
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as said_by_child:
        said = said_by_child.read()
    os.waitpid(pid, 0)
    assert not said, said


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory of the group, as centres give one to each project: what is made in it is the group's by default."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o755)
    place = top / "project"
    place.mkdir()
    os.chown(place, 0, grp.getgrnam(GROUP).gr_gid)
    place.chmod(0o2770)
    yield place
    shutil.rmtree(top)


@pytest.fixture
def config(project: Path) -> Config:
    config = config_in(project)
    (project / "model").chmod(0o755)
    return with_value(config, "run_group", GROUP)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in (root, *root.rglob("*"))}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_run_is_its_owners_alone_whatever_the_umask_and_whatever_it_lies_in(project: Path, umask: int) -> None:
    def begin_run() -> None:
        run = RunDir.create(project / "run")
        run.attempt(1).create()
        publish(run.config, b"x")
        make_key(run.token)

    as_user(ALICE, begin_run, umask)
    found = modes(project / "run")
    assert {path for path, mode in found.items() if mode & 0o077} == set()
    assert (found["."] & 0o777, found["config.yaml"], found["secrets/token"]) == (0o700, 0o600, 0o600)


def work(run: RunDir, epoch: int) -> None:
    """What an attempt of the run writes, by the product's own hands."""
    found = checkpoint.newest(run, {1: None})
    parent, state = (found.version, found.state["ring"]) if found else (None, None)
    shape = {"num_slots": 1, "config": RING, "capacity": 4, "poll_s": 0}
    reader = RingReader(run, epoch, **shape, discover_s=0, state=state, parent=parent)
    version = WeightVersion(epoch, parent.step if parent else 0)
    reader.write_start(version, "data", {})
    reader.release(version)
    writer = RingWriter(run, epoch, **shape, slot=0, fence_s=0)
    reader.claim(1, version)
    for position in (10 * epoch, 10 * epoch + 1):
        ticket = writer.try_reserve(position)
        assert ticket is not None
        writer.seal(ticket, group(position, [version.step]))
    writer.flush()
    Journal(run, epoch).close()
    step = WeightVersion(epoch, version.step + 5)

    def save(directory: Path) -> None:
        os.close(os.open(directory / "model.safetensors", os.O_CREAT | os.O_WRONLY, 0o600))  # as safetensors does

    checkpoint.write(run, step, save, {"ring": reader.state_dict()})


def test_a_member_of_the_group_goes_on_with_a_run_under_secrets_of_his_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at_once(monkeypatch)
    run = RunDir(Path(config.run_root) / "run")

    def supervise(attempts: Attempts, epoch: int, _: object) -> str:
        work(attempts.run, epoch)
        library = attempts.run.root / "library"
        library.mkdir(exist_ok=True)
        (library / f"{epoch}").write_text("which knows nothing of groups")
        return "stopped"

    monkeypatch.setattr(Attempts, "supervise", supervise)
    as_user(ALICE, lambda: start(config))
    first = run.token.read_text()

    def look_and_go_on() -> None:
        with pytest.raises(RunDirError, match=rf"secrets/token is the secret of {ALICE}, whom to ask"):
            read_key(run.token)
        with pytest.raises(RunDirError, match=r"secrets/token must be yours alone; .* and join as him"):
            require_joinable(run, config)
        assert claimed_by(run, 1)["directory"] == str(Path.cwd())
        assert main(["config", str(run.config)]) == 0
        assert start(config, resume=True) == 75
        assert run.token.read_text() != first
        (old,) = [path for path in run.checkpoints.iterdir() if path.name.endswith("e00000001")]
        shutil.rmtree(old)

    as_user(BOB, look_and_go_on)
    assert newest_epoch(run) == 2
    found = modes(run.root)
    directories = {path for path in found if (run.root / path).is_dir()}
    assert {found[path] for path in directories} == {0o2770}
    assert found.pop("secrets/token") == 0o600
    signing = {path for path in found if path.endswith("/signing.so")}
    assert {found[path] for path in signing} <= {0o600}, "what is loaded into his processes is nobody's but his"
    assert {mode for path, mode in found.items() if path not in directories | signing} == {0o660}
    assert {path.lstat().st_gid for path in run.root.rglob("*")} == {grp.getgrnam(GROUP).gr_gid}


def test_a_run_of_a_colleague_that_is_at_work_names_him_and_is_stopped_by_a_member_only(config: Config) -> None:
    run = RunDir(Path(config.run_root) / "run")
    ready, go = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        os.setgroups([grp.getgrnam(GROUP).gr_gid])
        os.setgid(ALICE)
        os.setuid(ALICE)
        made = RunDir.create(run.root, GROUP)
        owner = Owner.this_process().record()
        attempt = made.attempt(claim_epoch(made, owner)).create()
        publish_json(attempt.state, {"state": "running", **owner})
        publish(made.config, b"name: run")
        make_key(made.token)
        os.close(open_private(attempt.log("trainer", 0), os.O_CREAT | os.O_WRONLY))
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        assert attempt.stop_request.exists()
        publish_json(attempt.state, {"state": "stopped", **owner})
        os._exit(0)
    os.read(ready[0], 1)

    def meet() -> None:
        with pytest.raises(RunDirError, match=rf"in use by process {pid} on \S+ of {ALICE}; stop it with"):
            start(config)
        told = why_lines(run, sleep=lambda _: None, clock=count().__next__)
        assert told[0] == "run run, attempt 1: running"
        assert told[-1] == f"engines are not asked themselves: {run.token} is the secret of {ALICE}"
        assert main(["status", str(run.root)]) == 0
        with pytest.raises(RunDirError, match="did not stop in 0 s"):
            stop_run(run, 0.0)

    def stare() -> None:
        for word in ("status", "stop", "logs"):
            assert main([word, str(run.root)]) == EXIT_USER_ERROR
        with pytest.raises(PermissionError):
            RunDir.open(run.root)

    as_user(BOB, meet)
    as_user(MALLORY, stare)
    os.write(go[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert read_json(run.attempt(1).state)["state"] == "stopped"


def test_the_key_of_an_agent_in_daily_use_is_the_new_owners_too(project: Path) -> None:
    run = RunDir(project / "run")
    as_user(ALICE, lambda: standing_key(RunDir.create(run.root, GROUP).secrets / "agent-key"))
    path = run.secrets / "agent-key"
    first = path.read_text()
    as_user(ALICE, lambda: standing_key(path))
    assert path.read_text() == first, "a rollout worker that starts again keeps it"
    as_user(BOB, lambda: standing_key(path))
    assert path.read_text() != first
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (0o600, BOB)


def test_a_group_that_is_none_or_not_ones_own_is_refused_and_leaves_nothing(project: Path) -> None:
    def foreign() -> None:
        with pytest.raises(RunDirError, match=rf"run_group: {BOB} is not in games; `id` lists your groups"):
            RunDir.create(project / "run", "games")
        with pytest.raises(RunDirError, match="run_group: there is no group nobodies on this machine"):
            RunDir.create(project / "run", "nobodies")

    as_user(BOB, foreign)
    assert list(project.iterdir()) == []


def test_a_directory_that_is_open_to_others_than_it_should_be_is_refused(project: Path) -> None:
    def shared() -> None:
        make_private_directory(project / "mine")  # by hand, in the group's directory
        with pytest.raises(RunDirError, match=r"is open to others; run `chmod go=,g-s .*`, or set run_group"):
            RunDir.create(project / "mine")
        for mode, whose in ((0o755, ""), (0o710, ""), (0o701, ""), (0o2771, GROUP)):
            (project / "mine").chmod(mode)
            with pytest.raises(RunDirError, match=r"is open to (others|everybody); run `chmod "):
                RunDir.create(project / "mine", whose)
        for mode, whose in ((0o700, ""), (0o2770, GROUP)):
            (project / "mine").chmod(mode)
            RunDir.create(project / "mine", whose)
        RunDir.create(project / "alone")
        with pytest.raises(RunDirError, match=rf"is not the group's; run `chgrp -R {GROUP} "):
            RunDir.create(project / "alone", GROUP)

    as_user(ALICE, shared)


def test_a_run_that_began_in_a_home_that_is_closed_says_whom_to_ask(
    config: Config, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = project.parent / "home"
    home.mkdir()
    os.chown(home, ALICE, -1)
    home.chmod(0o700)
    run = RunDir(Path(config.run_root) / "run")

    def begin_run() -> None:
        (home / "work").mkdir()
        RunDir.create(run.root, GROUP)
        os.chdir(home / "work")
        claim_epoch(run, Owner.this_process().record() | whence())
        publish(run.config, dump(config).encode())

    as_user(ALICE, begin_run)

    def go_on() -> None:
        with pytest.raises(RunDirError, match=rf"was begun in {home}/work, which is gone, or not yours to enter; type"):
            resumption(run, [])
        assert main(["status", f"{home}/work"]) == EXIT_USER_ERROR

    as_user(BOB, go_on)
    said = capfd.readouterr().err
    assert f"{home}/work/config.yaml: permission denied; ask {ALICE}, who owns {home}, to let you use it, or" in said
