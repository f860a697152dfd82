"""The configuration's dataclasses seen as one flat table of dotted keys, such as `algorithm.clip_high`.

Everything here is read from the schema: a knob's type from its annotation, its default from the dataclass, its help
from the string under the field. No key is named.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum, StrEnum
from typing import Any, TypeVar

from areal_hpc.config.problems import did_you_mean
from areal_hpc.config.schema import Config
from areal_hpc.errors import ConfigError

Section = TypeVar("Section")


class Required(Enum):
    """The default of a knob that has none."""

    REQUIRED = "required"


REQUIRED = Required.REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One knob."""

    name: str
    type: Any  # the annotation, resolved
    default: Any  # REQUIRED if there is none
    help: str


@functools.cache
def hints(section: type) -> Mapping[str, Any]:
    """The resolved annotation of each field."""
    return typing.get_type_hints(section)


def default_of(field: Field[Any]) -> Any:
    """A field's default, made anew if it has a factory, or REQUIRED."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return REQUIRED if field.default is MISSING else field.default


@functools.cache
def keys(section: type = Config) -> Mapping[str, Key]:
    """Every knob of a section and of the sections in it, by dotted key, in the schema's order."""
    return {key.name: key for key in _walk(section, "", REQUIRED)}


def _walk(section: type, prefix: str, default: Any) -> Iterator[Key]:
    """``default``: what the section is where nobody says anything; it may differ from the defaults of its fields."""
    for field in fields(section):
        hint = hints(section)[field.name]
        value = default_of(field) if default is REQUIRED else getattr(default, field.name)
        name = prefix + field.name
        if is_dataclass(hint):
            yield from _walk(typing.cast("type", hint), name + ".", value)
        else:
            yield Key(name=name, type=hint, default=value, help=_helps(section)[field.name])


@functools.cache
def _helps(section: type) -> Mapping[str, str]:
    """Field name to the string under the field, for one dataclass."""
    module = inspect.getmodule(section)
    assert module is not None
    for node in ast.walk(_syntax(module)):
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            return dict(_documented(node))
    raise AssertionError(f"{section} is not in the source of its module")


@functools.cache
def _syntax(module: types.ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(node.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(help_text))):
                yield name, inspect.cleandoc(help_text)


def help_of(name: str, section: type = Config) -> str:
    """What a knob or a section is for.

    Raises:
        ConfigError: there is no such key; names the nearest ones.
    """
    text = ""
    for part in name.split("."):
        if not is_dataclass(section) or part not in hints(section):
            raise ConfigError(f"{name}: there is no such key{did_you_mean(name, keys())}")
        text, section = _helps(section)[part], hints(section)[part]
    return text


def type_name(hint: Any) -> str:
    """A type as a person writes a configuration: `float or null`, `list of str`, `mean | sum | max`."""
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(choice) for choice in typing.get_args(hint))
    if hint is types.NoneType:
        return "null"
    origin = typing.get_origin(hint)
    if origin is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    if origin is not None:
        return "mapping"
    if issubclass(hint, StrEnum):
        return " | ".join(hint)
    return str(hint.__name__)


def value_of(section: Any, name: str) -> Any:
    """The value at a dotted key."""
    return functools.reduce(getattr, name.split("."), section)


def with_value(section: Section, name: str, value: Any) -> Section:
    """The same section with another value at a dotted key."""
    head, _, rest = name.partition(".")
    inner = with_value(getattr(section, head), rest, value) if rest else value
    return replace(section, **{head: inner})  # type: ignore[type-var]
