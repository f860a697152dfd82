"""Calls of tools that are held to the schemas of their arguments: SGLang's structural tags, written and read.

    {"structures": [{"begin": '<tool_call>\\n{"name": "add", "arguments": ',
                     "schema": {...},
                     "end": "}\\n</tool_call>"}],
     "triggers": ["<tool_call>"],
     "at_least_one": false}

An answer is free until a trigger stands in it. What follows is the rest of a structure that begins so, and after it the
answer is free again. With ``at_least_one`` the answer begins with a structure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from areal_hpc.dialogue.tool_formats import ToolFormat
from areal_hpc.errors import DataError

ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
"""What a tool that is not strict is held to beside one that is, since both begin alike."""
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens that are text to a grammar, although some tokenizers call them special."""
NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether a tool's calls must follow its schema."""
    return tool["function"].get("strict") is True


def schema_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the arguments of a tool are held to."""
    parameters = tool["function"].get("parameters")
    return parameters if is_strict(tool) and isinstance(parameters, Mapping) else ANY_ARGUMENTS


def calls_tag(written: ToolFormat, tools: Sequence[Mapping[str, Any]], *, forced: bool) -> str:
    """What holds the calls to their tools' schemas, as JSON; empty where no tool is strict, or none can be held to it.

    Args:
        written: how the model writes calls.
        tools: those that it may call.
        forced: whether it must.
    """
    structures = [
        {"begin": written.opening(tool["function"]["name"]), "schema": schema_of(tool), "end": written.closing}
        for tool in tools
    ]
    trigger = written.trigger or (written.opening("") if forced else "")
    if not written.closing or not trigger or not any(map(is_strict, tools)):
        return ""
    return json.dumps({"structures": structures, "triggers": [trigger], "at_least_one": forced}, ensure_ascii=False)


def lark_of(tag: str, layout: Mapping[str, Any], tokens: Mapping[str, int] = NO_TOKENS) -> str:
    """The tag as a grammar for llguidance.

    Args:
        tag: as JSON.
        layout: how JSON is written, in llguidance's words.
        tokens: of ``TEXT_TOKENS`` those that are no text to whoever reads the grammar, with their ids: the grammar
            has them as tokens. Spelled by several others they are text, and trigger nothing.

    Raises:
        DataError: it is no tag of this kind.
    """
    try:
        read = json.loads(tag)
        structures = [
            (one["begin"], {**one["schema"], "x-guidance": dict(layout)}, one["end"]) for one in read["structures"]
        ]
        triggers, at_least_one = list(read["triggers"]), bool(read.get("at_least_one"))
        rules = list(_rules(structures, triggers, tokens))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"structural_tag: {type(error).__name__}: {error}; send structures and triggers") from error
    anywhere = " | ".join(f"found_{number}" for number in range(len(triggers)))
    first = " | ".join(f"first_{number}" for number in range(len(triggers)))
    start = f"({first}) ({anywhere})* TEXT" if at_least_one else f"({anywhere})* TEXT"
    return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *rules, ""])


def _rules(
    structures: Sequence[tuple[str, Mapping[str, Any], str]], triggers: Sequence[str], tokens: Mapping[str, int]
) -> Iterator[str]:
    """Of each trigger how it is found behind free text, and what follows it; of each structure its JSON."""
    for number, trigger in enumerate(triggers):
        begun = [(place, *one) for place, one in enumerate(structures) if one[0].startswith(trigger)]
        if not trigger or not begun:
            raise ValueError(f"no structure begins with the trigger {trigger!r}")
        rests = " | ".join(
            " ".join([*_terms(begin[len(trigger) :], tokens), f"json_{at}", *_terms(end, tokens)])
            for at, begin, _, end in begun
        )
        spelled = _terms(trigger, tokens)
        if trigger.startswith(tuple(tokens)):  # which free text cannot hold, so that it ends there
            yield f"found_{number}: TEXT {' '.join(spelled)} rest_{number}"
        elif len(spelled) == 1:
            yield f"found_{number}_trigger[lazy]: TEXT {spelled[0]}"
            yield f"found_{number}: found_{number}_trigger rest_{number}"
        else:
            raise ValueError(f"the trigger {trigger!r} has a special token within it; let it begin there")
        yield f"first_{number}: {' '.join(spelled)} rest_{number}"
        yield f"rest_{number}: {rests}"
    for place, (_, schema, _) in enumerate(structures):
        yield f"json_{place}: %json {json.dumps(schema, ensure_ascii=False)}"


def _terms(text: str, tokens: Mapping[str, int]) -> list[str]:
    """A fixed text as llguidance reads it: quoted, but for ``tokens``."""
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    return [f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part]
