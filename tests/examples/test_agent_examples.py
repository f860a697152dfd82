"""The agents among the examples: they train nothing themselves, and work against the service unmodified."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dialogues import make_dialogue
from served import run, served

from areal_hpc.config.load import load
from areal_hpc.config.resolve import resolve
from areal_hpc.config.schema import AgentConfig
from areal_hpc.protocols import Episode
from areal_hpc.proxy.agent import AgentWorkflow, python_agent, shared_http_client
from areal_hpc.roles.wiring.agents import make_agent
from areal_hpc.roles.wiring.dotted import dotted
from areal_hpc.types import Prompt, Sampling

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("answers", "reward", "turns"),
    [
        ([r"\boxed{1 2}"], 1.0, 1),
        (["1 2", r"\boxed{1 2}"], 0.5, 2),
        ([r"\boxed{2 1}"], 0.0, 1),
        (["1 2", "1 2"], 0.0, 2),
    ],
)
def test_the_sort_agents_turns_are_one_trajectory_with_its_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: list[str], reward: float, turns: int
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "agents"))
    config = resolve(load([ROOT / "configs" / "quickstart.yaml", EXAMPLES / "agents" / "sort_agent.yaml"]))
    dialogue = make_dialogue(tmp_path, "hermes")
    prompt = Prompt(position=0, id="p", messages=({"role": "user", "content": "Sort 2 1"},), answer="1 2")

    async def score(text: str, prompt: Prompt) -> float:
        raise AssertionError("the agent gives the reward")

    async def scenario() -> None:
        async with served(dialogue, answers) as service, shared_http_client(60.0) as http_client:
            agent = python_agent(dotted(config.agent.python, "agent.python"), http_client)
            workflow = AgentWorkflow(agent, service.sessions, service.url, AgentConfig(), timeout_s=60.0)
            episode = Episode(
                id="e",
                generator=service.engine,
                renderer=dialogue,
                score=score,
                sampling=Sampling(max_new_tokens=32),
                max_tokens=config.model.max_tokens * 4,
            )
            (trajectory,) = await workflow.run(prompt, episode)
            assert trajectory.reward == reward
            assert trajectory.num_generated == sum(len(answer) + 1 for answer in answers)
            assert len(service.engine.requests) == turns

    run(scenario())
    assert callable(make_agent(config))


def test_the_shared_connections_outlive_an_episode(tmp_path: Path) -> None:
    import openai

    async def ask(url: str, key: str, http_client: Any) -> str:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=http_client)
        messages: Any = [{"role": "user", "content": "hi"}]
        return str((await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content)

    async def scenario() -> None:
        dialogue = make_dialogue(tmp_path, "hermes")
        async with served(dialogue, lambda _: "yes") as service, shared_http_client(60.0) as http_client:
            answers = [await ask(service.url, service.session.key, http_client) for _ in range(3)]
            together = await asyncio.gather(*(ask(service.url, service.session.key, http_client) for _ in range(20)))
            assert answers + together == ["yes"] * 23

    run(scenario())
