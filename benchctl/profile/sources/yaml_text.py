"""YAML text as located values, and plain values as YAML text.

The dialect is YAML 1.2's core schema and less: plain ``yes``, ``1:30`` or ``2026-01-01`` are text, ``1e3`` is a
number, keys are text and appear once, and there are no aliases, no tags and no merge keys. A profile shares with
another by ``extends``.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import yaml

from benchctl.profile.sources.located import (
    LocatedDict,
    LocatedError,
    LocatedList,
    Location,
    Step,
    located,
    value_text,
)
from benchctl.untrusted.limits import (
    PROFILE_BYTES,
    PROFILE_DEPTH,
    PROFILE_NODES,
    STORED_PROFILE_BYTES,
    STORED_PROFILE_NODES,
)


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


def read_document(text: str, source: str, errors: list[LocatedError], bounds: Bounds = WRITTEN) -> LocatedDict:
    """Read one YAML document, which must be a mapping; an empty one where it cannot be read.

    What the dialect refuses, and what is beyond ``bounds``, is added to ``errors``, and left out of the result.
    """
    try:
        root = _compose(text, bounds)
    except _SyntaxProblem as error:
        errors.append(LocatedError(Location(source, error.line), f"not readable as YAML: {error}"))
        return LocatedDict({}, Location(source, 1))
    if isinstance(root, yaml.MappingNode):
        return _Reader(source, errors).mapping(root, ())
    line = root.start_mark.line + 1 if root else 1
    content = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
    problem = f"found {content} where a profile is a mapping; write keys such as 'workload:'"
    errors.append(LocatedError(Location(source, line), problem))
    return LocatedDict({}, Location(source, 1))


def read_value(text: str, location: Location, errors: list[LocatedError]) -> Any:
    """Read one YAML value of the command line; all of it is at ``location``."""
    try:
        root = _compose(text, WRITTEN)
    except _SyntaxProblem as error:
        errors.append(LocatedError(location, f"{value_text(text)} is not readable as a YAML value: {error}"))
        return None
    inner_errors: list[LocatedError] = []
    value = None if root is None else _Reader(location.source, inner_errors).value(root, location.path)
    errors += (replace(error, location=replace(error.location, line=None)) for error in inner_errors)
    return located(value, location)


def dump_document(document: Mapping[str, Any]) -> str:
    """The YAML text of a document of plain values, in the order given."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def size_problem(num_bytes: int, bounds: Bounds = WRITTEN) -> str:
    """The problem of a document that is too large."""
    return f"has {num_bytes / 1e6:.1f} MB, more than {bounds.num_bytes / 1e6:.0f} MB; {bounds.remedy}"


class _SyntaxProblem(Exception):  # noqa: N818  # never leaves this file
    """A text that is not YAML."""

    def __init__(self, problem: str, line: int = 1) -> None:
        super().__init__(problem)
        self.line = line


def _compose(text: str, bounds: Bounds) -> yaml.Node | None:
    # Characters are counted where encoding the text would cost more than reading it: a byte holds one at most.
    if len(text) > bounds.num_bytes:
        raise _SyntaxProblem(size_problem(len(text), bounds))
    composer = None
    try:
        composer = _Composer(text, bounds)
        return composer.get_single_node()
    except RecursionError:
        raise _SyntaxProblem("nested too deeply; write it flatter") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f"{error.context}, " if error.context else ""
        raise _SyntaxProblem(f"{context}{error.problem}", mark.line + 1 if mark else 1) from error
    except yaml.YAMLError as error:
        raise _SyntaxProblem(" ".join(str(error).split())) from error
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


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns composed YAML nodes into located values and collects what the dialect refuses."""

    source: str
    errors: list[LocatedError]

    def value(self, node: yaml.Node, path: tuple[Step, ...]) -> Any:
        kind, is_scalar = node.tag.removeprefix(_STANDARD), isinstance(node, yaml.ScalarNode)
        if kind not in (_SCALARS if is_scalar else ("map", "seq")):
            tag = node.tag.replace(_STANDARD, "!!")
            self._refuse(node, path, f"the tag {tag} is not supported; write the plain value")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            locations = [self._location(item, (*path, i)) for i, item in enumerate(node.value)]
            return LocatedList([self.value(item, (*path, i)) for i, item in enumerate(node.value)], locations)
        try:
            return _SCALARS[kind](node.value) if kind in _SCALARS else None
        except ValueError:
            self._refuse(node, path, f"{value_text(node.value)} is not a number that can be stored; write another")
            return None

    def mapping(self, node: yaml.MappingNode, path: tuple[Step, ...]) -> LocatedDict:
        values, locations = dict[str, Any](), dict[str, Location]()
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key, str):
                self._refuse(key_node, path, "a key is a list or a mapping; write plain text before the ':'")
            elif key in values:
                problem = f"written twice, first in line {locations[key].line}; remove one of the two"
                self._refuse(key_node, (*path, key), problem)
            else:
                # An error of an entry is located at its key, also when its value begins on the next line.
                locations[key] = self._location(key_node, (*path, key))
                values[key] = self.value(value_node, (*path, key))
                if isinstance(values[key], LocatedDict):
                    values[key].location = locations[key]
        return LocatedDict(values, self._location(node, path), locations)

    def _location(self, node: yaml.Node, path: tuple[Step, ...]) -> Location:
        return Location(self.source, node.start_mark.line + 1, path)

    def _refuse(self, node: yaml.Node, path: tuple[Step, ...], problem: str) -> None:
        self.errors.append(LocatedError(self._location(node, path), problem))
