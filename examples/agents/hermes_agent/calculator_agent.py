"""Hermes Agent with its terminal. Its prompts are long: give it a real model, and a container, since it runs commands.

    pip install hermes-agent
    PYTHONPATH=examples/agents/hermes_agent areal-hpc run YOUR_CONFIG.yaml agent.python=calculator_agent:CalculatorAgent

It keeps notes in ``$HERMES_HOME``; set that to a directory of the run's own.
"""

from __future__ import annotations

from typing import Any

from run_agent import AIAgent

from areal_hpc.tasks.calculator import reward


class CalculatorAgent:
    """The reward is 1.0 for the right number at the end. It is no coroutine: it runs in a thread of its own."""

    def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        agent = AIAgent(
            base_url=base_url,
            api_key=api_key,
            model="policy",
            max_iterations=4,
            enabled_toolsets=["terminal"],
            quiet_mode=True,
            skip_context_files=True,
            skip_memory=True,
        )
        return reward(agent.chat(data["messages"][-1]["content"]) or "", data["answer"])
