"""YAML text to plain values that remember where they were written.

Three things differ from PyYAML on purpose. Plain words follow YAML 1.2's core schema, because 1.1 reads `1e-6` as a
text, `no` as false, `1:30` as ninety and `010` as eight. A key given twice is an error, not a silent victory of the
last one. Tags and aliases are refused: a tag names code, and a few aliases expand to a million values.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 20

TAG = "tag:yaml.org,2002:"
PLAIN_WORDS = (
    (TAG + "null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    (TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    # A number of more digits than any knob can mean stays a text, and is refused as one.
    (TAG + "int", re.compile(r"[-+]?[0-9]{1,18}\Z"), list("-+0123456789")),
    (
        TAG + "float",
        re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)\Z"),
        list("-+.0123456789"),
    ),
)
"""What an unquoted word means: tag, pattern, possible first characters. Anything else is a text."""


@dataclass(frozen=True, slots=True)
class Sourced:
    """A value and where it was written; the value is a scalar, a list of Sourced, or a dict of str to Sourced."""

    value: Any
    where: str
    written: str = ""
    """A scalar as it stands there: what is a number to YAML may be an account that begins with zeros."""

    def plain(self) -> Any:
        """The value without the places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _Loader(yaml.SafeLoader):
    """Composes nodes within the limits; it never constructs objects."""

    def __init__(self, text: str, origin: str, *, show_lines: bool) -> None:
        super().__init__(text)
        self._origin = origin
        self._show_lines = show_lines
        self._depth = 0

    def where(self, mark: yaml.Mark | None) -> str:
        return f"{self._origin} line {mark.line + 1}" if self._show_lines and mark else self._origin

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        where = self.where(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"{where}: alias *{event.anchor} is not allowed; write the value again")
        if event.tag is not None:
            raise ConfigError(f"{where}: tag {event.tag} is not allowed; write a plain value")
        if self._depth == MAX_DEPTH:
            raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH} levels; flatten it")
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def sourced(self, node: yaml.Node, where: str) -> Sourced:
        if isinstance(node, yaml.MappingNode):
            return Sourced(self._mapping(node), where)
        if isinstance(node, yaml.SequenceNode):
            return Sourced([self.sourced(item, self.where(item.start_mark)) for item in node.value], where)
        return Sourced(_scalar(node, where), where, node.value)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Sourced]:
        entries: dict[str, Sourced] = {}
        for key, item in node.value:
            where = self.where(key.start_mark)
            if key.tag != TAG + "str":
                raise ConfigError(f"{where}: a key must be a name; put {_shown(key)} in quotes if it is meant as one")
            if key.value in entries:
                first = entries[key.value].where
                raise ConfigError(f"{where}: key {key.value!r} was given before ({first}); keep one of the two")
            entries[key.value] = self.sourced(item, where)
        return entries


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in PLAIN_WORDS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


def _shown(key: yaml.Node) -> str:
    return repr(key.value) if isinstance(key, yaml.ScalarNode) else "it"


def _scalar(node: yaml.Node, where: str) -> Any:
    match node.tag.removeprefix(TAG):
        case "null":
            return None
        case "bool":
            return node.value.lower() == "true"
        case "int":
            return int(node.value)
        case "float":
            if not math.isfinite(number := float(node.value)):
                raise ConfigError(f"{where}: {node.value} is too large for a number; write a smaller one")
            return number
    return node.value


def parse(text: str, origin: str, *, show_lines: bool = True) -> Sourced | None:
    """The one YAML document in ``text``, or None if it is empty.

    Args:
        origin: what an error calls the text: a path, or the override itself.
        show_lines: whether an error also gives the line.

    Raises:
        ConfigError: not YAML, a key twice, a tag, an alias, too deep; gives the place.
    """
    try:
        loader = _Loader(text, origin, show_lines=show_lines)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        place = loader.where(error.problem_mark)
        raise ConfigError(f"{place}: not valid YAML: {error.problem}; mend the syntax there") from error
    except yaml.reader.ReaderError as error:
        found = f"character U+{error.character:04X} at offset {error.position}"
        raise ConfigError(f"{origin}: {found} is not allowed in YAML; remove it") from error
    return None if node is None else loader.sourced(node, loader.where(node.start_mark))


def read_file(path: Path) -> Sourced:
    """The mapping in a YAML file.

    Raises:
        ConfigError: it cannot be read, is too large, is not UTF-8, or holds no mapping; and as ``parse``.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}; check the path") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; a configuration is a few kilobytes, check the path")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} line {line}: not UTF-8; save the file as UTF-8") from error
    tree = parse(text, str(path))
    if tree is None:
        raise ConfigError(f"{path}: the file is empty; write settings such as `name: my_run`, or leave the file out")
    if not isinstance(tree.value, dict):
        raise ConfigError(f"{tree.where}: a configuration is a mapping; write settings such as `name: my_run`")
    return tree


def read_override(text: str) -> Sourced:
    """`a.b=value` as the nested mapping {a: {b: value}}; the value is YAML.

    Raises:
        ConfigError: no `=`, an empty part in the key; and as ``parse``.
    """
    origin = f"override `{text}`"
    key, equals, value = text.partition("=")
    parts = key.split(".")
    if not equals or not all(parts) or len(parts) > MAX_DEPTH:
        raise ConfigError(f"{origin}: write it as dotted.key=value, such as algorithm.clip_high=0.28")
    tree = parse(value, origin, show_lines=False) or Sourced(None, origin)
    for part in reversed(parts):
        tree = Sourced({part: tree}, origin)
    return tree
