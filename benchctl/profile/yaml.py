"""YAML text as plain values with the location of each beside them, and plain values as YAML text.

Every value of a profile, whatever its key, is bounded: numbers have 64 bits, and texts can be passed on.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, NoReturn, TypeAlias

import yaml

from benchctl.untrusted.limits import (
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

    def below(self, *steps: Step) -> "Location":
        """The same line, for a value further down."""
        return replace(self, path=(*self.path, *steps))

    def __str__(self) -> str:
        line = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{line}: {dotted(self.path)}" if self.path else line


@dataclass(frozen=True, slots=True)
class LocatedError:
    """One error of a profile. ``problem`` names the value and the remedy."""

    location: Location
    problem: str

    def __str__(self) -> str:
        return f"{self.location}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping of plain values, and the location at which each of them was written, by its path."""

    values: dict[str, Any]
    locations: Mapping[Steps, Location]

    def get(self, *path: str) -> Any:
        """The value at a path; None where there is none."""
        value: Any = self.values
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def mapping(self, *path: str) -> dict[str, Any]:
        """The mapping at a path; an empty one where there is none."""
        value = self.get(*path)
        return value if isinstance(value, dict) else {}

    def location(self, path: Steps) -> Location:
        """The location of the value at a path; for one that is missing, below that of the nearest around it."""
        depth = next(depth for depth in range(len(path), -1, -1) if path[:depth] in self.locations)
        return self.locations[path[:depth]].below(*path[depth:])

    def error(self, problem: str, *path: Step) -> LocatedError:
        """An error of the value at a path."""
        return LocatedError(self.location(path), problem)

    def errors(self, problems: Iterable[Problem]) -> list[LocatedError]:
        """These problems where they were written."""
        return [self.error(problem, *path) for path, problem in problems]

    def with_value(self, path: Steps, value: Any, location: Location | None = None) -> "Document":
        """A copy with one value set, at ``location`` if that is given."""
        locations = self.locations if location is None else {**self.locations, path: location}
        return Document(replaced(self.values, path, value), locations)

    def without(self, *path: str) -> "Document":
        """A copy without the value at a path."""
        locations = {steps: location for steps, location in self.locations.items() if steps[: len(path)] != path}
        return Document(left_out(self.values, path), locations)

    def part(self, *path: str) -> "Document":
        """The mapping at a path by itself."""
        locations = {
            steps[len(path) :]: location for steps, location in self.locations.items() if steps[: len(path)] == path
        }
        return Document(self.mapping(*path), {(): self.location(path), **locations})

    def over(self, below: "Document") -> "Document":
        """This document laid over another: mappings merge key by key, any other value replaces what is below it."""
        values = merged(below.values, self.values)
        locations = {**below.locations, **self.locations}
        return Document(
            values, {path: location for path, location in locations.items() if follow(values, path)[1] == path}
        )


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
    key, deeper = path[0], path[1:]
    if not deeper:
        return {name: value for name, value in values.items() if name != key}
    below = values.get(str(key))
    return {**values, str(key): left_out(below, deeper)} if isinstance(below, dict) else values


def plain_document(values: Mapping[str, Any], source: str) -> Document:
    """A document of plain values that were not read from text."""
    locations: dict[Steps, Location] = {}

    def plain(value: Any, path: Steps) -> Any:
        locations[path] = Location(source, path=path)
        if isinstance(value, Mapping):
            return {str(key): plain(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, (*path, i)) for i, item in enumerate(value)]
        return value

    return Document(plain(values, ()), locations)


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

_CORE_SCHEMA: Final = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
)


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _CORE_SCHEMA:
        for character in first_characters:
            key = "" if character == "\0" else character
            resolvers.setdefault(key, []).append((tag, re.compile(rf"^(?:{pattern})\Z")))
    return resolvers


class _Composer(yaml.SafeLoader):
    """Composes nodes of the dialect; ``_Reader`` turns them into values."""

    def __init__(self, text: str, bounds: Bounds) -> None:
        super().__init__(text)
        self._bounds, self._num_nodes, self._depth = bounds, 0, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            self._refuse("aliases (*name) are not supported; write the value out, or share it with extends")
        self._num_nodes += 1
        if self._num_nodes > self._bounds.num_nodes:
            self._refuse(f"more than {self._bounds.num_nodes:,} keys and values; {self._bounds.remedy}")
        if self._depth > PROFILE_DEPTH:
            self._refuse(f"nested more than {PROFILE_DEPTH} deep; write it flatter")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refuse(self, problem: str) -> NoReturn:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Writes the dialect: text that would be read as another type is quoted."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with a rare line break is escaped: in any other style a reader takes it for a space."""
    style = '"' if any(character in text for character in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)
_Composer.yaml_implicit_resolvers = _implicit_resolvers()
_Dumper.yaml_implicit_resolvers = _implicit_resolvers()


def read_document(text: str, source: str, errors: list[LocatedError], bounds: Bounds = WRITTEN) -> Document:
    """Read one YAML document, which must be a mapping; an empty one where it cannot be read.

    What the dialect refuses, and what is beyond ``bounds``, is added to ``errors``, and left out of the result.
    """
    reader = _Reader(source, errors)
    root, syntax = _compose(text, bounds)
    if syntax is not None:
        errors.append(LocatedError(Location(source, syntax[1]), f"not readable as YAML: {syntax[0]}"))
        return Document({}, {(): Location(source, 1)})
    if isinstance(root, yaml.MappingNode):
        return Document(reader.value(root, ()), reader.locations | {(): reader.location(root, ())})
    line = root.start_mark.line + 1 if root else 1
    content = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
    problem = f"found {content} where a profile is a mapping; write keys such as 'workload:'"
    errors.append(LocatedError(Location(source, line), problem))
    return Document({}, {(): Location(source, 1)})


def read_value(text: str, location: Location, errors: list[LocatedError]) -> Any:
    """Read one YAML value of the command line; all of it is at ``location``."""
    root, syntax = _compose(text, WRITTEN)
    if syntax is not None:
        errors.append(LocatedError(location, f"{value_text(text)} is not readable as a YAML value: {syntax[0]}"))
        return None
    reader = _Reader(location.source, [])
    value = None if root is None else reader.value(root, location.path)
    errors += (replace(error, location=replace(error.location, line=None)) for error in reader.errors)
    return value


def dump_document(document: Mapping[str, Any]) -> str:
    """The YAML text of a document of plain values, in the order given."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def size_problem(num_bytes: int, bounds: Bounds = WRITTEN) -> str:
    """The problem of a document that is too large."""
    return f"has {num_bytes / 1e6:.1f} MB, more than {bounds.num_bytes / 1e6:.0f} MB; {bounds.remedy}"


def _compose(text: str, bounds: Bounds) -> tuple[yaml.Node | None, tuple[str, int] | None]:
    """The root of a text that is YAML; of any other the problem and its line."""
    # Characters are counted where encoding the text would cost more than reading it: a byte holds one at most.
    if len(text) > bounds.num_bytes:
        return None, (size_problem(len(text), bounds), 1)
    composer = None
    try:
        composer = _Composer(text, bounds)
        return composer.get_single_node(), None
    except RecursionError:
        return None, ("nested too deeply; write it flatter", 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f"{error.context}, " if error.context else ""
        return None, (f"{context}{error.problem}", mark.line + 1 if mark else 1)
    except yaml.YAMLError as error:
        return None, (" ".join(str(error).split()), 1)
    finally:
        if composer is not None:
            composer.dispose()


def _finite(text: str) -> float:
    value = float(text)
    if value in {float("inf"), float("-inf")}:
        raise ValueError(text)
    return value


_STANDARD: Final = "tag:yaml.org,2002:"
_SCALARS: Final[Mapping[str, Callable[[str], str | int | float | bool | None]]] = {
    "str": str,
    "bool": lambda text: text.lower() == "true",
    "null": lambda _: None,
    "int": int,
    "float": _finite,
}


class _Reader:
    """Turns composed YAML nodes into values; collects their locations, and what the dialect refuses."""

    def __init__(self, source: str, errors: list[LocatedError]) -> None:
        self.source, self.errors, self.locations = source, errors, dict[Steps, Location]()

    def value(self, node: yaml.Node, path: Steps) -> Any:
        kind, is_scalar = node.tag.removeprefix(_STANDARD), isinstance(node, yaml.ScalarNode)
        if kind not in (_SCALARS if is_scalar else ("map", "seq")):
            tag = node.tag.replace(_STANDARD, "!!")
            self._refuse(node, path, f"the tag {tag} is not supported; write the plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            self.locations |= {(*path, i): self.location(item, (*path, i)) for i, item in enumerate(node.value)}
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        try:
            return _SCALARS[kind](node.value) if kind in _SCALARS else None
        except ValueError:
            self._refuse(node, path, f"{value_text(node.value)} is not a number that can be stored; write another")
            return None

    def location(self, node: yaml.Node, path: Steps) -> Location:
        return Location(self.source, node.start_mark.line + 1, path)

    def _mapping(self, node: yaml.MappingNode, path: Steps) -> dict[str, Any]:
        values = dict[str, Any]()
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                self._refuse(key_node, path, "a key is a list or a mapping; write plain text before the ':'")
            elif key in values:
                problem = f"written twice, first in line {self.locations[*path, key].line}; remove one of the two"
                self._refuse(key_node, (*path, key), problem)
            else:
                # An error of an entry is located at its key, also when its value begins on the next line.
                self.locations[*path, key] = self.location(key_node, (*path, key))
                values[key] = self.value(value_node, (*path, key))
        return values

    def _refuse(self, node: yaml.Node, path: Steps, problem: str) -> None:
        self.errors.append(LocatedError(self.location(node, path), problem))


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


def plain_value_problems(value: Any, path: Steps = ()) -> Iterator[Problem]:
    """Every value and key of a profile that is beyond these bounds."""
    if isinstance(value, dict | list) and len(path) > PROFILE_DEPTH:
        yield path, f"is nested more than {PROFILE_DEPTH} deep; write it flatter"
    elif isinstance(value, dict):
        for key, item in value.items():
            if len(key) > MAX_KEY or visible_line(key) != key:
                problem = f"{value_text(key)} has control characters or more than {MAX_KEY} of any; rename it"
                yield path, problem
            else:
                yield from plain_value_problems(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from plain_value_problems(item, (*path, i))
    elif (refusal := _problem(value, path)) is not None:
        yield path, refusal


def _problem(value: object, path: Steps) -> str | None:
    steps = set(path)
    if path[:1] == ("sweep",):  # a factor is a path of its own
        steps.update(*(str(factor).split(".") for factor in path[1:2]))
    if isinstance(value, str):
        return _text_problem(value, steps)
    if isinstance(value, int) and abs(value) > (_MOST_INT if steps & _FREE else _LONGEST_INT):
        return f"is {value_text(value)}; a whole number has 64 bits at most"
    if isinstance(value, float) and not isfinite(value):
        return f"is {value}, and no setting is; write a finite number"
    return None


def _text_problem(text: str, steps: set[Step]) -> str | None:
    if len(text) > MAX_TEXT:
        return f"has {len(text):,} characters, more than {MAX_TEXT:,}; shorten it"
    if steps & _TEXTS:
        return _control_problem(text, visible(text, MAX_TEXT))
    if problem := _control_problem(text, visible_line(text, MAX_TEXT)):
        return problem
    if steps & _WORDS:
        return None
    if not text.strip():
        return f"is {value_text(text)}, which names nothing; write a name, or leave the key out"
    longest = max(len(part.encode()) for part in text.split("/"))
    if longest > MAX_PATH_PART or len(text.encode()) > MAX_PATH:
        return f"is {value_text(text)}, longer than a name ({MAX_PATH_PART} bytes) or a path can be; shorten it"
    return None


def _control_problem(text: str, escaped: str) -> str | None:
    if escaped == text:
        return None
    return f"is {value_text(text)}, which has control characters; remove them"
