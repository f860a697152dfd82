"""The archive: groups that were trained on, in sealed HDF5 files, for people and tools. The only door of h5py.

    archive/steps-00000009-00000012.e00000003.h5        steps 9 to 12 as attempt (epoch) 3 made them

A file is built in memory and published under its name when it is whole, so HDF5 never writes to a shared file system,
locks nothing, and no reader can meet half a file. Its root has the attributes ``format``, ``epoch``, ``code``; each
step is an HDF5 group ``step-00000009`` with these columns, G groups of N trajectories of T tokens in all:

    column                         dtype     shape   meaning
    groups/position                int64     G       place in the run's endless prompt stream
    groups/prompt_ids              uint8     B       ids of the prompts, UTF-8, one after the other
    groups/prompt_id_offsets       int64     G+1     id g is prompt_ids[o[g]:o[g+1]]
    groups/chain                   bytes     G       chain of the rollout writer that sealed it
    groups/ticket                  int64     G       its ticket there; with the chain the group's name in the run
    groups/version                 int64     G,2     newest published weights at its ticket: epoch, step
    groups/baseline                float64   G,2     mean and deviation that a lone episode is held against; else NaN
    groups/readable                bool      G       false: bytes were damaged, so it has no tokens and was left out
    groups/trajectory_offsets      int64     G+1     trajectories of group g are [o[g], o[g+1])
    trajectories/reward            float64   N       as the reward function gave it
    trajectories/advantage         float32   N       as the loss got it
    trajectories/stop              uint8     N       0 stop, 1 length, 2 abort
    trajectories/episode           int64     N       branches of one episode share a number
    trajectories/length            int64     N       tokens
    trajectories/generated         int64     N       tokens that the run sampled
    trajectories/token_offsets     int64     N+1     tokens of trajectory n are [o[n], o[n+1]); none where not readable
    tokens/token_ids               int32     T       prompt and everything after it
    tokens/loss_mask               bool      T       the run sampled it
    tokens/logprobs                float32   T       behaviour log-prob in nats; 0 where not sampled
    tokens/versions                int32     T       weight step that sampled it; -1 where not sampled
    tokens/proximal                float32   T       proximal log-prob in nats; NaN where none was computed
    tokens/experts                 uint8     T,L,K   experts that the engine's L layers chose, 255 where it did not say;
                                                     uint16 and 65535 of 256 experts and more; only where it said any

Groups stand in the order of the claim. Columns are compressed (shuffle, gzip) and checksummed (Fletcher-32). HDF5 1.10
and later read it; the reader's own open takes no lock either (``h5py.File(path, locking=False)``).
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc import __version__
from areal_hpc.buffer.epochs import history
from areal_hpc.errors import DataError
from areal_hpc.fs import publish
from areal_hpc.routing import joined
from areal_hpc.run_dir import RunDir
from areal_hpc.types import (
    ArchivedStep,
    Baseline,
    GroupRef,
    StopReason,
    TrainedStep,
    Trajectory,
    TrajectoryGroup,
    WeightVersion,
)

Columns = dict[str, NDArray[Any]]

FORMAT = 1
FILE_NAME = re.compile(r"steps-(\d{8})-(\d{8})\.e(\d{8})\.h5")
STOPS = (StopReason.STOP, StopReason.LENGTH, StopReason.ABORT)
CHUNK_ROWS = 1 << 20
PACKING = {"compression": "gzip", "shuffle": True, "fletcher32": True}
TOKENS = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
"""Columns of a trajectory."""
NO_BASELINE = (np.nan, np.nan)


def columns_of(archived: ArchivedStep) -> Columns:
    """The columns of one step."""
    return {**_group_columns(archived), **_trajectory_columns(archived), **_token_columns(archived)}


def _group_columns(archived: ArchivedStep) -> Columns:
    refs = archived.step.refs
    ids = [ref.prompt_id.encode() for ref in refs]
    return {
        "groups/position": _integers([ref.position for ref in refs]),
        "groups/prompt_ids": np.frombuffer(b"".join(ids), dtype=np.uint8),
        "groups/prompt_id_offsets": _offsets([len(id_) for id_ in ids]),
        "groups/chain": np.array([ref.chain.encode("ascii") for ref in refs], dtype=np.bytes_),
        "groups/ticket": _integers([ref.ticket for ref in refs]),
        "groups/version": _integers([ref.version for ref in refs]).reshape(-1, 2),
        "groups/baseline": np.array([ref.baseline or NO_BASELINE for ref in refs], dtype=np.float64).reshape(-1, 2),
        "groups/readable": np.array(archived.step.readable, dtype=np.bool_),
        "groups/trajectory_offsets": _offsets([len(ref.rewards) for ref in refs]),
    }


def _trajectory_columns(archived: ArchivedStep) -> Columns:
    refs, tokens = archived.step.refs, _trajectories(archived)
    cut = [truncated for ref in refs for truncated in ref.truncated]
    told = (StopReason.STOP, StopReason.LENGTH)  # all that a reference knows
    stops = [told[c] if t is None else t.stop for t, c in zip(tokens, cut, strict=True)]
    return {
        "trajectories/reward": np.array([reward for ref in refs for reward in ref.rewards], dtype=np.float64),
        "trajectories/advantage": np.asarray(archived.step.advantages, dtype=np.float32),
        "trajectories/stop": np.array([STOPS.index(stop) for stop in stops], dtype=np.uint8),
        "trajectories/episode": _integers([episode for ref in refs for episode in ref.episodes]),
        "trajectories/length": _integers([length for ref in refs for length in ref.lengths]),
        "trajectories/generated": _integers([count for ref in refs for count in ref.generated]),
        "trajectories/token_offsets": _offsets([0 if t is None else t.token_ids.size for t in tokens]),
    }


def _token_columns(archived: ArchivedStep) -> Columns:
    present = {n: trajectory for n, trajectory in enumerate(_trajectories(archived)) if trajectory is not None}
    columns = {name: _joined([getattr(t, name) for t in present.values()], dtype) for name, dtype in TOKENS.items()}
    unknown = {n: np.full(t.token_ids.shape, np.nan) for n, t in present.items() if n not in archived.step.proximal}
    proximal = {**unknown, **archived.step.proximal}
    columns["proximal"] = _joined([proximal[n] for n in present], np.float32)
    experts = joined([t.experts for t in present.values()], [t.token_ids.size for t in present.values()])
    columns |= {} if experts is None else {"experts": experts}
    return {f"tokens/{name}": column for name, column in columns.items()}


def _trajectories(archived: ArchivedStep) -> list[Trajectory | None]:
    """Every trajectory of the step [N]; None where it was not readable."""
    found: list[Trajectory | None] = []
    for g, ref in enumerate(archived.step.refs):
        found += archived.groups[g].trajectories if g in archived.groups else [None] * len(ref.rewards)
    assert len(found) == archived.step.advantages.size, "a group differs from its reference"
    return found


def _integers(values: list[Any]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def _offsets(sizes: list[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *sizes], dtype=np.int64)


def _joined(arrays: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def step_of(columns: Mapping[str, NDArray[Any]], version: WeightVersion) -> ArchivedStep:
    """The step that ``columns_of`` was given. Its references point into the archive: segment = step, offset = row."""
    readable = tuple(bool(flag) for flag in columns["groups/readable"])
    spans = _spans(columns["groups/trajectory_offsets"])
    token_spans = _spans(columns["trajectories/token_offsets"])
    refs = _refs(columns, version.step)
    groups = {g: _group(columns, refs[g], span, token_spans) for g, span in enumerate(spans) if readable[g]}
    proximal = {n: columns["tokens/proximal"][span] for n, span in enumerate(token_spans)}
    step = TrainedStep(
        version=version,
        refs=refs,
        readable=readable,
        advantages=columns["trajectories/advantage"],
        proximal={n: values for n, values in proximal.items() if values.size and not np.isnan(values).any()},
    )
    return ArchivedStep(step=step, groups=groups)


def _refs(columns: Mapping[str, NDArray[Any]], step: int) -> tuple[GroupRef, ...]:
    return tuple(_ref(columns, step, g, span) for g, span in enumerate(_spans(columns["groups/trajectory_offsets"])))


def _ref(columns: Mapping[str, NDArray[Any]], step: int, g: int, span: slice) -> GroupRef:
    id_span = slice(*columns["groups/prompt_id_offsets"][g : g + 2].tolist())

    def of_trajectories(name: str) -> tuple[Any, ...]:
        return tuple(columns[f"trajectories/{name}"][span].tolist())

    return GroupRef(
        chain=columns["groups/chain"][g].decode("ascii"),
        segment=step,
        offset=g,
        seq=0,
        ticket=int(columns["groups/ticket"][g]),
        position=int(columns["groups/position"][g]),
        prompt_id=columns["groups/prompt_ids"][id_span].tobytes().decode(),
        version=WeightVersion(*columns["groups/version"][g].tolist()),
        rewards=of_trajectories("reward"),
        lengths=of_trajectories("length"),
        generated=of_trajectories("generated"),
        truncated=tuple(STOPS[stop] is StopReason.LENGTH for stop in of_trajectories("stop")),
        episodes=of_trajectories("episode"),
        baseline=_baseline(columns, g),
    )


def _baseline(columns: Mapping[str, NDArray[Any]], g: int) -> Baseline | None:
    """None also in files that were written before there were any."""
    values = columns["groups/baseline"][g].tolist() if "groups/baseline" in columns else NO_BASELINE
    return None if np.isnan(values[0]) else Baseline(*values)


def _group(
    columns: Mapping[str, NDArray[Any]], ref: GroupRef, span: slice, token_spans: list[slice]
) -> TrajectoryGroup:
    experts = columns.get("tokens/experts")
    return TrajectoryGroup(
        position=ref.position,
        prompt_id=ref.prompt_id,
        trajectories=tuple(
            Trajectory(
                **{name: columns[f"tokens/{name}"][token_spans[n]] for name in TOKENS},
                reward=float(columns["trajectories/reward"][n]),
                stop=STOPS[columns["trajectories/stop"][n]],
                episode=int(columns["trajectories/episode"][n]),
                experts=None if experts is None else experts[token_spans[n]],
            )
            for n in range(span.start, span.stop)
        ),
        baseline=ref.baseline,
    )


def _spans(offsets: NDArray[Any]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(offsets.tolist())]


class ArchiveFile:
    """One file under way, in memory: compressed steps, one after the other, until ``publish``."""

    def __init__(self, first: WeightVersion) -> None:
        import h5py

        self.first, self.num_steps = first, 0
        self._bytes = io.BytesIO()
        self._file = h5py.File(self._bytes, "w", libver=("v110", "v110"))  # one chunk costs no index there
        self._file.attrs.update({"format": FORMAT, "epoch": first.epoch, "code": f"areal-hpc {__version__}"})

    def add(self, archived: ArchivedStep) -> None:
        """Put in the step that follows the last one."""
        step = archived.step.version.step
        assert step == self.first.step + self.num_steps, f"step {step} does not follow"
        self.num_steps += 1
        for name, column in columns_of(archived).items():
            packing = {**PACKING, "chunks": (min(len(column), CHUNK_ROWS), *column.shape[1:])} if column.size else {}
            self._file.create_dataset(f"{_step_name(step)}/{name}", data=column, **packing)

    def publish(self, run: RunDir) -> Path:
        """Make it a file of the run, durable and whole at once.

        Raises:
            OSError: the file system refused; there is no file then.
        """
        self._file.close()
        last = self.first.step + self.num_steps - 1
        path = run.archive / f"steps-{self.first.step:08d}-{last:08d}.e{self.first.epoch:08d}.h5"
        publish(path, self._bytes.getvalue())
        return path


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def archived_steps(run: RunDir) -> dict[int, Path]:
    """Step -> file, of all archived steps that the run stands on, in order. What a restart took back is not there."""
    lineage, found = history(run), {}
    names = os.listdir(run.archive) if run.archive.is_dir() else []
    for match in filter(None, map(FILE_NAME.fullmatch, sorted(names))):
        first, last, epoch = map(int, match.groups())
        if epoch in lineage:
            until = lineage[epoch]
            steps = range(first, (last if until is None else min(last, until)) + 1)
            found.update(dict.fromkeys(steps, run.archive / match[0]))
    return dict(sorted(found.items()))


def read_step(path: Path, step: int) -> ArchivedStep:
    """One step of an archive file.

    Raises:
        DataError: the file cannot be read, is damaged, or has no such step.
    """
    version, columns = _read_columns(path, step, ("groups", "trajectories", "tokens"))
    return step_of(columns, version)


def read_refs(path: Path, step: int) -> tuple[WeightVersion, tuple[GroupRef, ...]]:
    """The version that a step made and its groups, without their tokens. Raises as ``read_step``."""
    version, columns = _read_columns(path, step, ("groups", "trajectories"))
    return version, _refs(columns, step)


def _read_columns(path: Path, step: int, levels: Sequence[str]) -> tuple[WeightVersion, Columns]:
    import h5py

    try:
        with h5py.File(path, "r", locking=False) as file:
            if (found := int(file.attrs["format"])) != FORMAT:
                raise DataError(f"{path} has format {found}, this version reads {FORMAT}; use the one that wrote it")
            parts = {level: file[_step_name(step)][level] for level in levels}
            columns = {f"{level}/{name}": column[()] for level, part in parts.items() for name, column in part.items()}
            return WeightVersion(int(file.attrs["epoch"]), step), columns
    except (OSError, KeyError) as error:  # h5py's for bytes that are not HDF5, damaged, or not there
        raise DataError(
            f"step {step} of {path} cannot be read ({error}); restore the file, or go without it"
        ) from error
