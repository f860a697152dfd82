"""What ``areal-hpc serve`` makes of a configuration, and ``areal-hpc page``."""

from __future__ import annotations

import asyncio
import io
import re
from pathlib import Path

import aiohttp
import pytest

from areal_hpc.cli import main
from areal_hpc.errors import ConfigError
from areal_hpc.prompts import PromptStream, open_dataset
from areal_hpc.roles.service import serving_config, show_run
from areal_hpc.run_dir import RunDir
from areal_hpc.telemetry import Recorder

MINE = """
name: mine
model: {path: /models/m}
prompts: {train: /data/train.jsonl, prompt_key: question, answer_key: solution, task_args: {digits: 3}}
trainer: {total_steps: 5}
"""


def configured(tmp_path: Path, *more: str) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE, encoding="utf-8")
    return [str(path), *more]


def test_serving_needs_no_reward_and_no_prompts_and_waits_for_a_month(tmp_path: Path) -> None:
    config = serving_config(configured(tmp_path))
    assert config.agent.online.enabled and config.limits.starve_s == 30 * 24 * 3600
    assert (config.agent.online.host, config.agent.online.port) == ("127.0.0.1", 0)
    stream = PromptStream(open_dataset(config.prompts, "train", config.seed), config.prompts, seed=1)
    assert [stream.next().position for _ in range(3)] == [0, 1, 2]


def test_what_is_written_wins_over_what_serving_usually_has(tmp_path: Path) -> None:
    config = serving_config(configured(tmp_path, "limits.starve_s=1e4", "agent.online.port=8080"))
    assert (config.limits.starve_s, config.agent.online.port) == (1e4, 8080)
    with pytest.raises(ConfigError, match=r"rollout\.workers: 2 would be as many services"):
        serving_config(configured(tmp_path, "rollout.workers=2"))


def test_the_page_command_tells_where_it_is_and_who_may_look(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.config.write_text("trainer: {total_steps: 3}", encoding="utf-8")
    run.token.write_text("the-token", encoding="ascii")
    recorder = Recorder(run.attempt(1).create().records("trainer", 0), role="trainer", index=0, epoch=1)
    recorder.record("step", {"step": 1, "reward_mean": 0.5})
    recorder.close()
    said = io.StringIO()

    async def scenario() -> None:
        showing = asyncio.create_task(show_run(run, 0, said))
        while "page" not in said.getvalue():
            await asyncio.sleep(0)
            assert not showing.done()
        url = re.search(r"page (\S+)/\n", said.getvalue())
        assert url is not None and f"token in {run.token}" in said.getvalue() and "the-token" not in said.getvalue()
        headers = {"Authorization": "Bearer the-token"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{url[1]}/rl/page/overview") as answer,
        ):
            told = await answer.json()
        assert (told["run"], told["live"], told["curve"]["reward"]) == ("run", False, [0.5])
        showing.cancel()
        await asyncio.wait({showing})

    asyncio.run(scenario())


def test_a_page_of_a_run_whose_token_is_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever brings no token would be let in."""
    run = RunDir.create(tmp_path / "run")
    run.config.write_text("trainer: {total_steps: 3}", encoding="utf-8")
    run.token.write_bytes(b"\n")
    assert main(["page", str(run.root)]) == 2
    assert f"{run.token} holds no key; remove it" in capsys.readouterr().err


def test_a_page_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
