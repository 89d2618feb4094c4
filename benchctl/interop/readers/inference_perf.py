"""Configurations of kubernetes-sigs/inference-perf, checked against its schema, with the line of every key."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import yaml
from pydantic import ValidationError

from benchctl.errors import UsageError
from benchctl.interop.readers.inference_perf_schema import ConcurrentStage, Config, RateStage, Schema, SessionStage
from benchctl.untrusted.reading import UnreadableError, read_yaml
from benchctl.untrusted.text import visible_value

KeyPath: TypeAlias = tuple[str | int, ...]

_MOST: Final = 1e15
_STAGES: Final[Mapping[str, type[Schema]]] = {"concurrent": ConcurrentStage, "trace_session_replay": SessionStage}


@dataclass(frozen=True, slots=True)
class SchemaError:
    """A key that inference-perf would refuse."""

    path: KeyPath
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One file: its configuration, or the errors because of which there is none."""

    path: str
    config: Config | None
    errors: tuple[SchemaError, ...]
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of a key; that of the nearest key above it where it is not written."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def read_config(path: Path) -> ConfigFile:
    """Read one configuration. Raises UsageError for a file that is not a YAML mapping."""
    try:
        document, node = read_yaml(path)
    except UnreadableError as error:
        raise UsageError(f"{error}; name a configuration of inference-perf") from error
    if not isinstance(document, dict):
        raise UsageError(
            f"{path}: holds {type(document).__name__}, not a mapping; a configuration of inference-perf has keys "
            "such as api, data, load and server"
        )
    impossible = tuple(_impossible(document, ()))
    config, errors = (None, impossible) if impossible else _validated(document)
    return ConfigFile(path=str(path), config=config, errors=errors, lines=dict(_lines(node, ())))


def _impossible(value: object, path: KeyPath) -> Iterator[SchemaError]:
    """The numbers that no load has; sums of them would have no value."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _impossible(part, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(value, int | float) and not abs(value) <= _MOST:
        yield SchemaError(path, f"{visible_value(value)} is not a number of a load")


def _validated(document: dict[str, Any]) -> tuple[Config | None, tuple[SchemaError, ...]]:
    """The configuration, with each stage read as one of the load's type, as inference-perf does."""
    load = document.get("load")
    stages = load.get("stages") if isinstance(load, dict) else None
    errors: list[SchemaError] = []
    if isinstance(load, dict) and isinstance(stages, list):
        kind = _STAGES.get(str(load.get("type", "constant")), RateStage)
        parsed = []
        for i, stage in enumerate(stages):
            try:
                parsed.append(kind.model_validate(stage))
            except ValidationError as error:
                errors += _errors(error, ("load", "stages", i), kind)
        document = {**document, "load": {**load, "stages": parsed}}
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        return None, (*_errors(error, (), Config), *errors)
    return (None if errors else config), tuple(errors)


def _errors(error: ValidationError, above: KeyPath, model: type[Schema]) -> Iterator[SchemaError]:
    for entry in error.errors(include_url=False):
        path = (*above, *_keys(entry["loc"]))
        if entry["type"] == "extra_forbidden":
            yield SchemaError(path, f"unknown key, which inference-perf forbids{_hint(model, entry['loc'])}")
        elif entry["type"] == "missing":
            yield SchemaError(path, "missing; inference-perf needs it")
        else:
            value = entry["input"]
            text = f" (value {value!r})" if isinstance(value, str | int | float | bool) else ""
            yield SchemaError(path, entry["msg"].removeprefix("Value error, ") + text)


def _keys(loc: tuple[int | str, ...]) -> KeyPath:
    """The keys of a location, without the names of classes that pydantic adds for a choice of types."""
    return tuple(step for step in loc if isinstance(step, int) or not (step[:1].isupper() or "[" in step))


def _hint(model: type[Schema], loc: tuple[int | str, ...]) -> str:
    section: type[Schema] | None = model
    for step in loc[:-1]:
        field = section.model_fields.get(str(step)) if section is not None else None
        choices = () if field is None else (get_args(field.annotation) or (field.annotation,))
        section = next((each for each in choices if isinstance(each, type) and issubclass(each, Schema)), None)
    if section is None:
        return ""
    matches = difflib.get_close_matches(str(loc[-1]), list(section.model_fields), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; keys are {', '.join(section.model_fields)}"


def _lines(node: yaml.Node | None, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield (*path, i), item.start_mark.line + 1
            yield from _lines(item, (*path, i))
