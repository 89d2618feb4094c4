"""Validation of a profile's mapping against a model, with every error in the profile's own terms."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from benchctl.errors import ProfileError
from benchctl.profile.choices import NAME_PATTERN, Section, meanings
from benchctl.profile.files import did_you_mean
from benchctl.profile.keys import profile_keys, section_at
from benchctl.profile.yaml import LocatedError, Problem, Steps, dotted, follow, value_text

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
_BOUNDS: Final = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


@dataclass(frozen=True, slots=True)
class _Detail:
    """One error of pydantic, with the nearest value that exists."""

    value: Any
    steps: Steps
    """Path below the validated mapping, with the name of a missing key."""
    error: ErrorDetails


def validate(
    values: dict[str, Any], model: type[S], *, reports_missing: bool = True
) -> tuple[S | None, list[Problem]]:
    """The valid section, or None and every problem; ``reports_missing`` is false for values that are not whole."""
    try:
        # Through JSON, because strict models take a list for a tuple there and nowhere else.
        return model.model_validate_json(json.dumps(values)), []
    except ValidationError as error:
        items = error.errors(include_url=False)
    details = [_detail(values, item) for item in items if reports_missing or item["type"] != "missing"]
    return None, list(_problems(model, details))


def profile_error(errors: Iterable[LocatedError]) -> ProfileError:
    """One error with a line for each, in the order of the files' lines."""
    ordered = sorted(set(errors), key=lambda error: (error.location.source, error.location.line or 0, str(error)))
    heading = (f"{len(ordered)} errors in the profile",) if len(ordered) > 1 else ()
    first, rest = ordered[:_MAX_SHOWN], len(ordered) - _MAX_SHOWN
    ending = (f"and {rest} more",) if rest > 0 else ()
    return ProfileError("\n".join((*heading, *map(str, first), *ending)))


def _detail(values: dict[str, Any], error: ErrorDetails) -> _Detail:
    """Follow an error's location down the values.

    Pydantic puts the names of union members and marks such as ``[key]`` among the keys; ``follow`` skips them.
    """
    value, steps = follow(values, error["loc"])
    missing = error["loc"][-1:] if error["type"] == "missing" else ()
    return _Detail(value, (*steps, *missing), error)


def _problems(model: type[Section], details: list[_Detail]) -> Iterator[Problem]:
    by_steps: dict[Steps, list[_Detail]] = {}
    for detail in details:
        by_steps.setdefault(detail.steps, []).append(detail)
    for steps, items in by_steps.items():
        types = [_EXPECTED[item.error["type"]] for item in items if item.error["type"] in _EXPECTED]
        if len(types) == len(items):
            # A mapping where a number or a mapping is expected: the errors inside it say more.
            if not any(len(other) > len(steps) and other[: len(steps)] == steps for other in by_steps):
                yield steps, _wrong_type(types, items[0].value)
            continue
        for item in items:
            if not _is_echo(item, items):
                yield steps, _problem(model, item, types)


def _is_echo(item: _Detail, items: list[_Detail]) -> bool:
    """True for an error that only follows from others.

    That is the type error of the union member that does not apply, a word expected in place of a number that is out
    of bounds, and a list too short because its items are wrong.
    """
    kind = item.error["type"]
    if kind == "too_short":
        return bool(item.value)
    if kind == "literal_error":
        return any(other.error["type"] in _BOUNDS for other in items)
    return kind in _EXPECTED and len(items) > 1


def _wrong_type(expected: list[str], value: object) -> str:
    types = " or ".join(dict.fromkeys(expected))
    number = isinstance(value, str) and value.lstrip("-").replace(".", "", 1).isdigit()
    remedy = "; remove the quotes" if number and any("number" in word for word in expected) else ""
    if value is None and "a mapping" in expected:
        remedy = "; write {} where nothing is to be set"
    return f"expected {types}, found {value_text(value)}{remedy}"


def _problem(model: type[Section], item: _Detail, types: Sequence[str]) -> str:
    """The problem in words; values of ``types`` would have been right as well."""
    error, value = item.error, value_text(item.value)
    kind, context = error["type"], error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return _unknown_key(str(item.steps[-1]), section_at(model, item.steps[:-1]))
        case "missing":
            return _missing(model, item.steps)
        case "literal_error":
            field = _field_at(model, item.steps)
            words = [*(_choices(field) if field else ()), *types]
            return f"is {value}; allowed are {', '.join(words)}{did_you_mean(item.value, words, '; ')}"
        case "string_pattern_mismatch" | "string_too_long":
            return _wrong_text(item)
        case "too_short" | "too_long":
            most = context.get("max_length")
            return f"has more than {most} entries" if most else "is empty; give at least one, or remove the key"
        case "value_error":
            return str(context["error"])
        case _ if kind in _BOUNDS:
            key, word = _BOUNDS[kind]
            bound = context[key]
            return f"is {value}; it must be {word} {bound if isinstance(bound, int) else f'{bound:.10g}'}"
        case _:
            return f"is {value}: {error['msg']}"


def _wrong_text(item: _Detail) -> str:
    """The problem of a text that is too long or not of the form that it must have."""
    context, is_key = item.error.get("ctx", {}), item.error["loc"][-1] == "[key]"
    text = value_text(item.steps[-1] if is_key else item.value)
    if "max_length" in context:
        return f"{text} has more than {context['max_length']} characters; shorten it"
    if context["pattern"] != NAME_PATTERN:
        return f"is {text}; it must match {context['pattern']}"
    return f"{text} is not a name; write lower-case letters, digits, '.', '_' and '-', first a letter or digit"


def _unknown_key(key: str, section: type[Section] | None) -> str:
    names = list(section.model_fields) if section else []
    if hint := did_you_mean(key, names):
        return f"unknown key; {hint}"
    homes = [k.path.rpartition(".")[0] or "the top level" for k in profile_keys() if k.path.split(".")[-1] == key]
    if homes:
        return f"unknown key here; it belongs to {' or '.join(homes)}"
    return f"unknown key; known keys here are {', '.join(names)}"


def _missing(model: type[Section], steps: Steps) -> str:
    field = _field_at(model, steps)
    choices = ", ".join(_choices(field)) if field else ""
    section = section_at(model, steps[:-1])
    meaning = " ".join(meanings(section).get(str(steps[-1]), "").split()).rstrip(".") if section else ""
    return f"missing; add {dotted(steps[-1:])}: {f'one of {choices}' if choices else meaning}"


def _field_at(model: type[Section], steps: Steps) -> FieldInfo | None:
    section = section_at(model, steps[:-1])
    return section.model_fields.get(str(steps[-1])) if section else None


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that may stand in ``field``, also beside values of another type."""
    members = (field.annotation, *get_args(field.annotation))
    literals = [member for member in members if get_origin(member) is Literal]
    return tuple(str(choice) for literal in literals for choice in get_args(literal))
