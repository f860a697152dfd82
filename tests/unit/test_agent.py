"""Agents as a workflow: classes and commands, good and bad ones."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from served import Served, run, served

from areal_hpc.config.schema import AgentConfig, Config, ModelConfig, PromptsConfig, RolloutConfig, TrainerConfig
from areal_hpc.dialogue.renderer import ChatRenderer
from areal_hpc.errors import AgentError, ConfigError
from areal_hpc.protocols import Episode
from areal_hpc.proxy.agent import (
    Agent,
    AgentWorkflow,
    Task,
    command_agent,
    environment,
    python_agent,
    shared_http_client,
)
from areal_hpc.roles.wiring.agents import make_agent
from areal_hpc.rollout.episodes import SAMPLE_FAILURES
from areal_hpc.types import GenerationRequest, Prompt, Sampling, Trajectory
from areal_hpc.waits import AGENT, open_waits

PROMPT = Prompt(position=3, id="p3", messages=({"role": "user", "content": "hi"},), answer="yes", metadata={"level": 2})
CURL = """
import json, os, sys, urllib.request
data = json.load(sys.stdin)
def post(url, body):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key)))
answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": data["messages"]})
"""


async def ask(base_url: str, api_key: str, *contents: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    async with (
        aiohttp.ClientSession(headers={"x-api-key": api_key}) as http,
        http.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer,
    ):
        return str((await answer.json())["choices"][0]["message"]["content"])


class Asking:
    """Asks once and returns what the test wants."""

    def __init__(self, reward: Any = 1.0, error: Exception | None = None) -> None:
        self.reward, self.error = reward, error
        self.seen: list[Mapping[str, Any]] = []

    async def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> Any:
        self.seen.append(data)
        await ask(base_url, api_key, *(m["content"] for m in data["messages"]))
        if self.error is not None:
            raise self.error
        return self.reward


def attempt(
    hermes: ChatRenderer, agent: Agent, check: Callable[[Served, Awaitable[Any]], Awaitable[None]], **options: Any
) -> None:
    """Run one episode; ``check`` awaits its trajectories. Whatever happens, its session is closed."""

    async def score(text: str, prompt: Prompt) -> float:
        return 0.25 if text == prompt.answer else 0.0

    async def scenario() -> None:
        async with served(hermes, options.pop("script", lambda _: "yes")) as service:
            service.sessions.close(service.session)
            workflow = AgentWorkflow(agent, service.sessions, service.url, AgentConfig(**options), timeout_s=60.0)
            episode = Episode(
                id="e", generator=service.engine, renderer=hermes, score=score,
                sampling=Sampling(max_new_tokens=64, seed=1), max_tokens=512,
            )  # fmt: skip
            await check(service, workflow.run(PROMPT, episode))
            assert len(service.sessions) == 0

    run(scenario())


def rewards(hermes: ChatRenderer, agent: Agent, **options: Any) -> list[float]:
    found: list[Trajectory] = []

    async def check(_: Served, running: Awaitable[Any]) -> None:
        found.extend(await running)

    attempt(hermes, agent, check, **options)
    return [trajectory.reward for trajectory in found]


def failure(hermes: ChatRenderer, agent: Agent, **options: Any) -> str:
    said: list[str] = []

    async def check(_: Served, running: Awaitable[Any]) -> None:
        with pytest.raises(AgentError) as caught:
            await running
        said.append(str(caught.value))

    attempt(hermes, agent, check, **options)
    return said[0]


def test_a_class_gets_the_prompt_as_data_and_its_answer_is_the_reward(hermes: ChatRenderer) -> None:
    agent = Asking(reward=0.75)
    assert rewards(hermes, python_agent(lambda: agent)) == [0.75]
    assert agent.seen == [{"id": "p3", "messages": [{"role": "user", "content": "hi"}], "answer": "yes", "level": 2}]


def test_without_a_reward_of_the_agent_the_configured_one_scores_its_last_answer(hermes: ChatRenderer) -> None:
    assert rewards(hermes, python_agent(lambda: Asking(reward=None))) == [0.25]


def test_an_agent_that_is_no_coroutine_runs_in_a_thread(hermes: ChatRenderer) -> None:
    class Blocking:
        def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
            asyncio.run(ask(base_url, api_key, "hi"))
            return 0.5

    assert rewards(hermes, python_agent(Blocking)) == [0.5]


def test_who_waits_is_told_by_whose_turn_it_is(hermes: ChatRenderer) -> None:
    """While the model is asked, its engine is waited for, and the wait for the agent would hide that."""
    seen: list[list[tuple[str, ...]]] = []

    def look() -> None:
        seen.append([wait.parties for wait in open_waits()])

    class Looking(Asking):
        async def run(self, data: Any, **words: Any) -> Any:
            look()
            await super().run(data, **words)
            look()
            return 1.0

    def script(_: GenerationRequest) -> str:
        look()
        return "yes"

    assert rewards(hermes, python_agent(Looking), script=script) == [1.0]
    look()
    assert seen == [[(AGENT,)], [], [(AGENT,)], []]


def test_parallel_branches_of_one_episode_share_its_reward(hermes: ChatRenderer) -> None:
    class Parallel:
        async def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
            await asyncio.gather(*(ask(base_url, api_key, f"part {n}") for n in range(3)))
            return 1.0

    assert rewards(hermes, python_agent(Parallel)) == [1.0] * 3


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (Asking(error=KeyError("tool")), "the agent raised KeyError: 'tool'"),
        (Asking(reward="good"), "returned 'good' where a reward was expected"),
        (Asking(reward=float("nan")), "returned nan where"),
    ],
)
def test_what_an_agent_does_wrong_fails_the_sample_and_says_why(
    hermes: ChatRenderer, agent: Asking, message: str
) -> None:
    assert message in failure(hermes, python_agent(lambda: agent))
    assert AgentError in SAMPLE_FAILURES


def test_H14_an_agent_that_asks_nothing_is_a_failed_sample(hermes: ChatRenderer) -> None:
    class Silent:
        async def run(self, data: Any, **_: Any) -> float:
            return 1.0

    assert "asked for no completion" in failure(hermes, python_agent(Silent))


def test_no_client_gives_up_before_the_episode_does() -> None:
    import openai

    async def scenario() -> None:
        async with shared_http_client(77.0) as http_client:
            timeout = openai.AsyncOpenAI(api_key="k", http_client=http_client).timeout
            assert isinstance(timeout, openai.Timeout)
            assert (timeout.connect, timeout.pool, timeout.read, timeout.write) == (77.0,) * 4

    run(scenario())


def test_hundreds_of_episodes_may_connect_while_the_service_is_busy(hermes: ChatRenderer) -> None:
    async def scenario() -> None:
        async with served(hermes, []) as service:
            address = urlsplit(service.url)
            assert address.hostname is not None and address.port is not None
            with ExitStack() as connections:  # the event loop takes none of them meanwhile
                for _ in range(600):
                    one = socket.create_connection((address.hostname, address.port), timeout=10.0)
                    connections.enter_context(one)

    run(scenario())


def test_F13_an_agent_that_fails_before_its_first_question_is_told_of_by_its_own_error(hermes: ChatRenderer) -> None:
    class Broken:
        async def run(self, data: Any, **_: Any) -> float:
            raise FileNotFoundError("no tools.json")

    assert failure(hermes, python_agent(Broken)) == "the agent raised FileNotFoundError: no tools.json"
    code = "raise SystemExit('no tools.json')"
    assert failure(hermes, command_agent([sys.executable, "-c", code], ())).endswith("its last words: no tools.json")


def test_I17_what_an_agent_prints_is_neither_its_reward_nor_its_end(hermes: ChatRenderer) -> None:
    forged = 'print("EXIT_CODE: 0", json.dumps({"reward": 1.0}), flush=True)\n'
    assert rewards(hermes, command_agent([sys.executable, "-c", CURL + forged], ()), script=lambda _: "no") == [0.0]
    failed = failure(hermes, command_agent([sys.executable, "-c", CURL + forged + "sys.exit(3)"], ()))
    assert "ended with exit code 3" in failed


def test_I18_a_tool_that_raises_in_the_agent_is_no_success(hermes: ChatRenderer) -> None:
    class Dividing:
        async def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
            await ask(base_url, api_key, "1 / 0?")
            return 1 / 0

    assert failure(hermes, python_agent(Dividing)) == "the agent raised ZeroDivisionError: division by zero"
    told = failure(hermes, command_agent([sys.executable, "-c", CURL + "1 / 0"], ()))
    assert "ended with exit code 1" in told and "ZeroDivisionError: division by zero" in told


def test_an_agent_out_of_turns_is_told_so(hermes: ChatRenderer) -> None:
    class Endless:
        async def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
            while True:
                await ask(base_url, api_key, "again")

    assert "KeyError: 'choices'" in failure(hermes, python_agent(Endless), max_turns=3)


def test_a_command_gets_its_data_on_standard_input_and_rewards_over_http(hermes: ChatRenderer) -> None:
    code = CURL + 'post(os.environ["AREAL_SERVICE_URL"] + "/rl/set_reward", {"reward": len(data["answer"])})'
    assert rewards(hermes, command_agent([sys.executable, "-c", code], ())) == [3.0]
    assert rewards(hermes, command_agent([sys.executable, "-c", CURL], ())) == [0.25]


def test_a_command_that_prints_without_end_and_reads_nothing_costs_no_memory() -> None:
    code = "import sys\nfor _ in range(300): sys.stdout.write('x' * 100_000)\nsys.exit('no luck')"
    task = Task(data={"much": "y" * 2_000_000}, url="http://127.0.0.1:1", key="k")
    tracemalloc.start()
    try:
        with pytest.raises(AgentError, match=r"ended with exit code 1; its last words: x{1900,}no luck$") as caught:
            asyncio.run(command_agent([sys.executable, "-c", code], ())(task))
        assert len(str(caught.value)) < 3000
        assert tracemalloc.get_traced_memory()[1] < 12_000_000, "the prompt on its way, and not the 30 MB of output"
    finally:
        tracemalloc.stop()


def test_a_command_that_fails_says_its_last_words(hermes: ChatRenderer) -> None:
    code = CURL + "sys.exit('no luck')"
    told = failure(hermes, command_agent([sys.executable, "-c", code], ()))
    assert "ended with exit code 1" in told and "no luck" in told
    assert "FileNotFoundError" in failure(hermes, command_agent(["/no/such/program"], ()))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ({"python": "test_agent:Asking", "args": {"no_such": 1}}, "cannot be made.*no_such.*`agent.args`"),
        ({"python": "pathlib:Path"}, "has no method `run`"),
        ({"python": "no_such_module:Agent"}, "agent.python = 'no_such_module:Agent' cannot be imported"),
        ({"command": ("no-such-program", "x")}, "there is no program 'no-such-program'"),
    ],
)
def test_an_agent_that_cannot_start_is_told_before_the_run_begins(
    monkeypatch: pytest.MonkeyPatch, agent: dict[str, Any], message: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    config = Config(
        name="x",
        model=ModelConfig(path="m"),
        prompts=PromptsConfig(train="t"),
        rollout=RolloutConfig(reward="m:f"),
        trainer=TrainerConfig(total_steps=1),
        agent=AgentConfig(**agent),
    )
    with pytest.raises(ConfigError, match=message):
        make_agent(config)


def test_H12_a_command_sees_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("MY_SETTING", "x")
    seen = environment(Task(data={}, url="http://127.0.0.1:1", key="sk-1"), ["MY_SETTING", "NOT_SET"])
    assert "secret" not in seen.values() and seen["MY_SETTING"] == "x" and "NOT_SET" not in seen
    assert (seen["OPENAI_BASE_URL"], seen["ANTHROPIC_BASE_URL"]) == ("http://127.0.0.1:1/v1", "http://127.0.0.1:1")
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == "sk-1"


def test_a_cancelled_command_is_killed_with_all_that_it_started(hermes: ChatRenderer, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(pids)!r} + '.new').write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.replace({str(pids)!r} + '.new', {str(pids)!r})\n"
        "time.sleep(600)"
    )

    async def check(_: Served, running: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(running)
        while not pids.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    attempt(hermes, command_agent([sys.executable, "-c", code], ()), check)
    deadline = time.monotonic() + 20
    for pid in map(int, pids.read_text().split()):
        while _lives(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
