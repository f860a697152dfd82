"""Who learns what, and how it bears old answers: every file of ``configs/algorithms`` for the quickstart's length.

    PYTHONPATH=.:tests:tests/benchmarks python tests/benchmarks/algorithms.py [--seeds 1 2 3] [--only grpo] [--cells N]

A cell is one run of the command line: a file, a bound on staleness and a seed. Every file runs at the quickstart's
bound; ``SWEPT`` run at each of ``BOUNDS`` as well. The model of a seed is made once; so is its teacher, which is what
the quickstart itself has trained. Each finished cell is a line of ``algorithms.jsonl``, and a cell
that has one is not run again: break it off and start it again as you like, and remove the file to begin anew. At the
end, and with ``--cells 0`` at once, all lines become ``algorithms.md`` and ``algorithms.png``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from machine import describe

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__)
FILES = ROOT / "configs" / "algorithms"
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
USUAL_BOUND = 2
BOUNDS = (0, 1, 4, 8, 16, 32)
SWEPT = ("grpo", "grpo_coupled", "ppo")
"""Decoupled, clipped around the behaviour policy (plain PPO without a critic), and decoupled with a critic."""
RUN_LIMIT_S = 1800.0
COLOURS = ("#0072B2", "#D55E00", "#009E73")


class Cell(NamedTuple):
    file: str
    bound: int
    seed: int


def cells(seeds: Sequence[int], only: Sequence[str]) -> Iterator[Cell]:
    """All that is to run: first each file, then the sweeps."""
    names = [path.stem for path in sorted(FILES.glob("*.yaml")) if not only or path.stem in only]
    yield from (Cell(name, USUAL_BOUND, seed) for name in names for seed in seeds)
    swept = [name for name in SWEPT if name in names]
    yield from (Cell(name, bound, seed) for name in swept for bound in BOUNDS for seed in seeds)


def is_whole(file: str) -> bool:
    """Whether the file is a configuration by itself, as the offline ones are, and not a layer over the quickstart."""
    return "trainer" in yaml.safe_load((FILES / f"{file}.yaml").read_text(encoding="utf-8"))


def areal_hpc(*words: str | Path) -> None:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; its last lines are in the message.
    """
    line = [sys.executable, "-m", "areal_hpc", *map(str, words)]
    told = subprocess.run(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_LIMIT_S, check=False
    )
    if told.returncode != 0:
        last = "\n".join(told.stdout.splitlines()[-15:])
        raise RuntimeError(f"{' '.join(map(str, words))}: exit code {told.returncode}\n{last}")


def model_of(seed: int, root: Path) -> str:
    return f"model.path={root}/model-{seed}"


def teacher(seed: int, root: Path) -> Path:
    """What the quickstart has trained with the same seed: a seed's model has a vocabulary of its own."""
    directory = root / f"teacher-model-{seed}"
    if not directory.exists():
        name = f"teacher-{seed}"
        areal_hpc("run", QUICKSTART, f"name={name}", f"run_root={root}", f"seed={seed}", model_of(seed, root))
        areal_hpc("export", root / name, directory)
    return directory


def run(cell: Cell, root: Path) -> dict[str, Any]:
    """One run; its line."""
    name = f"{cell.file}-{cell.bound}-{cell.seed}"
    words = [f"name={name}", f"run_root={root}", f"seed={cell.seed}", model_of(cell.seed, root)]
    layers = [FILES / f"{cell.file}.yaml"]
    if not is_whole(cell.file):
        layers.insert(0, QUICKSTART)
        words.append(f"buffer.max_staleness={cell.bound}")
    if cell.file == "distillation":
        words.append(f"algorithm.kl.reference={teacher(cell.seed, root)}")
    areal_hpc("run", *layers, *words)
    facts = json.loads((root / name / "summary.json").read_text(encoding="utf-8"))
    told = ("evaluation_first", "evaluation_last", "evaluation_best", "evaluation_accuracy_last", "staleness_mean")
    more = ("kept_fraction_mean", "clip_fraction_mean", "logprob_gap_mean", "seconds", "reward_last")
    curve = {str(one["step"]): one.get("reward_mean", one.get("loss")) for one in facts["evaluations"]}
    measured = "loss" if is_whole(cell.file) else "reward"
    return {**cell._asdict(), "measured": measured, **{key: facts[key] for key in (*told, *more)}, "curve": curve}


def lines() -> list[dict[str, Any]]:
    path = HERE.with_suffix(".jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def mean_and_spread(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def grouped(found: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in found:
        groups.setdefault((line["file"], line["bound"]), []).append(line)
    return groups


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Mean and standard deviation over seeds, best first; then the sweeps."""
    groups = grouped(found)
    usual = {file: rows for (file, bound), rows in groups.items() if bound == USUAL_BOUND}
    order = sorted(usual, key=lambda f: (usual[f][0]["measured"], -statistics.fmean(_lasts(usual[f]))))
    head = "| file | seeds | measured | first | last | tokens kept | seconds |\n|---|---|---|---|---|---|---|"
    out = ["# Every algorithm for the quickstart's length", "", head]
    for file in order:
        rows = usual[file]
        kept = [row["kept_fraction_mean"] for row in rows if row["kept_fraction_mean"] is not None]
        out.append(
            f"| `{file}` | {len(rows)} | {rows[0]['measured']} "
            f"| {mean_and_spread([row['evaluation_first'] for row in rows])} | {mean_and_spread(_lasts(rows))} "
            f"| {mean_and_spread(kept) if kept else ''} | {statistics.fmean(row['seconds'] for row in rows):.0f} |"
        )
    bounds = sorted({bound for _, bound in groups})
    out += ["", "## Last evaluation by bound on staleness", ""]
    out += ["| file | " + " | ".join(map(str, bounds)) + " |", "|---|" + "---|" * len(bounds)]
    for file in (name for name in SWEPT if any(file == name for file, _ in groups)):
        of_bounds = [mean_and_spread(_lasts(groups[file, b])) if (file, b) in groups else "" for b in bounds]
        out.append(f"| `{file}` | " + " | ".join(of_bounds) + " |")
    machine = describe()
    out += ["", f"{machine['date']}, {machine['cores']} cores of {machine['processor']}.", ""]
    return "\n".join(out)


def _lasts(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row["evaluation_last"] for row in rows]


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Each file's last evaluation with its seeds, and the sweeps over the bound."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = grouped([line for line in found if line["measured"] == "reward"])
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    usual = {file: _lasts(rows) for (file, bound), rows in groups.items() if bound == USUAL_BOUND}
    order = sorted(usual, key=lambda file: statistics.fmean(usual[file]))
    for place, file in enumerate(order):
        left.plot([place] * len(usual[file]), usual[file], "o", color=COLOURS[0], alpha=0.7, markersize=4)
    left.set_xticks(range(len(order)), order, rotation=75, ha="right", fontsize=8)
    left.set_title(f"Each algorithm, staleness at most {USUAL_BOUND}", fontsize=10)
    left.set_ylabel("last evaluation reward")
    for colour, file in zip(COLOURS, SWEPT, strict=True):
        bounds = sorted(bound for name, bound in groups if name == file)
        values = [_lasts(groups[file, bound]) for bound in bounds]
        for bound, of_seeds in zip(bounds, values, strict=True):
            right.plot([bound] * len(of_seeds), of_seeds, "o", color=colour, alpha=0.5, markersize=4)
        right.plot(bounds, [statistics.fmean(of_seeds) for of_seeds in values], color=colour, label=file)
    right.set_xlabel("buffer.max_staleness")
    right.set_title("Older answers", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="these files, without .yaml")
    parser.add_argument("--cells", type=int, default=None, metavar="N", help="stop after so many new cells")
    options = parser.parse_args()
    done = {Cell(line["file"], line["bound"], line["seed"]) for line in lines()}
    due = [cell for cell in cells(options.seeds, options.only) if cell not in done][: options.cells]
    with tempfile.TemporaryDirectory(prefix="areal-algorithms-") as root:
        for number, cell in enumerate(due, start=1):
            line = run(cell, Path(root))
            with HERE.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "machine": describe()}) + "\n")
            print(
                f"{number}/{len(due)} {cell}: {line['evaluation_first']:.3f} to {line['evaluation_last']:.3f}",
                flush=True,
            )
    if found := lines():
        text = table(found)
        HERE.with_suffix(".md").write_text(text, encoding="utf-8")
        draw(found, HERE.with_suffix(".png"))
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
