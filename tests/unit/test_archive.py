"""The archive's files: what goes in comes out, in the documented schema; half files and lost steps are not seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from archived import assert_equal, group, step_with, trajectory
from hypothesis import given, settings
from hypothesis.extra import numpy as numpy_st

from areal_hpc import fs
from areal_hpc.buffer import archive
from areal_hpc.buffer.archive import ArchiveFile, archived_steps, columns_of, read_refs, read_step, step_of
from areal_hpc.buffer.epochs import StartRecord, claim_epoch, write_start
from areal_hpc.errors import DataError
from areal_hpc.run_dir import RunDir
from areal_hpc.types import ArchivedStep, Baseline, StopReason, Trajectory, TrajectoryGroup, WeightVersion
from areal_hpc.watermark import Watermark


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    run.archive.mkdir()
    return run


def begin(run: RunDir, parent: WeightVersion | None) -> int:
    """A new attempt that goes on from checkpoint ``parent``; its epoch."""
    epoch = claim_epoch(run, {})
    version = WeightVersion(epoch, 0 if parent is None else parent.step)
    write_start(run, epoch, StartRecord(parent=parent, version=version, consumed=Watermark(), fingerprint=""))
    return epoch


def sealed(run: RunDir, epoch: int, first: int, last: int) -> Path:
    file = ArchiveFile(WeightVersion(epoch, first))
    for step in range(first, last + 1):
        file.add(step_with(WeightVersion(epoch, step), [group(step, trajectory([1], [(2, step - 1)]))]))
    return file.publish(run)


# Round trip

tokens = st.integers(0, 6).flatmap(
    lambda size: st.tuples(
        numpy_st.arrays(np.int32, size),
        numpy_st.arrays(np.bool_, size),
        numpy_st.arrays(np.float32, size, elements=st.floats(-20, 0, width=32)),
        numpy_st.arrays(np.int32, size, elements=st.integers(-1, 1000)),
    )
)
trajectories = st.builds(
    lambda arrays, reward, stop, episode: Trajectory(
        token_ids=arrays[0],
        loss_mask=arrays[1],
        logprobs=arrays[2],
        versions=arrays[3],
        reward=reward,
        stop=stop,
        episode=episode,
    ),
    tokens,
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(StopReason),
    st.integers(0, 5),
)
groups = st.builds(
    lambda position, prompt_id, members, baseline: TrajectoryGroup(
        position=position, prompt_id=prompt_id, trajectories=tuple(members), baseline=baseline
    ),
    st.integers(0, 1 << 40),
    st.text(),  # any prompt has an id, whatever its alphabet; NUL included
    st.lists(trajectories, max_size=3),
    st.none() | st.builds(Baseline, st.floats(-9, 9), st.floats(0, 9)),
)


@st.composite
def steps(draw: st.DrawFn) -> ArchivedStep:
    made_of = draw(st.lists(groups, max_size=4))
    damaged = [row for row in range(len(made_of)) if draw(st.booleans())]
    version = WeightVersion(draw(st.integers(1, 9)), draw(st.integers(1, 10**7)))
    archived = step_with(version, made_of, damaged=damaged, proximal=draw(st.floats(-9, 0, width=32)))
    return _as_far_as_a_reference_knows(archived)


def _as_far_as_a_reference_knows(archived: ArchivedStep) -> ArchivedStep:
    """A rank computes log-probs for whole shares: take some trajectories out, as if another rank had had them."""
    kept = {n: values for n, values in archived.step.proximal.items() if n % 2}
    return replace(archived, step=replace(archived.step, proximal=kept))


@given(steps())
def test_columns_say_all_of_a_step(archived: ArchivedStep) -> None:
    assert_equal(step_of(columns_of(archived), archived.step.version), archived)


@settings(max_examples=30)
@given(st.lists(steps(), min_size=1, max_size=3))
def test_a_file_gives_back_every_step_that_was_put_in(tmp_path_factory: pytest.TempPathFactory, made: list) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    run.archive.mkdir()
    first = made[0].step.version
    made = [step_with(WeightVersion(first.epoch, first.step + i), list(s.groups.values())) for i, s in enumerate(made)]
    file = ArchiveFile(first)
    for archived in made:
        file.add(archived)
    path = file.publish(run)
    for archived in made:
        assert_equal(read_step(path, archived.step.version.step), archived)
        assert read_refs(path, archived.step.version.step) == (archived.step.version, archived.step.refs)


def test_a_step_that_does_not_follow_is_our_mistake() -> None:
    file = ArchiveFile(WeightVersion(1, 3))
    file.add(step_with(WeightVersion(1, 3), []))
    with pytest.raises(AssertionError, match="step 5 does not follow"):
        file.add(step_with(WeightVersion(1, 5), []))


def test_experts_are_kept_and_who_has_none_has_a_record_of_nothing(run: RunDir) -> None:
    experts = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    told, untold = replace(trajectory([1, 2], [(3, 6), (4, 6)]), experts=experts), trajectory([5], [(6, 7)])
    steps = [
        step_with(WeightVersion(3, 8), [group(40, told), group(41, untold), group(42, told)], damaged=[2]),
        step_with(WeightVersion(3, 9), [group(43, untold)]),
    ]
    file = ArchiveFile(WeightVersion(3, 8))
    for step in steps:
        file.add(step)
    path = file.publish(run)
    found, none = (read_step(path, step).groups for step in (8, 9))
    assert sorted(found) == [0, 1]
    kept, unknown = (found[row].trajectories[0].experts for row in (0, 1))
    assert kept is not None and unknown is not None and kept.dtype == unknown.dtype == np.uint16
    np.testing.assert_array_equal(kept, experts)
    np.testing.assert_array_equal(unknown, np.full((2, 3, 2), 65535))
    assert none[0].trajectories[0].experts is None


# Schema


def documented() -> dict[str, tuple[str, str]]:
    """Column -> (dtype, shape), from the table in the module's docstring."""
    assert archive.__doc__ is not None
    rows = re.findall(r"^    (\w+/\w+) +(\w+) +(\S+) +\S", archive.__doc__, re.MULTILINE)
    return {name: (dtype, shape) for name, dtype, shape in rows}


def test_the_schema_that_is_documented_is_the_one_that_is_written(run: RunDir) -> None:
    """Sizes that all differ: G = 2 groups, N = 3 trajectories, T = 11 tokens, B = 16 bytes of ids."""
    told = replace(trajectory([1, 2], [(3, 6)]), experts=np.zeros((3, 4, 5), np.uint8))
    made_of = [
        group(40, told, trajectory([1, 2], [(3, 6), (4, 7)])),
        group(41, trajectory([5], [(6, 7), (7, -1), (8, 7)])),
    ]
    file = ArchiveFile(WeightVersion(3, 8))
    file.add(step_with(WeightVersion(3, 8), made_of))
    path = file.publish(run)
    sizes = {"G": 2, "G+1": 3, "N": 3, "N+1": 4, "T": 11, "B": 16, "G,2": (2, 2), "T,L,K": (11, 4, 5)}
    with h5py.File(path, "r", locking=False) as opened:
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        opened["step-00000008"].visititems(
            lambda name, item: (
                found.update({name: (item.dtype.name, item.shape)}) if isinstance(item, h5py.Dataset) else None
            )
        )
        assert {"format", "epoch", "code"} == set(opened.attrs)
        assert all(column.compression == "gzip" and column.shuffle and column.fletcher32 for column in _columns(opened))
    expected = {
        name: (dtype, size if isinstance(size, tuple) else (size,))
        for name, (dtype, shape) in documented().items()
        for size in [sizes[shape]]
    }
    chain = found.pop("groups/chain")
    assert (chain[0][:5], chain[1]) == expected.pop("groups/chain")
    assert found == expected


def _columns(opened: h5py.File) -> list[h5py.Dataset]:
    return [column for level in opened["step-00000008"].values() for column in level.values()]


# Sealed or not there


def test_a_crash_before_the_rename_leaves_no_file_that_a_reader_sees(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run, None)
    sealed(run, 1, 1, 2)

    class PowerCut(BaseException):
        pass

    def cut(*_: object) -> None:
        raise PowerCut

    seen = []
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(fs.os, call, cut)
            patched.setattr(Path, "unlink", lambda path, **_: seen.append(path.name))  # a killed process tidies nothing
            with pytest.raises(PowerCut):
                sealed(run, 1, 3, 4)
    assert len(seen) == 2 and all((run.archive / name).is_file() for name in seen)
    assert list(archived_steps(run)) == [1, 2]


@pytest.mark.parametrize("keep", [0, 7, 100, -9])
def test_a_file_that_was_cut_short_is_an_error_with_its_name(run: RunDir, keep: int) -> None:
    begin(run, None)
    path = sealed(run, 1, 1, 2)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=re.escape(str(path))):
        read_step(path, 1)


def test_a_bit_that_flips_in_a_column_is_noticed(run: RunDir) -> None:
    begin(run, None)
    many = [(token, 1) for token in range(3000)]
    file = ArchiveFile(WeightVersion(1, 1))
    file.add(step_with(WeightVersion(1, 1), [group(1, trajectory([1], many))]))
    path = file.publish(run)
    with h5py.File(path, "r", locking=False) as opened:
        chunk = opened["step-00000001/tokens/token_ids"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="restore the file"):
        read_step(path, 1)


def test_a_file_of_another_format_says_so(run: RunDir) -> None:
    path = run.archive / "steps-00000001-00000001.e00000001.h5"
    with h5py.File(path, "w") as opened:
        opened.attrs["format"] = 2
    with pytest.raises(DataError, match="has format 2, this version reads 1"):
        read_step(path, 1)


def test_a_step_that_the_file_does_not_hold_is_an_error(run: RunDir) -> None:
    path = sealed(run, 1, 1, 2)
    with pytest.raises(DataError, match="step 3"):
        read_step(path, 3)


def test_archive_files_are_for_their_owner_alone(run: RunDir) -> None:
    assert sealed(run, 1, 1, 1).stat().st_mode & 0o077 == 0


# Lineage


def test_steps_of_a_lost_branch_are_not_seen(run: RunDir) -> None:
    """Attempt 1 makes 8 steps and is killed; attempt 2 goes on from 4, makes 2, and is killed before a checkpoint."""
    begin(run, None)
    first, second = sealed(run, 1, 1, 3), sealed(run, 1, 4, 6)
    sealed(run, 1, 7, 8)
    assert list(archived_steps(run)) == [1, 2, 3, 4, 5, 6, 7, 8]
    begin(run, WeightVersion(1, 4))
    assert archived_steps(run) == {1: first, 2: first, 3: first, 4: second}
    third = sealed(run, 2, 5, 6)
    assert archived_steps(run) == {1: first, 2: first, 3: first, 4: second, 5: third, 6: third}
    begin(run, WeightVersion(1, 4))
    assert list(archived_steps(run)) == [1, 2, 3, 4]
    fourth = sealed(run, 3, 5, 5)
    sealed(run, 1, 5, 5)  # a zombie of the first attempt
    assert archived_steps(run)[5] == fourth


def test_a_run_without_an_archive_has_no_archived_steps(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    assert archived_steps(run) == {}
    begin(run, None)
    assert archived_steps(run) == {}
