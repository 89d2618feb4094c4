"""YAML text as plain values with the location of each beside them, and plain values as YAML text.

Every value of a profile, whatever its key, is bounded: numbers have 64 bits, and texts can be passed on.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from dataclasses import dataclass, replace
from math import isfinite, isinf
from typing import Any, Final, TypeAlias

import yaml

from benchctl.untrusted import (
    PROFILE_BYTES,
    PROFILE_DEPTH,
    PROFILE_NODES,
    STORED_PROFILE_BYTES,
    STORED_PROFILE_NODES,
)
from benchctl.untrusted.text import visible, visible_line

Step: TypeAlias = str | int
Steps: TypeAlias = tuple[Step, ...]
"""The path of a value in a document."""
Problem: TypeAlias = tuple[Steps, str]
"""The path of a faulty value, and the problem with its remedy."""


@dataclass(frozen=True, slots=True)
class Location:
    """The origin of a value: a file's line or an option of the command line, and the value's path there."""

    source: str
    line: int | None = None
    path: Steps = ()

    def __str__(self) -> str:
        line = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{line}: {dotted(self.path)}" if self.path else line


@dataclass(frozen=True, slots=True)
class LocatedError:
    """One error of a profile. ``problem`` names the value and the remedy."""

    location: Location
    problem: str
    hides_keys: bool = False
    """True where keys were not read because of it; those that are missing then are not reported."""

    def __str__(self) -> str:
        return f"{self.location}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping of plain values, and the location at which each of them was written, by its path."""

    values: dict[str, Any]
    locations: Mapping[Steps, Location]

    def mapping(self, *path: str) -> dict[str, Any]:
        """The mapping at a path; an empty one where there is none."""
        value, existing = follow(self.values, path)
        return value if existing == path and isinstance(value, dict) else {}

    def location(self, path: Steps) -> Location:
        """The location of the value at a path; for one that is missing, below that of the nearest around it."""
        depth = next(depth for depth in range(len(path), -1, -1) if path[:depth] in self.locations)
        nearest = self.locations[path[:depth]]
        return replace(nearest, path=(*nearest.path, *path[depth:]))

    def errors(self, problems: Iterable[Problem]) -> list[LocatedError]:
        """These problems where they were written."""
        return [LocatedError(self.location(path), problem) for path, problem in problems]

    def without(self, *path: str) -> "Document":
        """A copy without the value at a path."""
        locations = {steps: location for steps, location in self.locations.items() if steps[: len(path)] != path}
        return Document(left_out(self.values, path), locations)

    def part(self, *path: str) -> "Document":
        """The mapping at a path by itself."""
        below = {steps[len(path) :]: each for steps, each in self.locations.items() if steps[: len(path)] == path}
        return Document(self.mapping(*path), below)


def dotted(path: Steps) -> str:
    """``workload.arrival.kind``, ``sweep.top_k[2]``; long keys are cut."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{visible_line(step, 100)}" for step in path)
    return "".join(steps).removeprefix(".")


def value_text(value: object) -> str:
    """A value as messages show it, shortened."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) > 10**60:  # Python refuses to write one of more than 4,300 digits
        return "a whole number of more than 60 digits"
    text = repr(value[:120]) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def values_in(value: Any, path: Steps = ()) -> Iterator[tuple[Steps, Any]]:
    """The path of each value in plain ones, and the value, the whole first; what is nested too deep is left out."""
    yield path, value
    if len(path) <= PROFILE_DEPTH:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for step, item in items:
            yield from values_in(item, (*path, step))


def follow(values: Any, path: Steps) -> tuple[Any, Steps]:
    """The value at a path, and the steps that exist; steps that the values do not have are skipped."""
    existing = list[Step]()
    for step in path:
        if isinstance(values, dict) and str(step) in values:
            values = values[str(step)]
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            values = values[step]
        else:
            continue
        existing.append(step)
    return values, tuple(existing)


def merged(below: Any, above: Any, *, null_removes: bool = False) -> Any:
    """Mappings merge key by key; anything else in ``above`` replaces what is below it.

    With ``null_removes`` a null removes what is below it, and is a value where nothing is.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    removed = {key for key, value in above.items() if null_removes and value is None and below.get(key) is not None}
    rest = {key: value for key, value in below.items() if key not in removed}
    laid = {key: value for key, value in above.items() if key not in removed}
    return rest | {key: merged(rest.get(key), value, null_removes=null_removes) for key, value in laid.items()}


def replaced(values: dict[str, Any], path: Steps, value: Any) -> dict[str, Any]:
    """A copy with the value at a path set; mappings on the way that are missing are made."""
    key, deeper = str(path[0]), path[1:]
    if deeper:
        below = values.get(key)
        value = replaced(below if isinstance(below, dict) else {}, deeper, value)
    return {**values, key: value}


def left_out(values: dict[str, Any], path: Steps) -> dict[str, Any]:
    """A copy without the value at a path."""
    key, deeper = str(path[0]), path[1:]
    if not deeper:
        return {name: value for name, value in values.items() if name != key}
    below = values.get(key)
    return {**values, key: left_out(below, deeper)} if isinstance(below, dict) else values


def plain_document(values: dict[str, Any], source: str) -> Document:
    """A document of plain values that were not read from text."""
    return Document(values, {path: Location(source, path=path) for path, _ in values_in(values)})


@dataclass(frozen=True, slots=True)
class Bounds:
    """The size of a document beyond which it is refused."""

    num_bytes: int
    num_nodes: int
    remedy: str


WRITTEN: Final = Bounds(
    PROFILE_BYTES, PROFILE_NODES, "no profile needs so much; keep prompts and schemas in files of their own"
)
"""Bounds of what a user writes: a profile, a preset, a value of the command line."""
STORED: Final = Bounds(
    STORED_PROFILE_BYTES, STORED_PROFILE_NODES, "benchctl stores none of that size; restore the file from a copy"
)
"""Bounds of what benchctl stores of it."""


def size_problem(num_bytes: int, bounds: Bounds = WRITTEN) -> str:
    """The problem of a document that is too large."""
    return f"has {num_bytes / 1e6:.1f} MB, more than {bounds.num_bytes / 1e6:.0f} MB; {bounds.remedy}"


_STANDARD: Final = "tag:yaml.org,2002:"
_CORE_SCHEMA: Final = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)
"""Types of plain text beside text itself: name, form and first characters."""
_SCALARS: Final[Mapping[str, Callable[[str], str | int | float | bool | None]]] = {
    "str": str,
    "bool": lambda text: text.lower() == "true",
    "null": lambda _: None,
    "int": int,
    "float": float,
}


class _Reader(yaml.SafeLoader):
    """Composes the nodes of a text and turns them into values.

    It collects the locations of the values, and what the dialect refuses.
    """

    def __init__(self, text: str, source: str, bounds: Bounds, *, has_lines: bool) -> None:
        # Characters are counted where encoding the text would cost more than reading it: a byte holds one at most.
        if len(text) > bounds.num_bytes:
            raise yaml.YAMLError(size_problem(len(text), bounds))
        super().__init__(text)
        self.errors, self.locations = list[LocatedError](), dict[Steps, Location]()
        self._source, self._bounds, self._has_lines = source, bounds, has_lines
        self._num_nodes, self._depth = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_nodes += 1
        limits = (
            (
                self.check_event(yaml.AliasEvent),
                "aliases (*name) are not supported; write the value out, or share it with extends",
            ),
            (
                self._num_nodes > self._bounds.num_nodes,
                f"more than {self._bounds.num_nodes:,} keys and values; {self._bounds.remedy}",
            ),
            (self._depth > PROFILE_DEPTH, f"nested more than {PROFILE_DEPTH} deep; write it flatter"),
        )
        for is_beyond, problem in limits:
            if is_beyond:
                event: Any = self.peek_event()  # type: ignore[no-untyped-call]
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def value(self, node: yaml.Node, path: Steps) -> Any:
        self.locations.setdefault(path, self._location(node, path))
        kind = node.tag.removeprefix(_STANDARD)
        if kind not in (_SCALARS if isinstance(node, yaml.ScalarNode) else ("map", "seq")):
            tag = node.tag.replace(_STANDARD, "!!")
            self._refuse(node, path, f"the tag {tag} is not supported; write the plain value")
        if isinstance(node, yaml.MappingNode):
            return {key: self.value(below, (*path, key)) for key, below in self._entries(node, path)}
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        try:
            value = _SCALARS[kind](node.value) if kind in _SCALARS else None
        except ValueError:
            value = float("inf")
        if isinstance(value, float) and isinf(value):
            self._refuse(node, path, f"{value_text(node.value)} is not a number that can be stored; write another")
            return None
        return value

    def _entries(self, node: yaml.MappingNode, path: Steps) -> Iterator[tuple[str, yaml.Node]]:
        """The keys of a mapping with the nodes of their values, without those that are refused."""
        keys = set[str]()
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                self._refuse(key_node, path, "a key is a list or a mapping; write plain text before the ':'")
            elif key in keys:
                problem = f"written twice, first in line {self.locations[*path, key].line}; remove one of the two"
                self._refuse(key_node, (*path, key), problem)
            else:
                # An error of an entry is located at its key, also when its value begins on the next line.
                self.locations[*path, key] = self._location(key_node, (*path, key))
                keys.add(key)
                yield key, value_node

    def _location(self, node: yaml.Node, path: Steps) -> Location:
        return Location(self._source, node.start_mark.line + 1 if self._has_lines else None, path)

    def _refuse(self, node: yaml.Node, path: Steps, problem: str) -> None:
        self.errors.append(LocatedError(self._location(node, path), problem, hides_keys=not self._has_lines))


class _Dumper(yaml.SafeDumper):
    """Writes the dialect: text that would be read as another type is quoted."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with a rare line break is escaped: in any other style a reader takes it for a space."""
    style = '"' if any(character in text for character in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(f"{_STANDARD}str", text, style=style)


_Dumper.add_representer(str, _text_node)
_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
for _name, _pattern, _first_characters in _CORE_SCHEMA:
    for _character in _first_characters:
        _resolvers.setdefault(_character, []).append((f"{_STANDARD}{_name}", re.compile(rf"^(?:{_pattern})\Z")))
_Reader.yaml_implicit_resolvers = _Dumper.yaml_implicit_resolvers = _resolvers


def read_document(
    text: str, source: str, errors: list[LocatedError], bounds: Bounds = WRITTEN, *, path: Steps = ()
) -> Document:
    """Read one YAML document, which must be a mapping; an empty one where it cannot be read.

    With ``path`` the text is a value of the command line, whatever its type, at this path. What the dialect
    refuses, and what is beyond ``bounds``, is added to ``errors``, and left out of the result.
    """
    location = Location(source, None if path else 1, path)
    what = f"{value_text(text)} is not readable as a YAML value" if path else "not readable as YAML"
    try:
        reader = _Reader(text, source, bounds, has_lines=not path)
        root = reader.get_single_node()
        values = None if root is None else reader.value(root, path)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError):
            problem = f"{error.context}, {error.problem}" if error.context else str(error.problem)
            mark = error.problem_mark or error.context_mark
            if mark and not path:
                location = replace(location, line=mark.line + 1)
        errors.append(LocatedError(location, f"{what}: {problem}", hides_keys=True))
        return Document({}, {(): location})
    errors += reader.errors
    if path:
        return plain_document({} if reader.errors else replaced({}, path, values), source)
    if isinstance(values, dict):
        return Document(values, reader.locations)
    location = reader.locations.get((), location)
    content = "nothing" if root is None else "a list" if isinstance(values, list) else "a single value"
    problem = f"found {content} where a profile is a mapping; write keys such as 'workload:'"
    errors.append(LocatedError(location, problem, hides_keys=True))
    return Document({}, {(): location})


def dump_document(document: Mapping[str, Any]) -> str:
    """The YAML text of a document of plain values, in the order given."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


MAX_TEXT: Final = 65_536
"""Characters of one text; a word of a command line can have 128 KiB."""
MAX_PATH: Final = 4096
"""Bytes of a name or path, as Linux has them."""
MAX_PATH_PART: Final = 255
MAX_KEY: Final = 256
_MOST_INT: Final = 2**63 - 1
_LONGEST_INT: Final = 10**60
"""Of keys with a range, whose own message says more."""
_TEXTS: Final = frozenset(
    {"description", "extra_body", "response_format", "structured_outputs", "chat_template_kwargs"}
)
"""Keys below which a text may have lines, such as a grammar."""
_FREE: Final = _TEXTS | {"sweep", "cells"}
"""Keys below which a number has no range of its own."""
_WORDS: Final = frozenset({"extra_args", "env", "headers", "setup", "speculative_config"})
"""Keys below which a text is on one line, and no path."""


def plain_value_problems(values: dict[str, Any]) -> Iterator[Problem]:
    """Every value and key of a profile that is beyond these bounds."""
    for path, value in values_in(values):
        key = path[-1] if path else ""
        if isinstance(key, str) and (len(key) > MAX_KEY or visible_line(key) != key):
            yield path[:-1], f"{value_text(key)} has control characters or more than {MAX_KEY} of any; rename it"
        elif (refusal := _problem(value, path)) is not None:
            yield path, refusal


def _problem(value: object, path: Steps) -> str | None:
    steps = set(path)
    if path[:1] == ("sweep",):  # a factor is a path of its own
        steps.update(*(str(factor).split(".") for factor in path[1:2]))
    if isinstance(value, str):
        return text_problem(value, steps)
    if isinstance(value, int) and abs(value) > (_MOST_INT if steps & _FREE else _LONGEST_INT):
        return f"is {value_text(value)}; a whole number has 64 bits at most"
    if isinstance(value, float) and not isfinite(value):
        return f"is {value}, and no setting is; write a finite number"
    if isinstance(value, dict | list) and len(path) > PROFILE_DEPTH:
        return f"is nested more than {PROFILE_DEPTH} deep; write it flatter"
    return None


def text_problem(text: str, steps: AbstractSet[Step] = frozenset()) -> str | None:
    """The problem of a text that has these keys on its path; None where it can be passed on."""
    if len(text) > MAX_TEXT:
        return f"has {len(text):,} characters, more than {MAX_TEXT:,}; shorten it"
    if text != (visible(text, MAX_TEXT) if steps & _TEXTS else visible_line(text, MAX_TEXT)):
        return f"is {value_text(text)}, which has control characters; remove them"
    if steps & (_TEXTS | _WORDS):
        return None
    if not text.strip():
        return f"is {value_text(text)}, which names nothing; write a name, or leave the key out"
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_PATH_PART or len(text.encode()) > MAX_PATH:
        return f"is {value_text(text)}, longer than a name ({MAX_PATH_PART} bytes) or a path can be; shorten it"
    return None
