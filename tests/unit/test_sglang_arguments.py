"""What SGLang's server is started with, in words and in its environment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sglang_spec import KEY, LORA, SPEC

from areal_hpc.accelerator import CPU, CUDA
from areal_hpc.generation.external.process import LAUNCHER
from areal_hpc.generation.external.spec import ServerSpec, argument
from areal_hpc.generation.sglang import plugin
from areal_hpc.generation.sglang.arguments import server_arguments, server_environment, weights_environment


def given_values(**fields: Any) -> dict[str, str]:
    """The arguments by name, of several the last, as argparse reads them."""
    values = {name: getattr(SPEC, name) for name in SPEC.__slots__} | fields
    words = server_arguments(ServerSpec(**values), port=1, internal_port=2)
    options = [k for k, word in enumerate(words) if word.startswith("--")]
    return {words[a]: " ".join(words[a + 1 : b]) for a, b in zip(options, [*options[1:], len(words)], strict=True)}


def test_the_servers_own_limits_leave_room_for_the_longest_sequence() -> None:
    values = given_values()
    assert int(values["--context-length"]) > 100
    assert int(values["--max-total-tokens"]) >= 4 * int(values["--context-length"])


def test_memory_is_bounded_on_a_cpu_only() -> None:
    assert "--max-total-tokens" not in given_values(accelerator=CUDA)
    assert given_values(accelerator=CUDA)["--device"] == "cuda"


@pytest.mark.parametrize("name", ["mem_fraction_static", "mem-fraction-static", "--mem-fraction-static"])
def test_a_persons_argument_wins_however_its_name_is_written(name: str) -> None:
    assert given_values(extra={name: 0.5})["--mem-fraction-static"] == "0.5"


def test_false_takes_one_of_our_flags_away() -> None:
    assert "--disable-overlap-schedule" in given_values()
    assert "--disable-overlap-schedule" not in given_values(extra={"disable_overlap_schedule": False})


@pytest.mark.parametrize(("policy", "ordered"), [(None, True), ("lof", True), ("lpm", False)])
def test_its_queue_is_ordered_by_who_yields_unless_a_person_has_chosen_an_order_that_knows_none(
    policy: str | None, ordered: bool
) -> None:
    made = given_values(extra={} if policy is None else {"--schedule-policy": policy})
    assert ("--enable-priority-scheduling" in made) == ordered
    assert ("--schedule-low-priority-values-first" in made) == ordered


def test_experts_are_recorded_only_where_they_are_replayed() -> None:
    assert "--enable-return-routed-experts" not in given_values()
    assert given_values(tells_experts=True)["--enable-return-routed-experts"] == ""


def test_arguments_become_words() -> None:
    assert argument("enable_metrics", True) == ["--enable-metrics"]
    assert argument("lora_paths", ["a", "b"]) == ["--lora-paths", "a", "b"]
    assert argument("json_model_override_args", {"a": 1}) == ["--json-model-override-args", '{"a": 1}']
    assert argument("quantization", None) == []


ADAPTERS = {"rank": 4, "alpha": 32.0, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, {"stages": True, "keeps": False, "adapters": None}),
        ({"accelerator": CUDA}, {"stages": False}),
        ({"accelerator": CUDA, "keeps_weights": True}, {"stages": True, "keeps": True, "adapters": None}),
        (
            {"accelerator": CUDA, "lora": LORA},
            {
                "stages": True,
                "keeps": False,
                "adapters": {"model_path": "/m", "dtype": "float32", "lora": ADAPTERS},
            },
        ),
    ],
)
def test_new_weights_are_put_beside_the_old_on_cpus_and_where_a_copy_is_kept_anyway(
    changes: dict[str, Any], told: dict[str, Any]
) -> None:
    spec = replace(SPEC, update_timeout_s=7.0, **changes)
    assert json.loads(weights_environment(spec)[plugin.ORDER]) == {"limit_s": 7.0, **told}
    staged = json.loads(weights_environment(replace(spec, pipeline_parallel=2))[plugin.ORDER])
    assert staged == {"limit_s": 7.0, "stages": False}, "stages have no vote together"


def test_the_key_is_in_no_text_of_the_spec() -> None:
    assert KEY not in repr(SPEC)


def test_the_environment_keeps_devices_and_loses_what_is_another_pythons() -> None:
    kept = {"CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "2"}
    lost = {"PYTHONPATH": "/x", "HTTP_PROXY": "p", "https_proxy": "p", plugin.SELECTED_BY: "other"}
    made = server_environment(kept | lost, CUDA, Path("/t"))
    assert kept.items() <= made.items()
    assert not made.keys() & lost.keys()


@pytest.mark.parametrize(("ours", "theirs"), [({}, "-2"), ({"NCCL_CUMEM_ENABLE": "0"}, "0")])
def test_ranks_of_a_weight_group_get_their_memory_in_one_way(ours: dict[str, str], theirs: str) -> None:
    """NCCL's default is -2, by its cudawrap.cc. SGLang sets 0, except where the variable is set: by its own source."""
    made = server_environment(ours, CUDA, Path("/t"))
    assert made["NCCL_CUMEM_ENABLE"] == theirs
    assert "NCCL_CUMEM_ENABLE" not in server_environment({}, CPU, Path("/t"))


def test_the_cpu_platform_is_for_those_who_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.SELECTED_BY, raising=False)
    assert plugin.activate() is None
    monkeypatch.setenv(plugin.SELECTED_BY, server_environment({}, CPU, Path("/t"))[plugin.SELECTED_BY])
    made = plugin.activate()
    assert made is not None
    module, _, name = made.rpartition(".")
    assert f"class {name}(" in (LAUNCHER.parents[3] / (module.replace(".", "/") + ".py")).read_text()
    assert plugin.activate() == made  # a second declaration of its operators is none
