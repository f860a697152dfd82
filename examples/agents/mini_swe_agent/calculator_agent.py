"""mini-swe-agent: a shell, and nothing else. Its prompts are long: give it a real model.

    pip install mini-swe-agent
    PYTHONPATH=examples/agents/mini_swe_agent areal-hpc run YOUR_CONFIG.yaml \\
        agent.python=calculator_agent:CalculatorAgent

It runs what the model writes as you: train it in a container, or with an environment of ``minisweagent.environments``
that is one.
"""

from __future__ import annotations

from typing import Any

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

from areal_hpc.tasks.calculator import reward

APIS = {"chat": LitellmModel, "text": LitellmTextbasedModel, "responses": LitellmResponseModel}
SYSTEM = "You can interact with a computer."
TASK = "{{task}} When you know, let the shell print COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT and then the number."


class CalculatorAgent:
    """The reward is 1.0 for the right number. It is no coroutine: it runs in a thread of its own."""

    def __init__(self, api: str = "chat") -> None:
        self._model = APIS[api]

    def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any = None) -> float:
        where = {"api_base": base_url, "api_key": api_key}
        model = self._model(model_name="openai/policy", model_kwargs=where, cost_tracking="ignore_errors")
        agent = DefaultAgent(
            model, LocalEnvironment(), system_template=SYSTEM, instance_template=TASK, step_limit=4, cost_limit=0.0
        )
        return reward(agent.run(data["messages"][-1]["content"])["submission"], data["answer"])
