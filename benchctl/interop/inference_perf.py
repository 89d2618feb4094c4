"""Configurations of kubernetes-sigs/inference-perf: values by path of keys, each with the line of its key.

Only what is asked for is checked; inference-perf itself refuses the keys that it does not know.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from benchctl.errors import UsageError
from benchctl.untrusted.reading import UnreadableError, read_yaml
from benchctl.untrusted.text import visible_value

KeyPath: TypeAlias = tuple[str | int, ...]
_MOST: Final = 1e15
"""Above every number of a load; sums of such numbers would have no value."""


class WrongValueError(UsageError):
    """A value under ``key`` is not what inference-perf has there."""

    def __init__(self, key: KeyPath, problem: str) -> None:
        super().__init__(problem)
        self.key = key


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """One configuration, with the line of each key that is written."""

    path: str
    document: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def line(self, key: KeyPath) -> int:
        """The line of a key; that of the nearest key above it where it is not written."""
        while key and key not in self.lines:
            key = key[:-1]
        return self.lines.get(key, 1)

    def value(self, *key: str | int, default: Any = None) -> Any:
        """The value under a path of keys; ``default`` where it is not written. Raises WrongValueError."""
        value: Any = self.document
        for depth, step in enumerate(key):
            if value is None:
                return default
            if not isinstance(value, list if isinstance(step, int) else dict):
                raise WrongValueError(key[:depth], f"{visible_value(value)} stands where {step!r} is looked for")
            value = value.get(step) if isinstance(value, dict) else value[int(step)]
        return default if value is None else value

    def number(self, *key: str | int, default: float | None = None, least: float = 0) -> float:
        """The number under a path of keys. Raises WrongValueError without one from ``least``, or a ``default``."""
        value = self.value(*key, default=default)
        if value is None:
            raise WrongValueError(key, "missing; inference-perf needs it")
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= _MOST:
            raise WrongValueError(key, f"{visible_value(value)} is not a number of a load")
        return value


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
    return ConfigFile(path=str(path), document=document, lines=dict(_lines(node, ())))


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
