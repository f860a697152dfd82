"""What a run was trained on, for a person: the archived steps as a table, or the episodes of one step.

On a terminal, or where colour is asked for, each token has the colour of the version that sampled it; elsewhere a mark
such as ``[v12]`` stands where tokens of another version begin. What no policy of the run sampled (prompts, the answers
of tools) is dim or marked ``[-]``. Text of a model may contain anything, so control bytes are shown, never sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_hpc.buffer.archive import archived_steps, read_refs
from areal_hpc.dialogue.text import IncrementalText, Text, load_text
from areal_hpc.errors import DataError
from areal_hpc.report.files import configuration
from areal_hpc.report.recall import journalled_steps, recall
from areal_hpc.report.text import MISSING, count, number, percent
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry.logs import escape
from areal_hpc.types import NOT_SAMPLED, ArchivedStep, GroupRef, Trajectory, episode_means

COLOURS = (36, 33, 35, 32, 34, 31)
"""Foreground colours of versions in turn: cyan, yellow, magenta, green, blue, red."""
DIM, RESET = "\x1b[2m", "\x1b[0m"
MARGIN = "  | "


def step_table(run: RunDir) -> list[str]:
    """One line for each archived step, then the mean of all.

    Raises:
        DataError: an archive file is damaged.
    """
    head = ["step", "attempt", "groups", "episodes", "tokens", "generated", "reward", "staleness", "cut"]
    rows = [_facts(path, step) for step, path in archived_steps(run).items()]
    if not rows:
        return [f"{run.root} has no archived step (archive.every_steps). {_in_the_journal(run)}"]
    means = ["mean", "", *(_mean([row[i] for row in rows]) for i in range(2, len(head)))]
    lines = [head, *(_cells(row) for row in rows), _cells(means)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def _in_the_journal(run: RunDir) -> str:
    steps = journalled_steps(run)
    if not steps:
        return "It has not made a step yet."
    return f"Of steps {min(steps)} to {max(steps)}, --step shows those whose groups are still in the ring."


def _facts(path: Path, step: int) -> list[Any]:
    version, refs = read_refs(path, step)
    cut = [{e for e, truncated in zip(ref.episodes, ref.truncated, strict=True) if truncated} for ref in refs]
    num_episodes = sum(len(set(ref.episodes)) for ref in refs)
    return [
        step,
        version.epoch,
        len(refs),
        num_episodes,
        sum(ref.num_tokens for ref in refs),
        sum(sum(ref.generated) for ref in refs),
        _mean([mean for ref in refs for mean in episode_means(ref.rewards, ref.episodes).tolist()]),
        _mean([step - 1 - ref.version.step for ref in refs]),
        sum(map(len, cut)) / num_episodes if num_episodes else None,
    ]


def _cells(facts: Sequence[Any]) -> list[str]:
    *counts, reward, staleness, cut = facts
    texts = [value if isinstance(value, str) else count(value) for value in counts]
    return [*texts, number(reward), number(staleness), percent(cut)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def show_step(
    run: RunDir,
    step: int,
    *,
    group: int | None = None,
    episode: int | None = None,
    model: Path | None = None,
    colour: bool = False,
) -> Iterator[str]:
    """The lines that show a step: its head, then each group with its prompt and its episodes.

    Args:
        group: show only this one, counted from 0 in the order of the claim.
        episode: of each group, show only this one.
        model: directory of the tokenizer; the run's ``model.path`` if not given.

    Raises:
        DataError: see ``recall``; or there is no such group or episode, or no tokenizer.
    """
    archived = recall(run, step)
    text = _tokenizer(model or Path(str(configuration(run).get("model", {}).get("path", ""))))
    picture = _Picture(text=text, colour=colour)
    places = range(len(archived.step.refs))
    if group is not None and group not in places:
        raise DataError(f"step {step} has {len(places)} groups; give --group a number from 0 to {len(places) - 1}")
    return _lines(run, archived, picture, places if group is None else [group], episode)


def _tokenizer(directory: Path) -> Text:
    text = load_text(directory)
    if text is None:
        raise DataError(f"{directory} has no tokenizer; give the model's directory with --model")
    return text


def _lines(
    run: RunDir, archived: ArchivedStep, picture: _Picture, places: Sequence[int], episode: int | None
) -> Iterator[str]:
    starts = [0, *accumulate(len(ref.rewards) for ref in archived.step.refs)]
    yield from _head(run, archived, picture)
    for g in places:
        ref = archived.step.refs[g]
        if episode is not None and episode not in ref.episodes:
            raise DataError(f"group {g} has episodes {sorted(set(ref.episodes))}; give --episode one of these")
        yield ""
        yield _group_line(g, ref)
        if g not in archived.groups:
            yield f"{MARGIN}its bytes were damaged: the step was trained without it"
            continue
        trajectories = archived.groups[g].trajectories
        prompt = _prompt(trajectories)
        yield from picture.lines(prompt, np.full(prompt.size, NOT_SAMPLED))
        names = _names([trajectory.episode for trajectory in trajectories])
        for n, trajectory in enumerate(trajectories):
            if episode in (None, trajectory.episode):
                yield _episode_line(archived, starts[g] + n, trajectory, names[n])
                start = prompt.size if np.array_equal(trajectory.token_ids[: prompt.size], prompt) else 0
                yield from picture.lines(trajectory.token_ids[start:], trajectory.versions[start:])


def _head(run: RunDir, archived: ArchivedStep, picture: _Picture) -> Iterator[str]:
    refs, version = archived.step.refs, archived.step.version
    tokens, generated = sum(ref.num_tokens for ref in refs), sum(sum(ref.generated) for ref in refs)
    yield (
        f"step {version.step} of {run.root.name} (attempt {version.epoch}): {len(refs)} groups, {count(tokens)} tokens,"
        f" {count(generated)} of them generated"
    )
    counts = _versions(archived)
    total = sum(counts.values())
    shares = [f"{picture.name(v)} {percent(times / total)}" for v, times in counts.items()]
    yield f"generated by version: {', '.join(shares) or MISSING}"


def _versions(archived: ArchivedStep) -> dict[int, int]:
    """Version -> tokens that it sampled, oldest first."""
    sampled = [t.versions[t.loss_mask] for group in archived.groups.values() for t in group.trajectories]
    versions, counts = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *sampled]), return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))


def _group_line(g: int, ref: GroupRef) -> str:
    rewards = ", ".join(number(reward) for reward in ref.rewards)
    return f"group {g}: prompt {escape(ref.prompt_id)} (position {ref.position}), rewards {rewards or MISSING}"


def _prompt(trajectories: Sequence[Trajectory]) -> NDArray[np.int32]:
    """The tokens of the first trajectory before the first that the run sampled."""
    if not trajectories:
        return np.zeros(0, dtype=np.int32)
    first = trajectories[0]
    return first.token_ids[: int(first.loss_mask.argmax()) if first.loss_mask.any() else first.token_ids.size]


def _names(episodes: Sequence[int]) -> list[str]:
    """What each trajectory of a group is called: its episode, and which turn of it where the episode left several."""
    total, turns, names = Counter(episodes), Counter[int](), []
    for episode in episodes:
        turns[episode] += 1
        turn = f", turn {turns[episode]} of {total[episode]}" if total[episode] > 1 else ""
        names.append(f"episode {episode}{turn}")
    return names


def _episode_line(archived: ArchivedStep, n: int, trajectory: Trajectory, name: str) -> str:
    return (
        f"  {name}: reward {number(trajectory.reward)}, "
        f"advantage {_known(archived.step.advantages[n])}, {trajectory.stop}, "
        f"{count(trajectory.num_generated)} tokens generated, log-prob gap {_gap(archived, n, trajectory)}"
    )


def _gap(archived: ArchivedStep, n: int, trajectory: Trajectory) -> str:
    """Mean of |proximal - behaviour| over generated tokens, in nats, where it is known."""
    proximal = archived.step.proximal.get(n)
    if proximal is None or trajectory.num_generated == 0:
        return MISSING
    return _known(float(np.abs(proximal - trajectory.logprobs)[trajectory.loss_mask].mean()))


def _known(value: float) -> str:
    return MISSING if np.isnan(value) else number(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """How tokens are shown."""

    text: Text
    colour: bool

    def name(self, version: int) -> str:
        """A version as the legend has it."""
        return f"{self._style(version)}v{version}{RESET}" if self.colour else f"[v{version}]"

    def _style(self, version: int) -> str:
        return DIM if version == NOT_SAMPLED else f"\x1b[{COLOURS[version % len(COLOURS)]}m"

    def lines(self, token_ids: NDArray[np.int32], versions: NDArray[Any]) -> list[str]:
        """The text of tokens [T] by versions [T], a line of text on each line."""
        lines = [MARGIN]
        for version, part in self._runs(token_ids, versions):
            first, *others = part.split("\n")
            mark = "" if self.colour or set(versions) == {NOT_SAMPLED} else self._mark(version)
            lines[-1] += mark + self._painted(first, version)
            lines += [MARGIN + self._painted(other, version) for other in others]
        if len(lines) > 1 and lines[-1] == MARGIN:  # the text ended with a line break
            lines.pop()
        return [line if line != MARGIN else MARGIN.rstrip() for line in lines]

    def _mark(self, version: int) -> str:
        return "[-]" if version == NOT_SAMPLED else f"[v{version}]"

    def _painted(self, text: str, version: int) -> str:
        safe = escape(text)
        return f"{self._style(version)}{safe}{RESET}" if self.colour and safe else safe

    def _runs(self, token_ids: NDArray[np.int32], versions: NDArray[Any]) -> Iterator[tuple[int, str]]:
        """(version, text) of neighbours with one version; a character split between two is shown in the second."""
        growing, shown = IncrementalText(self.text.decode), 0
        edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), versions.size]
        for start, end in pairwise(edges):
            ids = token_ids[start:end].tolist()
            certain = growing.extend(ids)
            whole = certain if end < versions.size else growing.whole
            if ids:
                yield int(versions[start]), whole[shown:]
            shown = len(whole)
