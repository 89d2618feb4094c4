"""Validation of a tree against a model, every fault told in the profile's own terms."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from benchctl.errors import ProfileError
from benchctl.profile.document import Fault, Node, Step, path_text
from benchctl.profile.keys import profile_keys, section_at
from benchctl.profile.locate import nearest
from benchctl.profile.section import Section, meanings

S = TypeVar("S", bound=Section)

_EXPECTED: Final = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_BOUNDS: Final = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True, slots=True)
class _Found:
    """One error of pydantic at its place: the nearest node that exists, and what follows below it."""

    node: Node
    rest: tuple[Step, ...]
    location: tuple[Step, ...]
    error: ErrorDetails

    @property
    def path(self) -> tuple[Step, ...]:
        return (*self.node.path, *self.rest)


def validate(tree: Node, model: type[S]) -> tuple[S | None, tuple[Fault, ...]]:
    """The valid section, or None and every fault."""
    try:
        # Through JSON, because strict models take a list for a tuple there and nowhere else.
        return model.model_validate_json(json.dumps(tree.plain())), ()
    except ValidationError as error:
        found = [_locate(tree, details) for details in error.errors(include_url=False)]
        return None, tuple(_faults(model, found))


def profile_error(faults: Iterable[Fault]) -> ProfileError:
    """One error with a line for each fault, in the order of the files' lines."""
    lines = [str(fault) for fault in sorted(set(faults), key=_reading_order)]
    heading = (f"{len(lines)} faults in the profile",) if len(lines) > 1 else ()
    return ProfileError("\n".join((*heading, *lines)))


def shown(value: object) -> str:
    """A value as messages show it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reading_order(fault: Fault) -> tuple[str, int, str]:
    return fault.place.source, fault.place.line or 0, str(fault)


def _locate(tree: Node, error: ErrorDetails) -> _Found:
    """Follow an error's location down the tree.

    Pydantic puts the names of union members and marks such as ``[key]`` among the keys; what the tree does not
    hold is dropped, but for the last step of a missing key.
    """
    node, location = tree, []
    for step in error["loc"]:
        child = node.child(step)
        if child is not None:
            node = child
            location.append(step)
    rest = error["loc"][-1:] if error["type"] == "missing" else ()
    return _Found(node, rest, (*location, *rest), error)


def _faults(model: type[Section], found: list[_Found]) -> Iterable[Fault]:
    by_location: dict[tuple[Step, ...], list[_Found]] = {}
    for item in found:
        by_location.setdefault(item.location, []).append(item)
    for location, items in by_location.items():
        types = [_EXPECTED[item.error["type"]] for item in items if item.error["type"] in _EXPECTED]
        if len(types) == len(items):
            deeper = any(len(other) > len(location) and other[: len(location)] == location for other in by_location)
            # A mapping where a number or a mapping may stand: what is wrong inside it says more.
            if not deeper:
                yield Fault(items[0].node.place, items[0].path, _wrong_type(types, items[0].node.plain()))
            continue
        for item in items:
            if not _is_echo(item, items):
                is_absence = item.error["type"] == "missing"
                yield Fault(item.node.place, item.path, _problem(model, item, types), is_absence)


def _is_echo(item: _Found, items: list[_Found]) -> bool:
    """Whether an error only follows from others.

    That is the type error of the union member that was not meant, a word that was expected in place of a number
    which is out of bounds, a list too short because its items are wrong, and an error of the whole profile, which
    ``checks`` finds with its line.
    """
    kind = item.error["type"]
    if kind == "too_short":
        return bool(item.node.value)
    if kind == "literal_error":
        return any(other.error["type"] in _BOUNDS for other in items)
    return (kind in _EXPECTED and len(items) > 1) or (kind == "value_error" and not item.location)


def _wrong_type(expected: list[str], value: object) -> str:
    wanted = " or ".join(dict.fromkeys(expected))
    number = isinstance(value, str) and value.lstrip("-").replace(".", "", 1).isdigit()
    remedy = "; remove the quotes" if number and any("number" in word for word in expected) else ""
    if value is None and "a mapping" in expected:
        remedy = "; write {} where nothing is to be set"
    return f"expected {wanted}, found {shown(value)}{remedy}"


def _problem(model: type[Section], item: _Found, types: Sequence[str]) -> str:
    """What is wrong; ``types`` would have been right in its place, too."""
    error, value = item.error, shown(item.node.plain())
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return unknown_key(str(item.location[-1]), section_at(model, item.location[:-1]))
        case "missing":
            return _missing(model, item.location)
        case "literal_error":
            field = _field_at(model, item.location)
            return not_among(item.node.plain(), (*(_choices(field) if field else ()), *types))
        case "string_pattern_mismatch":
            name = shown(item.location[-1] if error["loc"][-1] == "[key]" else item.node.plain())
            return f"{name} is no name; write lower-case letters, digits, '.', '_' and '-', first a letter or digit"
        case "too_short":
            return "is empty; give at least one, or remove the key"
        case "value_error":
            return str(context["error"])
        case _ if kind in _BOUNDS:
            key, word = _BOUNDS[kind]
            return f"is {value}; it must be {word} {context[key]:.10g}"
        case _:
            return f"is {value}: {error['msg']}"


def unknown_key(key: str, section: type[Section] | None) -> str:
    """What to say of a key that a section does not have."""
    known = list(section.model_fields) if section else []
    near = nearest(key, known)
    if near:
        return f"unknown key; did you mean {near!r}?"
    elsewhere = [
        k.path.rpartition(".")[0] or "the top level" for k in profile_keys() if k.path.split(".")[-1] == key
    ]
    if elsewhere:
        return f"unknown key here; it belongs to {' or '.join(elsewhere)}"
    return f"unknown key; known keys here are {', '.join(known)}"


def not_among(value: object, choices: Iterable[str]) -> str:
    """What to say of a value that is none of the allowed ones."""
    known = list(choices)
    near = nearest(value, known) if isinstance(value, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    return f"is {shown(value)}; allowed are {', '.join(known)}{hint}"


def _missing(model: type[Section], location: tuple[Step, ...]) -> str:
    field = _field_at(model, location)
    choices = ", ".join(_choices(field)) if field else ""
    section = section_at(model, location[:-1])
    meaning = meanings(section).get(str(location[-1]), "").rstrip(".") if section else ""
    return f"missing; add {path_text(location[-1:])}: {f'one of {choices}' if choices else meaning}"


def _field_at(model: type[Section], location: tuple[Step, ...]) -> FieldInfo | None:
    section = section_at(model, location[:-1])
    return section.model_fields.get(str(location[-1])) if section else None


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that may stand in ``field``, also beside values of another type."""
    members = (field.annotation, *get_args(field.annotation))
    literals = [member for member in members if get_origin(member) is Literal]
    return tuple(str(choice) for literal in literals for choice in get_args(literal))
