"""The house rules, read from the code: layers, doors, sizes, names."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "areal_hpc"
FILES = sorted(PACKAGE.rglob("*.py"))

GROUND = {
    "types",
    "watermark",
    "waits",
    "collective",
    "buckets",
    "transfer",
    "delta",
    "routing",
    "weight_files",
    "scorer",
    "protocols",
    "errors",
    "exits",
    "extras",
    "fs",
    "json_bytes",
    "run_dir",
    "keys",
    "mount",
    "patience",
    "privacy",
    "signing",
    "telemetry",
    "accelerator",
    "config",
    "dialogue",
    "algorithms",
    "pretrained",
}
WINGS = {
    "prompts",
    "rollout",
    "proxy",
    "generation",
    "buffer",
    "training",
    "weights",
    "checkpoint",
    "journal",
    "cluster",
    "tasks",
}
TOP = ("liveness", "report", "roles", "cli", "__main__")
"""From below: each may import those before it."""

DOORS = {
    "megatron": ("training/megatron/",),
    "flash_attn": ("training/megatron/kernels.py",),
    "submitit": ("cluster/executor.py", "cluster/submitted.py"),
    "h5py": ("buffer/archive.py",),
    "torch_npu": ("accelerator.py", "training/megatron/kernels.py"),
    "transformers": (
        "dialogue/renderer.py",
        "generation/embedded/",
        "training/reference.py",
        "tasks/tiny_model.py",
        "scorer.py",
    ),
    "llguidance": ("dialogue/grammar.py",),
    "aiohttp": (
        "generation/connection.py",
        "generation/embedded/",
        "generation/served/",
        "generation/vllm/",
        "proxy/",
    ),
    "openai": ("proxy/agent.py",),
    "orjson": ("json_bytes.py",),
    "mpi4py": ("cluster/rendezvous.py",),
    "msgpack": ("buffer/",),
    "datasets": ("prompts.py",),
    "pyarrow": ("prompts.py",),
    "math_verify": ("rollout/rewards.py",),
    "wandb": ("telemetry/trackers.py",),
    "tensorboard": ("telemetry/trackers.py",),
    "matplotlib": ("report/curves.py",),
    "rich": ("report/",),
    "sglang": (  # imported by SGLang itself, in an environment of its own
        "generation/sglang/cpu_platform.py",
        "generation/sglang/hooks.py",
        "generation/sglang/joining.py",
        "generation/sglang/staging.py",
    ),
    "vllm": ("generation/vllm/",),  # what runs in vLLM's own environment
}
NEVER = {"ray"}
TORCHLESS = {
    "types",
    "routing",
    "waits",
    "protocols",
    "errors",
    "exits",
    "extras",
    "fs",
    "run_dir",
    "keys",
    "mount",
    "patience",
    "privacy",
    "config",
    "telemetry",
    "liveness",
    "report",
    "buffer",
    "prompts",
    "cluster",
    "journal",
    "cli",
    "__main__",
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module and whether the import runs when the file is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or "", id(node) not in late
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in late


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_imports_sideways_or_up(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "areal_hpc" or len(parts) == 1 or parts[1] == "__version__":
            continue
        there = parts[1]
        if here in GROUND:
            assert there in GROUND, f"ground {here} imports {there}"
        elif here in WINGS:
            assert there == here or there in GROUND, f"wing {here} imports {there}"
        else:
            assert here in TOP, f"{here} is in no layer"
            assert there not in TOP[TOP.index(here) + 1 :], f"{here} imports {there} above it"


def test_no_circle_of_imports_even_where_some_are_late() -> None:
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    graph = {name: {module for module, _ in imports(path) if module in names} for name, path in names.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert order.index("areal_hpc.types") < order.index("areal_hpc.training.loop")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_giant_has_one_door(path: Path) -> None:
    where = str(path.relative_to(PACKAGE))
    for module, _ in imports(path):
        giant = module.split(".")[0]
        assert giant not in NEVER, f"{where} imports {giant}"
        if giant in DOORS:
            assert where.startswith(DOORS[giant]), f"{where} imports {giant}; its door is {DOORS[giant]}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torchless_rooms_import_no_torch(path: Path) -> None:
    if room(path) in TORCHLESS:
        assert not [m for m, at_once in imports(path) if at_once and m.split(".")[0] in ("torch", "transformers")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} is longer than 60 lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_file_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert path.stem not in {"utils", "util", "common", "helpers", "misc", "manager", "base", "core"}


def test_J17_nothing_is_shut_down_by_a_finaliser() -> None:
    """It runs wherever garbage is collected, in the middle of an event loop too, and must not wait for anything."""
    for path in FILES:
        assert not {module for module, _ in imports(path)} & {"atexit", "weakref.finalize"}, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.FunctionDef) and node.name == "__del__"), path


def test_K6_no_device_is_named_outside_the_accelerator() -> None:
    """K6: a CUDA-only call outside the device layer breaks every other device."""
    for path in FILES:
        if path.name in ("accelerator.py", "compat.py"):  # compat.py answers what megatron asks of a device
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            attribute = node.attr if isinstance(node, ast.Attribute) else ""
            assert attribute not in {"cuda", "npu"}, f"{path} names a device"
            text = node.value if isinstance(node, ast.Constant) else ""
            assert not re.fullmatch(r"(cuda|npu):\d+|cuda|nccl|hccl", str(text)), f"{path} names a device: {text}"


@pytest.mark.parametrize(
    "module",
    [
        *("areal_hpc.types", "areal_hpc.protocols", "areal_hpc.fs", "areal_hpc.config.schema", "areal_hpc.cli"),
        *("areal_hpc.roles.launcher", "areal_hpc.roles.wiring.preflight", "areal_hpc.roles.rollout"),
        *("areal_hpc.roles.evaluator", "areal_hpc.cluster.agent", "areal_hpc.roles.submission"),
    ],
)
def test_processes_that_do_not_compute_load_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
