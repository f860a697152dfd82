"""A configuration for people: as YAML that loads back, as differences from the defaults, as a table of all knobs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any

import yaml

from areal_hpc.config.keys import REQUIRED, keys, type_name, value_of
from areal_hpc.config.schema import Config
from areal_hpc.config.source import PLAIN_WORDS


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than a text, so that every reader agrees."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Line breaks beyond ASCII are written as escapes: raw, they would be read back as spaces."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in PLAIN_WORDS:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def dump(config: Config) -> str:
    """The whole configuration as YAML, defaults included; ``load`` reads it back equal."""
    return yaml.dump(plain(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, tuples as lists, enums by value."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value


def diff(config: Config) -> list[tuple[str, Any, Any]]:
    """(dotted key, default, value) of every knob that is not at its default; the default may be ``REQUIRED``."""
    changed = []
    for name, key in keys().items():
        value = value_of(config, name)
        if value != key.default:
            changed.append((name, key.default, value))
    return changed


def render_diff(config: Config) -> str:
    """``diff`` as lines of YAML, each with the default it departs from."""
    lines = []
    for name, default, value in diff(config):
        was = "" if default is REQUIRED else f"    # default: {written(default)}"
        lines.append(f"{name}: {written(value)}{was}\n")
    return "".join(lines)


def render_reference() -> str:
    """All knobs with type, default and help, one paragraph each, in the schema's order."""
    return "\n".join(_paragraphs()) + "\n"


def _paragraphs() -> Iterator[str]:
    widest = max(map(len, keys()))
    for name, key in keys().items():
        default = "required" if key.default is REQUIRED else f"= {written(key.default)}"
        yield f"{name:<{widest}}  {type_name(key.type)}  {default}"
        yield textwrap.fill(
            key.help, width=110, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )


def written(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    text = yaml.dump(plain(value), Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
