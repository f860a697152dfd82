"""The clients that CI affords, unmodified from their registries, in this process; all are in ``tests/clients``."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from clients.cases import CASES, EXAMPLES, Case
from clients.exchange import exchange, faults
from clients.nightly import install_line
from dialogues import make_dialogue

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.proxy.agent import python_agent, shared_http_client

AFFORDED = ("openai", "anthropic", "openai_agents", "pydantic_ai")
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return make_dialogue(tmp_path_factory.mktemp("hermes"), "hermes")


@pytest.fixture(scope="module")
def agents() -> dict[str, Any]:
    """The module of each example."""
    found = {}
    for client in AFFORDED:
        spec = importlib.util.spec_from_file_location(f"{client}_example", EXAMPLES / client / "calculator_agent.py")
        assert spec is not None and spec.loader is not None
        found[client] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[client])
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case.client in AFFORDED], ids=lambda case: case.name)
def test_what_a_client_samples_is_what_is_trained(case: Case, dialogue: ChatRenderer, agents: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with shared_http_client(LIMIT_S) as http_client:
            agent = python_agent(lambda: agents[case.client].CalculatorAgent(**case.args), http_client)
            one = await exchange(case, dialogue, agent)
        assert list(faults(one, case, dialogue)) == []
        assert one.drifts["fork"] == 0 and len(one.trajectories) == 1

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


def test_what_is_not_as_it_should_be_is_told(dialogue: ChatRenderer, agents: dict[str, Any]) -> None:
    """A client that makes the model say one thing more, and one whose tool is never run."""
    guessing = Case(client="openai", answers=("It is 1702.",))
    silent = Case(client="openai", answers=("It is 1.", "never said"))

    async def told(case: Case) -> list[str]:
        agent = python_agent(agents["openai"].CalculatorAgent)
        return list(faults(await exchange(case, dialogue, agent), case, dialogue))

    assert asyncio.run(told(guessing)) == ["the result of the tool did not reach the model"]
    assert asyncio.run(told(silent)) == [
        "asked 1 times instead of 2",
        "the result of the tool did not reach the model",
        "rewards [0.0]",
    ]


@pytest.mark.parametrize("client", sorted({case.client for case in CASES}))
def test_every_example_says_how_its_client_is_installed(client: str) -> None:
    tool, verb, *packages = install_line(client)
    assert (tool, verb) in (("pip", "install"), ("npm", "install")) and packages


def test_the_examples_layer_resolves_over_the_quickstart() -> None:
    config = resolve(load([EXAMPLES.parents[1] / "configs" / "quickstart.yaml", EXAMPLES / "calculator.yaml"]))
    assert config.agent.python == "calculator_agent:CalculatorAgent"


def test_no_directory_of_an_example_is_without_a_case() -> None:
    directories = {path.parent.name for path in Path(EXAMPLES).glob("*/calculator_agent.*")}
    assert directories == {case.client for case in CASES}
