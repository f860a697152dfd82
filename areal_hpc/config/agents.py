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
    DEEPSEEK = "deepseek"
    GLM = "glm"
    KIMI = "kimi"


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
    discount: float = 1.0
    """What a turn's reward counts for the turn before it."""
    tool_format: ToolFormatName = ToolFormatName.AUTO
    """How the model writes tool calls; `auto` reads it from the chat template."""
    idle_s: float = 3600.0
    """Sessions opened over HTTP that nobody uses for so long are closed, in seconds."""
