"""Whether an environment that SGLang is installed in can serve a run, found out before the run exists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.errors import ConfigError
from areal_hpc.roles.wiring import servers as wiring

QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize(("has_plugins", "told"), [(True, "True True"), (False, "True False")])
def test_an_sglang_without_an_interface_for_plugins_takes_no_changes(
    tmp_path: Path, has_plugins: bool, told: str
) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('this takes seconds, and is not needed')")
    if has_plugins:
        (tmp_path / "sglang" / "srt" / "plugins").mkdir()
    points = {"sglang": "", "ours": ""}
    points["ours"] = "[sglang.srt.platforms]\nareal_cpu = a:b\n[sglang.srt.plugins]\nareal_hpc = a:b\n"
    for name, text in points.items():
        about = tmp_path / f"{name}-0.5.21.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.5.21\n")
        (about / "entry_points.txt").write_text(text)
    program = [sys.executable, "-c", wiring.FINDS_SGLANG]
    found = subprocess.run(program, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0.5.21", *told.split()]


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (None, "cannot be run"),
        ("echo No module named sglang >&2; exit 1", r"has no SGLang \(No module named sglang\)"),
        (
            "echo 0.5.21 False False",
            "SGLang 0.5.21 of .* cannot run on a CPU or take changes alone .* or take adapters alone .* without",
        ),
        (
            "echo 0.5.21 True False",
            "SGLang 0.5.21 of .* cannot take changes alone .weights.delta. or take adapters alone .model.lora. without",
        ),
        ("echo 0.5.21 True True", ""),
    ],
)
def test_an_environment_that_cannot_serve_is_refused_at_once(
    tmp_path: Path, program: str | None, complaint: str
) -> None:
    python = tmp_path / "python"
    if program is not None:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o700)
    words = ["cluster.shape=local", "generation.backend=sglang", f"generation.python={python}"]
    config = load([QUICKSTART], [*words, "weights.delta=true", "model.lora.rank=4"])
    if not complaint:
        wiring.check_server(config)
        return
    with pytest.raises(ConfigError, match=rf"generation\.python: .*{complaint}(.|\n)*examples/sglang_environment"):
        wiring.check_server(config)


def brings_nccl(place: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment gets the package of that name."""
    about = place / f"nvidia_nccl_cu13-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(place))


@pytest.mark.parametrize(
    ("theirs", "more", "refused"),
    [
        ("echo NCCL 2.28.9", [], True),
        ("echo NCCL 2.28.9", ["weights.transport=disk"], False),
        ("echo NCCL 2.29.7", [], False),
        ("true", [], False),
    ],
)
def test_engines_whose_nccl_would_refuse_the_trainers_are_refused_before_they_have_loaded_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, more: list[str], refused: bool
) -> None:
    """NCCL's own init.cc: "Mismatched NCCL version detected", and ncclInvalidUsage."""
    brings_nccl(tmp_path, "2.29.7", monkeypatch)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho 0.5.21 True True\n{theirs}\n")
    python.chmod(0o700)
    words = ["cluster.shape=local", "generation.backend=sglang", f"generation.python={python}"]
    config = load([QUICKSTART], [*words, *more])
    if not refused:
        wiring.check_server(config)
        return
    with pytest.raises(ConfigError, match=r"has NCCL 2\.28\.9, and the trainer's .* has 2\.29\.7; .*transport=disk"):
        wiring.check_server(config)


def test_an_interpreter_that_does_not_answer_is_a_mistake_of_the_configuration_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wiring, "FIND_LIMIT_S", 0.2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    config = load([QUICKSTART], ["cluster.shape=local", "generation.backend=sglang", f"generation.python={python}"])
    with pytest.raises(ConfigError, match=rf"generation\.python: {python} has not said in 0.2 s(.|\n)*try again"):
        wiring.check_server(config)


def test_arguments_that_the_run_gives_itself_are_refused_by_their_names() -> None:
    words = [
        "generation.backend=sglang",
        "generation.server_args={api-key: x, port: 1, enable-metrics: false, mem_fraction_static: 0.5}",
    ]
    with pytest.raises(ConfigError) as refusal:
        resolve(load([QUICKSTART], words))
    assert "generation.server_args.api-key: remove it" in str(refusal.value)
    assert "generation.server_args.port: remove it" in str(refusal.value)
    assert "generation.server_args.enable-metrics: remove it" in str(refusal.value)
    assert "mem_fraction_static" not in str(refusal.value)


def test_copies_of_a_model_in_one_engine_share_its_devices_or_are_refused() -> None:
    words = ["generation.backend=sglang", "generation.tensor_parallel=2", "cluster.shape=local"]
    with pytest.raises(ConfigError, match=r"server_args\.dp-size: whole copies .* set generation\.replicas instead"):
        resolve(load([QUICKSTART], [*words, "generation.server_args={dp-size: 2}"]))
    resolve(load([QUICKSTART], [*words, "generation.server_args={dp-size: 2, enable-dp-attention: true}"]))
