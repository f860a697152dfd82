"""From YAML layers and overrides to a ``Config``: later layers win, mappings merge, lists replace, types are strict.

    load([Path("gsm8k.yaml"), Path("site.yaml")], ["algorithm.clip_high=0.28"])

Whatever is wrong is one ConfigError that lists every problem with its dotted key, its place, and the nearest valid
names. ``drafted`` goes on instead, with stand-ins for what cannot be used, for ``resolve`` to find what else is wrong.
This file knows dataclasses, not knobs.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal_hpc.config.keys import REQUIRED, default_of, help_of, hints, keys, type_name
from areal_hpc.config.problems import did_you_mean, near_keys, raise_if_any
from areal_hpc.config.schema import Config
from areal_hpc.config.source import Sourced, read_file, read_override
from areal_hpc.errors import ConfigError
from areal_hpc.run_dir import NAME


def files_and_overrides(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """What was typed: a word with ``=`` is an override, every other one a file.

    Raises:
        ConfigError: words that are neither; says of each what was probably meant.
    """
    overrides = [word for word in words if "=" in word]
    paths = [Path(word) for word in words if "=" not in word]
    strays = [path for path in paths if path.suffix not in (".yaml", ".yml") and not path.exists()]
    raise_if_any([f"{path} is neither a file nor KEY=VALUE; {_probably(str(path))}" for path in strays])
    return paths, overrides


def _probably(word: str) -> str:
    if word in keys():
        return f"write {word}={type_name(keys()[word].type)}"
    if "." in word and (near := did_you_mean(word, keys())):
        return f"an override is written with `=`{near}"
    return f"to name the run, write name={word}" if NAME.fullmatch(word) else "check the path"


def load(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """The configuration that the files and then the overrides describe.

    Raises:
        ConfigError: see the top of this file.
    """
    config = build(Config, read(paths, overrides))
    assert isinstance(config, Config)
    return config


def read(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Sourced:
    """All layers merged into one mapping, not yet typed.

    Raises:
        ConfigError: names every layer that cannot be read, and why.
    """
    layers: list[Sourced] = []
    problems: list[str] = []
    readers = [functools.partial(read_file, path) for path in paths]
    for read_layer in [*readers, *(functools.partial(read_override, text) for text in overrides)]:
        try:
            layers.append(read_layer())
        except ConfigError as error:
            problems.append(str(error))
    raise_if_any(problems)
    return functools.reduce(_merged, layers, Sourced({}, "nowhere"))


def _merged(below: Sourced, above: Sourced) -> Sourced:
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    entries = dict(below.value)
    for key, item in above.value.items():
        entries[key] = _merged(entries[key], item) if key in entries else item
    return Sourced(entries, above.where)


def places(tree: Sourced) -> dict[str, str]:
    """Where each dotted key was written that somebody wrote."""
    return dict(_written(tree, ""))


def _written(tree: Sourced, prefix: str) -> Iterator[tuple[str, str]]:
    for key, item in tree.value.items():
        if isinstance(item.value, dict):
            yield from _written(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item.where


def build(section: type, tree: Sourced) -> Any:
    """A dataclass from a mapping; fields that are dataclasses are sections of it.

    Raises:
        ConfigError: a key that the section does not have, one that it needs, or a value of another type.
    """
    draft = drafted(section, tree)
    raise_if_any(draft.problems)
    return draft.section


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A section as far as it could be built."""

    section: Any
    """With a default, or anything, in the place of what cannot be used."""
    problems: Sequence[str]
    unusable: frozenset[str]
    """Dotted keys, and sections, whose values stand in for others."""


def drafted(section: type, tree: Sourced) -> Draft:
    """What ``build`` would make, and all that it would refuse."""
    builder = _Builder(section)
    built = builder.section(section, tree, "", REQUIRED)
    return Draft(section=built, problems=builder.problems, unusable=frozenset(builder.unusable))


class _Builder:
    """Builds what it can, and notes what it cannot."""

    def __init__(self, root: type) -> None:
        self.problems: list[str] = []
        self.unusable: set[str] = set()
        self._root = root

    def section(self, section: type, given: Sourced | None, prefix: str, default: Any) -> Any:
        """``default``: the whole section's, whose values fill what ``given`` leaves out; REQUIRED if it has none."""
        entries = {} if given is None else given.value
        if not isinstance(entries, dict):
            assert given is not None
            self._mismatch(prefix.removesuffix("."), "a section with keys of its own", given)
            return _Builder(self._root).section(section, None, prefix, default)  # whose problems are this one's
        known = hints(section)
        for name, item in entries.items():
            if name not in known:
                self._unknown(prefix + name, known, item.where)
        values = {}
        for field in fields(section):
            fallback = default_of(field) if default is REQUIRED else getattr(default, field.name)
            values[field.name] = self._field(known[field.name], entries.get(field.name), prefix + field.name, fallback)
        return section(**values)

    def _field(self, hint: Any, given: Sourced | None, key: str, default: Any) -> Any:
        if is_dataclass(hint):
            return self.section(typing.cast("type", hint), given, key + ".", default)
        if given is not None:
            return self._value(hint, given, key)
        if default is REQUIRED:
            meaning = help_of(key, self._root).removesuffix(".")
            self.problems.append(f"{key}: required but missing ({meaning}); set it in a file or as `{key}=...`")
            self.unusable.add(key)
        return default

    def _value(self, hint: Any, given: Sourced, key: str, expected: str = "") -> Any:
        """``given`` as the type that ``hint`` says; no conversion but int to float, list to tuple, name to enum, and of
        a number to the text that was written."""
        data = given.value
        if isinstance(hint, types.UnionType):
            (inner,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
            return None if data is None else self._value(inner, given, key, type_name(hint))
        origin = typing.get_origin(hint) or hint
        if origin is tuple and isinstance(data, list):
            item_type = typing.get_args(hint)[0]
            return tuple(self._value(item_type, item, f"{key}[{index}]") for index, item in enumerate(data))
        if origin is Mapping and isinstance(data, dict):
            return given.plain()
        if issubclass(origin, StrEnum) and data in list(origin):
            return origin(data)
        if type(data) in (int, float) and origin in (float, str):
            return float(data) if origin is float else given.written
        if type(data) is not origin:
            self._mismatch(key, expected or type_name(hint), given)
        return data

    def _unknown(self, key: str, siblings: Collection[str], where: str) -> None:
        suggestion = did_you_mean(key, keys(self._root), siblings)
        self.unusable.update(near_keys(key, keys(self._root), siblings))  # one of them may have been meant
        self.problems.append(f"{key}: unknown key ({where}){suggestion or '; remove it'}")

    def _mismatch(self, key: str, expected: str, given: Sourced) -> None:
        self.unusable.add(key.partition("[")[0])
        advice = _advice(expected, given.value)
        self.problems.append(f"{key}: expected {expected}, got {_described(given.value)} ({given.where}){advice}")


def _described(data: Any) -> str:
    match data:
        case None:
            return "null"
        case bool():
            return str(data).lower()
        case str():
            return f"the text {data[:80]!r}"
        case list():
            return "a list"
        case dict():
            return "a mapping"
    return f"the number {data}"


def _advice(expected: str, data: Any) -> str:
    if expected == "str" and not isinstance(data, list | dict):
        return "; put the value in quotes"
    if expected == "bool":
        return "; write true or false"
    if expected.startswith(("int", "float")) and isinstance(data, str):
        return "; write a number, without quotes"
    if expected.startswith("list"):
        return "; write it in brackets: [...]"
    return "; change it"
