"""Whether a chat template can be used with tools, found out by rendering a call."""

from __future__ import annotations

from typing import Any

from areal_hpc.dialogue.messages import for_template, message
from areal_hpc.dialogue.transcript import Template
from areal_hpc.errors import DataError

TOOL_NAME, ARGUMENT, RESULT = "probe_tool", "probe_argument", "probe_result"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


def tool_trouble(template: Template) -> str:
    """Why tools cannot be used with the template; empty if they can.

    Some templates drop past calls without a word: the model would see results of calls that it never made.
    """
    call = {"id": "call000000", "name": TOOL_NAME, "arguments": f'{{"text": "{ARGUMENT}"}}'}
    user = message("user", "probe")
    answered = [user, message("assistant", "", calls=[call]), message("tool", RESULT, answers=call["id"])]
    try:
        offered = template.spelled(template.conversation([user], tools=[TOOL]))
        whole = template.spelled(template.conversation(for_template(answered), tools=[TOOL]))
    except DataError as error:
        return f"the model's chat template cannot render tools: {error}"
    for shown, text, what in ((TOOL_NAME, offered, "tools"), (ARGUMENT, whole, "calls"), (RESULT, whole, "results")):
        if shown not in text:
            return f"the model's chat template leaves {what} of tools out; use one that renders them, or no tools"
    return ""
