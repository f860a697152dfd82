"""The section of agents: which one runs the episodes, and how its turns become training data. See ``schema``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ToolFormatName(StrEnum):
    AUTO = "auto"
    HERMES = "hermes"
    QWEN = "qwen"
    QWEN_CODER = "qwen_coder"
    LLAMA3 = "llama3"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK = "deepseek"
    GLM = "glm"
    GLM47 = "glm47"
    KIMI = "kimi"


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineConfig:
    enabled: bool = False
    """Learn from an agent in daily use: it asks when it likes, and there are no prompts. `areal-hpc serve` sets it."""
    host: str = "127.0.0.1"
    """Address that the service listens at. Any other than loopback lets other machines ask, unencrypted."""
    port: int = 0
    """Port of the service, so that an agent's settings outlive a restart; 0 is one that the kernel chooses."""
    idle_s: float = 600.0
    """An episode in which nobody asks for so long has ended, in seconds."""
    reward_wait_s: float = 60.0
    """How long an episode that has ended waits for its reward over HTTP, in seconds; then `rollout.reward` gives it,
    and where that is empty the episode is left out."""
    baseline_window: int = 64
    """Episodes over which the running mean reaches that the reward of an episode without a group is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    python: str = ""
    """Agent class as a dotted path `module:Class`, called as run(data, *, base_url, api_key, http_client) for each
    episode; what it returns is the reward. Instead of `rollout.workflow`."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the agent class."""
    command: tuple[str, ...] = ()
    """Command that runs one episode, instead of a class: prompt as JSON on standard input, OPENAI_BASE_URL and
    OPENAI_API_KEY in its environment."""
    env: tuple[str, ...] = ()
    """Environment variables that the command may see besides the few that every process needs."""
    max_turns: int = 100
    """Most completions of one episode."""
    max_tokens: int = 0
    """Most tokens sampled in one episode, all its turns together; 0 is any number."""
    max_s: float = 0.0
    """Longest time of an episode from its first request on, in seconds; what is being answered then is broken off. 0 is
    any time."""
    max_open: int = 0
    """Most requests of one episode at once; 0 is any number."""
    discount: float = 1.0
    """What a turn's reward counts for the turn before it."""
    tool_format: ToolFormatName = ToolFormatName.AUTO
    """How the model writes tool calls; `auto` reads it from the chat template."""
    idle_s: float = 3600.0
    """Sessions opened over HTTP that nobody uses for so long are closed, in seconds."""
    online: OnlineConfig = field(default_factory=OnlineConfig)
    """An agent in daily use."""
