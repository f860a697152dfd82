"""Which clients, in which of their ways, and what the model says to each.

The task is always the same: what 37 * 46 is, with a calculator. The model is scripted: it calls the tool, and says what
came back. A client has run the tool if the model's last context holds the result, since the question does not.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "agents"
QUESTION, RESULT = "What is 37 * 46?", "1702"
ANSWER = f"37 * 46 is {RESULT}."


def call(name: str, **arguments: str) -> str:
    """A tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALCULATED = (call("calculator", expression="37*46"), ANSWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to use a client.

    Args:
        client: its directory in ``examples/agents``.
        args: of the class in its ``calculator_agent.py``; for a client in JavaScript, words of its command line.
        answers: what the model says, a turn after the other.
    """

    client: str
    args: Mapping[str, Any] = field(default_factory=dict)
    answers: Sequence[str] = CALCULATED

    @property
    def name(self) -> str:
        return " ".join(
            [self.client, *(str(value) if key != "stream" else "stream" for key, value in self.args.items())]
        )


def _ways(client: str, answers: Sequence[str] = CALCULATED, **choices: Sequence[Any]) -> Iterator[Case]:
    """Every combination of the choices, each whole and streamed."""
    for values in itertools.product(*choices.values()):
        args = dict(zip(choices, values, strict=True))
        yield Case(client=client, args=args, answers=answers)
        yield Case(client=client, args={**args, "stream": True}, answers=answers)


FINAL = call("final_answer", answer=RESULT)
CODE = '<code>\nprint(calculator("37*46"))\n</code>'
FINAL_CODE = f"<code>\nfinal_answer({RESULT})\n</code>"
SHELL = ("echo $((37*46))", f"printf 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\\n{RESULT}'")
IN_TEXT = tuple(f"```mswea_bash_command\n{command}\n```" for command in SHELL)
CALLED = tuple(call("bash", command=command) for command in SHELL)
CASES: Sequence[Case] = (
    *_ways("openai"),
    *_ways("anthropic"),
    *_ways("openai_agents", api=("responses", "chat")),
    *_ways("pydantic_ai", api=("chat", "responses", "messages")),
    *_ways("langgraph", api=("chat", "responses")),
    *_ways("smolagents", (CALCULATED[0], FINAL), kind=("tools",)),
    *_ways("smolagents", (CODE, FINAL_CODE), kind=("code",)),
    *_ways("litellm", provider=("openai", "hosted_vllm", "anthropic")),
    *_ways("camel_ai"),
    *(Case(client="mini_swe_agent", args={"api": api}, answers=CALLED) for api in ("chat", "responses")),
    Case(client="mini_swe_agent", args={"api": "text"}, answers=IN_TEXT),
    Case(client="hermes_agent", answers=(call("terminal", command="echo $((37*46))"), ANSWER)),
    *_ways("openai_agents_js", api=("responses", "chat")),
    *(
        Case(client="openclaw", args={"api": api}, answers=(call("exec", command="echo $((37*46))"), ANSWER))
        for api in ("openai-completions", "openai-responses", "anthropic-messages")
    ),
)
