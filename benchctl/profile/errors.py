"""The keys of a profile as its models declare them, and validation with every error in their terms."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from benchctl.errors import ProfileError
from benchctl.profile.choices import NAME_PATTERN, Section
from benchctl.profile.files import did_you_mean
from benchctl.profile.model import Profile, Variant
from benchctl.profile.yaml import LocatedError, Problem, Steps, follow, value_text

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
_MAX_SHOWN: Final = 50
"""Errors of one message."""
_BOUNDS: Final = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})
_MESSAGES: Final = {
    "greater_than": "is {value}; it must be above {gt}",
    "greater_than_equal": "is {value}; it must be at least {ge}",
    "less_than": "is {value}; it must be below {lt}",
    "less_than_equal": "is {value}; it must be at most {le}",
    "literal_error": "is {value}; allowed are {words}{hint}",
    "string_pattern_mismatch": "is {value}; it must match {pattern}",
    "string_too_long": "{value} has more than {max_length} characters; shorten it",
    "too_long": "has more than {max_length} entries",
    "too_short": "is empty; give at least one, or remove the key",
    "value_error": "{error}",
}
"""By pydantic's kind of error, in whose words any other is told."""
_NOT_A_NAME: Final = (
    "{value} is not a name; write lower-case letters, digits, '.', '_' and '-', first a letter or digit"
)
_Details: TypeAlias = dict[Steps, list[tuple[Any, Mapping[str, Any]]]]
"""Errors of pydantic by the path of the nearest value that exists, or of a missing key, each with that value."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its dotted path, with ``<name>`` where the writer chooses one, its section and its declaration."""

    path: str
    section: type[Section]
    field: FieldInfo


def profile_keys(section: type[Section] = Profile, prefix: str = "") -> Iterator[Key]:
    """Every key of a profile in the order of declaration, those of a section after the section's own."""
    for name, field in section.model_fields.items():
        yield Key(f"{prefix}{name}", section, field)
        for inner in _sections_in(field.annotation):
            chosen = "<name>." if inner is Variant else ""
            yield from profile_keys(inner, f"{prefix}{name}.{chosen}")


def _sections_in(annotation: Any) -> Iterator[type[Section]]:  # annotations have no type
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _section_at(root: type[Section], path: Steps) -> type[Section] | None:
    """The section that stands at ``path`` below ``root``, or None."""
    annotation: Any = root
    for step in path:
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            fields = [each.model_fields.get(str(step)) for each in _sections_in(annotation)]
            annotation = next((field.annotation for field in fields if field), None)
    return next(_sections_in(annotation), None)


def validate(
    values: dict[str, Any], model: type[S], *, reports_missing: bool = True
) -> tuple[S | None, list[Problem]]:
    """The valid section, or None and every problem; ``reports_missing`` is false for values that are not whole."""
    try:
        # Through JSON, because strict models take a list for a tuple there and nowhere else.
        return model.model_validate_json(json.dumps(values)), []
    except ValidationError as error:
        items = error.errors(include_url=False)
    details: _Details = {}
    for item in items:
        # Pydantic puts names of union members and marks such as ``[key]`` among the keys; ``follow`` skips them.
        value, steps = follow(values, item["loc"])
        missing = item["loc"][-1:] if item["type"] == "missing" else ()
        if reports_missing or not missing:
            details.setdefault((*steps, *missing), []).append((value, item))
    return None, [(steps, problem) for steps in details for problem in _problems(model, steps, details)]


def profile_error(errors: Iterable[LocatedError]) -> ProfileError:
    """One error with a line for each, in the order of the files' lines."""
    ordered = sorted(set(errors), key=lambda error: (error.location.source, error.location.line or 0, str(error)))
    lines = [str(error) for error in ordered[:_MAX_SHOWN]]
    if len(ordered) > 1:
        lines.insert(0, f"{len(ordered)} errors in the profile")
    if len(ordered) > _MAX_SHOWN:
        lines.append(f"and {len(ordered) - _MAX_SHOWN} more")
    return ProfileError("\n".join(lines))


def _problems(model: type[Section], steps: Steps, details: _Details) -> Iterator[str]:
    """The problems of one value in words; what only follows from another is left out."""
    errors = details[steps]
    kinds = {error["type"] for _, error in errors}
    types = [_EXPECTED[error["type"]] for _, error in errors if error["type"] in _EXPECTED]
    if kinds <= _EXPECTED.keys():
        # A mapping where a number or a mapping is expected: the errors inside it say more.
        if not any(len(other) > len(steps) and other[: len(steps)] == steps for other in details):
            yield _wrong_type(types, errors[0][0])
        return
    for value, error in errors:
        is_echo = {
            "too_short": bool(value),  # its items are wrong
            "literal_error": bool(kinds & _BOUNDS),  # a word in place of a number out of bounds
        }.get(error["type"], error["type"] in _EXPECTED and len(errors) > 1)  # a union member that does not apply
        if not is_echo:
            yield _problem(_section_at(model, steps[:-1]), steps, value, error, types)


def _wrong_type(expected: list[str], value: object) -> str:
    types = " or ".join(dict.fromkeys(expected))
    number = isinstance(value, str) and value.lstrip("-").replace(".", "", 1).isdigit()
    remedy = "; remove the quotes" if number and any("number" in word for word in expected) else ""
    if value is None and "a mapping" in expected:
        remedy = "; write {} where nothing is to be set"
    return f"expected {types}, found {value_text(value)}{remedy}"


def _problem(
    section: type[Section] | None, steps: Steps, raw: object, error: Mapping[str, Any], types: Sequence[str]
) -> str:
    """The problem of a value or key in words; values of ``types`` would have been right as well."""
    kind, context, key = error["type"], error.get("ctx", {}), str(steps[-1]) if steps else ""
    field = section.model_fields.get(key) if section else None
    words = [*(_choices(field) if field else ()), *types]
    if kind == "extra_forbidden":
        return _unknown_key(key, section)
    if kind == "missing":
        meaning = (field.description or "").rstrip(".") if field else ""
        return f"missing; add {key}: {'one of ' + ', '.join(words) if words else meaning}"
    is_name = context.get("pattern") == NAME_PATTERN
    template = _NOT_A_NAME if is_name else _MESSAGES.get(kind, "is {value}: {msg}")
    return template.format(
        value=value_text(steps[-1] if error["loc"][-1:] == ("[key]",) else raw),
        words=", ".join(words),
        hint=did_you_mean(raw, words, "; "),
        msg=error["msg"],
        **{name: f"{each:.10g}" if isinstance(each, float) else each for name, each in context.items()},
    )


def _unknown_key(key: str, section: type[Section] | None) -> str:
    names = list(section.model_fields) if section else []
    if hint := did_you_mean(key, names):
        return f"unknown key; {hint}"
    homes = [k.path.rpartition(".")[0] or "the top level" for k in profile_keys() if k.path.split(".")[-1] == key]
    if homes:
        return f"unknown key here; it belongs to {' or '.join(homes)}"
    return f"unknown key; known keys here are {', '.join(names)}"


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that may stand in ``field``, also beside values of another type."""
    members = (field.annotation, *get_args(field.annotation))
    literals = [member for member in members if get_origin(member) is Literal]
    return tuple(str(choice) for literal in literals for choice in get_args(literal))
