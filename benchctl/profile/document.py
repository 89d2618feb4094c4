"""YAML text as a tree that remembers where each value was written.

The dialect is YAML 1.2's core schema and less: plain ``yes``, ``1:30`` or ``2026-01-01`` are text, ``1e3`` is a
number, keys are text and appear once, and there are no aliases, no tags and no merge keys. What a profile
shares with another it says with ``extends``.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import yaml

Step: TypeAlias = str | int
Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written: a file's line, or the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a profile. ``problem`` names the value and the remedy."""

    place: Place
    path: tuple[Step, ...]
    problem: str
    is_absence: bool = False
    """Whether the fault is that something was not written at all."""

    def __str__(self) -> str:
        where = f"{path_text(self.path)}: " if self.path else ""
        return f"{self.place}: {where}{self.problem}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value, where it was written, and under which path it was written there."""

    value: "Mapping[str, Node] | tuple[Node, ...] | Scalar"
    place: Place
    path: tuple[Step, ...] = ()

    def entries(self) -> "Mapping[str, Node]":
        """The entries of a mapping; none when this is no mapping."""
        return self.value if isinstance(self.value, Mapping) else {}

    def child(self, step: Step) -> "Node | None":
        """The entry of a mapping, or the item of a list, at ``step``."""
        if isinstance(self.value, Mapping):
            return self.value.get(str(step))
        if isinstance(self.value, tuple) and isinstance(step, int) and step < len(self.value):
            return self.value[step]
        return None

    def plain(self) -> Any:  # any JSON value
        """The value alone, as JSON knows it."""
        if isinstance(self.value, Mapping):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value

    def with_entries(self, entries: "Mapping[str, Node]") -> "Node":
        return replace(self, value=entries)


def path_text(path: tuple[Step, ...]) -> str:
    """``workload.arrival.kind``, ``sweep.top_k[2]``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def node_from_plain(value: Any, place: Place, path: tuple[Step, ...] = ()) -> Node:  # any JSON value
    """A tree whose values all stand at one place."""
    if isinstance(value, Mapping):
        return Node(
            {str(key): node_from_plain(item, place, (*path, str(key))) for key, item in value.items()}, place, path
        )
    if isinstance(value, list | tuple):
        return Node(tuple(node_from_plain(item, place, (*path, i)) for i, item in enumerate(value)), place, path)
    return Node(value, place, path)


def merge(below: Node | None, above: Node) -> Node:
    """Mappings merge key by key; anything else in ``above`` replaces what is below it."""
    if below is None or not isinstance(below.value, Mapping) or not isinstance(above.value, Mapping):
        return above
    merged = dict(below.value)
    for key, node in above.value.items():
        merged[key] = merge(merged.get(key), node)
    return above.with_entries(merged)


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
_COLLECTION_TAGS: Final = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first_characters in _CORE_SCHEMA:
        for character in first_characters:
            key = "" if character == "\0" else character
            resolvers.setdefault(key, []).append((tag, re.compile(rf"^(?:{pattern})\Z")))
    return resolvers


class _Composer(yaml.SafeLoader):
    """Composes nodes of the dialect; values are made from them by ``_Reader``."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.get_event()  # type: ignore[no-untyped-call]
            problem = "aliases (*name) are not read; write the value out, or share it with extends"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes the dialect: whatever would be read as another type is quoted."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Text with a rare line break is escaped: in any other style a reader takes it for a space."""
    style = '"' if any(character in text for character in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_node)
_Composer.yaml_implicit_resolvers = _implicit_resolvers()
_Dumper.yaml_implicit_resolvers = _implicit_resolvers()


def read_document(text: str, source: str) -> tuple[Node, tuple[Fault, ...]]:
    """Read one YAML document, which must be a mapping.

    Returns the tree with what was wrong in it; a text that is no YAML, or no mapping, gives an empty mapping.
    """
    empty = Node({}, Place(source, 1))
    try:
        root = _compose(text)
    except yaml.YAMLError as error:
        line, problem = _syntax_problem(error)
        return empty, (Fault(Place(source, line), (), f"not readable as YAML: {problem}"),)
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1 if root else 1
        found = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        problem = f"found {found} where a profile is a mapping; write keys such as 'workload:'"
        return empty, (Fault(Place(source, line), (), problem),)
    reader = _Reader(source, [])
    return reader.node(root, ()), tuple(reader.faults)


def read_value(text: str, place: Place, path: tuple[Step, ...]) -> tuple[Node, tuple[Fault, ...]]:
    """Read one YAML value given on the command line; it stands at ``place`` whatever its own lines say."""
    try:
        root = _compose(text)
    except yaml.YAMLError as error:
        problem = f"{text!r} is not readable as a YAML value: {_syntax_problem(error)[1]}"
        return Node(None, place, path), (Fault(place, path, problem),)
    if root is None:
        return Node(None, place, path), ()
    reader = _Reader(place.source, [])
    node = reader.node(root, path)
    return node_from_plain(node.plain(), place, path), tuple(replace(fault, place=place) for fault in reader.faults)


def dump_document(document: Mapping[str, Any]) -> str:
    """The YAML text of a document of plain values, in the order given."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _syntax_problem(error: yaml.YAMLError) -> tuple[int, str]:
    """The line of a syntax error, and what it is."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return 1, " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    context = f"{error.context}, " if error.context else ""
    return mark.line + 1 if mark else 1, f"{context}{error.problem}"


def _compose(text: str) -> yaml.Node | None:
    composer = _Composer(text)
    try:
        return composer.get_single_node()
    except RecursionError:
        raise yaml.YAMLError("nested deeper than any profile; write it flatter") from None
    finally:
        composer.dispose()


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns composed YAML nodes into ours and collects what the dialect refuses."""

    source: str
    faults: list[Fault]

    def node(self, node: yaml.Node, path: tuple[Step, ...]) -> Node:
        place = Place(self.source, node.start_mark.line + 1)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTION_TAGS:
            self._refuse_tag(node.tag, place, path)
        if isinstance(node, yaml.MappingNode):
            return Node(dict(self._entries(node, path)), place, path)
        if isinstance(node, yaml.SequenceNode):
            return Node(tuple(self.node(item, (*path, i)) for i, item in enumerate(node.value)), place, path)
        return Node(self._scalar(node, place, path), place, path)

    def _entries(self, node: yaml.MappingNode, path: tuple[Step, ...]) -> Iterator[tuple[str, Node]]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            place = Place(self.source, key_node.start_mark.line + 1)
            key = key_node.value
            if not isinstance(key, str):
                self.faults.append(
                    Fault(place, path, "a key is a list or a mapping; write plain text before the ':'")
                )
            elif key in lines:
                problem = f"written twice, first in line {lines[key]}; remove one of the two"
                self.faults.append(Fault(place, (*path, key), problem))
            else:
                lines[key] = key_node.start_mark.line + 1
                # A fault of an entry is found where its key stands, also when its value begins on the next line.
                yield key, replace(self.node(value_node, (*path, key)), place=place)

    def _scalar(self, node: yaml.Node, place: Place, path: tuple[Step, ...]) -> Scalar:
        text = str(node.value)
        match node.tag.removeprefix("tag:yaml.org,2002:"):
            case "str":
                return text
            case "bool":
                return text.lower() == "true"
            case "null":
                return None
            case "int" | "float" as kind:
                try:
                    return int(text) if kind == "int" else _finite(text)
                except ValueError:
                    self.faults.append(Fault(place, path, f"{text!r} is no number that can be kept; write another"))
                    return None
            case _:
                self._refuse_tag(node.tag, place, path)
                return None

    def _refuse_tag(self, tag: str, place: Place, path: tuple[Step, ...]) -> None:
        short = tag.replace("tag:yaml.org,2002:", "!!")
        self.faults.append(Fault(place, path, f"the tag {short} is not read; write the plain value"))


def _finite(text: str) -> float:
    value = float(text)
    if value in {float("inf"), float("-inf")}:
        raise ValueError(text)
    return value
