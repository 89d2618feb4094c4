"""Configurations of kubernetes-sigs/inference-perf: values by path of keys, each with the line of its key, and the
prompts and stages of their load.

Only what is asked for is checked; inference-perf itself refuses the keys that it does not know.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from benchctl.errors import UsageError
from benchctl.untrusted.files import UnreadableError, read_yaml
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Prompts of a configuration: how many differ, and their mean lengths in tokens.

    ``cached_tokens`` of each begin another prompt of its group, on purpose, and were computed for the first of
    them. ``is_exhaustible`` for a generator that ends after ``num_distinct`` instead of starting over.
    """

    num_distinct: int
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float = 0.0
    is_exhaustible: bool = False
    key: KeyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the load: at a rate, or with a fixed number of open requests."""

    index: int
    num_requests: int
    rate: float | None = None
    concurrency: int | None = None

    @property
    def key(self) -> KeyPath:
        return ("load", "stages", self.index, "rate" if self.rate is not None else "concurrency_level")


_AT_A_RATE: Final = ("constant", "poisson")
_TYPES: Final = (*_AT_A_RATE, "concurrent", "trace_replay", "trace_session_replay")


def stages_of(file: ConfigFile) -> tuple[Stage, ...]:
    """Stages whose load is known before the run: those of a sweep and of a trace are not."""
    kind = file.value("load", "type", default="constant")
    if kind not in _TYPES:
        raise WrongValueError(("load", "type"), f"{kind!r} is none of {', '.join(_TYPES)}")
    written = file.value("load", "stages", default=[])
    if not isinstance(written, list):
        raise WrongValueError(("load", "stages"), f"{visible_value(written)} is not a list of stages")
    return tuple(_stage(file, i, kind) for i in range(len(written))) if kind in (*_AT_A_RATE, "concurrent") else ()


def _stage(file: ConfigFile, index: int, kind: str) -> Stage:
    key = ("load", "stages", index)
    if kind in _AT_A_RATE:
        rate = file.number(*key, "rate", least=1e-9)
        return Stage(index=index, num_requests=int(rate * file.number(*key, "duration", least=1)), rate=rate)
    return Stage(
        index=index,
        num_requests=int(file.number(*key, "num_requests", least=1)),
        concurrency=int(file.number(*key, "concurrency_level", least=1)),
    )


def prompt_set(file: ConfigFile) -> PromptSet | None:
    """The prompts of a configuration; None for data whose size or lengths its file does not state."""
    kind = file.value("data", "type")
    if kind == "shared_prefix":
        return _shared_prompts(file)
    if kind not in {"synthetic", "random"} or file.value("data", "trace"):
        return None
    distributions = (("data", "input_distribution"), ("data", "output_distribution"))
    if any(file.value(*key, "total_count") is None for key in distributions):
        return None
    prompts, outputs = distributions
    return PromptSet(
        num_distinct=int(min(file.number(*key, "total_count") for key in distributions)),
        prompt_tokens=max(1.0, _mean_tokens(file, prompts)),
        output_tokens=max(1.0, _mean_tokens(file, outputs)),
        is_exhaustible=True,
        key=(*prompts, "total_count"),
    )


def _shared_prompts(file: ConfigFile) -> PromptSet:
    """Every prompt is a system prompt and a question, also where its group has no other prompt."""
    prefix = ("data", "shared_prefix")
    if not file.value(*prefix):
        raise WrongValueError(("data",), "type shared_prefix needs the section shared_prefix")
    num_groups, num_per_group = (  # each by either of its names
        int(file.number(*prefix, name, default=file.number(*prefix, older, default=10)))
        for name, older in (
            ("num_unique_system_prompts", "num_groups"),
            ("num_users_per_system_prompt", "num_prompts_per_group"),
        )
    )
    system, question, output = (
        _mean_tokens(file, (*prefix, distribution if file.value(*prefix, distribution) else length), default)
        for distribution, length, default in (
            ("", "system_prompt_len", 100.0),
            ("question_distribution", "question_len", 50.0),
            ("output_distribution", "output_len", 50.0),
        )
    )
    return PromptSet(
        num_distinct=num_groups * num_per_group,
        prompt_tokens=max(1.0, system + question),
        output_tokens=max(1.0, output),
        cached_tokens=system * (1 - 1 / max(1, num_per_group)),
        key=(*prefix, "num_unique_system_prompts"),
    )


def _mean_tokens(file: ConfigFile, key: KeyPath, default: float = 0.0) -> float:
    """A length in tokens, or the mean of a distribution of lengths, cut to its range."""
    if not isinstance(file.value(*key), dict):
        return file.number(*key, default=default)
    shortest, longest = file.number(*key, "min", default=10), file.number(*key, "max", default=1024)
    return min(max(file.number(*key, "mean", default=512), shortest), longest)
