"""Validation of a profile's mapping against a model, with every error in the profile's own terms."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin

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


_Detail: TypeAlias = tuple[Steps, Any, ErrorDetails]
"""Path and value of the nearest that exists, or the path of a missing key, and one error of pydantic there."""


def validate(
    values: dict[str, Any], model: type[S], *, reports_missing: bool = True
) -> tuple[S | None, list[Problem]]:
    """The valid section, or None and every problem; ``reports_missing`` is false for values that are not whole."""
    try:
        # Through JSON, because strict models take a list for a tuple there and nowhere else.
        return model.model_validate_json(json.dumps(values)), []
    except ValidationError as error:
        items = error.errors(include_url=False)
    details = list[_Detail]()
    for item in items:
        # Pydantic puts names of union members and marks such as ``[key]`` among the keys; ``follow`` skips them.
        value, steps = follow(values, item["loc"])
        missing = item["loc"][-1:] if item["type"] == "missing" else ()
        if reports_missing or not missing:
            details.append(((*steps, *missing), value, item))
    return None, list(_problems(model, details))


def profile_error(errors: Iterable[LocatedError]) -> ProfileError:
    """One error with a line for each, in the order of the files' lines."""
    ordered = sorted(set(errors), key=lambda error: (error.location.source, error.location.line or 0, str(error)))
    heading = (f"{len(ordered)} errors in the profile",) if len(ordered) > 1 else ()
    first, rest = ordered[:_MAX_SHOWN], len(ordered) - _MAX_SHOWN
    ending = (f"and {rest} more",) if rest > 0 else ()
    return ProfileError("\n".join((*heading, *map(str, first), *ending)))


def _problems(model: type[Section], details: list[_Detail]) -> Iterator[Problem]:
    by_steps: dict[Steps, list[_Detail]] = {}
    for detail in details:
        by_steps.setdefault(detail[0], []).append(detail)
    for steps, items in by_steps.items():
        kinds = [error["type"] for _, _, error in items]
        types = [_EXPECTED[kind] for kind in kinds if kind in _EXPECTED]
        if len(types) == len(items):
            # A mapping where a number or a mapping is expected: the errors inside it say more.
            if not any(len(other) > len(steps) and other[: len(steps)] == steps for other in by_steps):
                yield steps, _wrong_type(types, items[0][1])
            continue
        for _, value, error in items:
            if not _is_echo(error["type"], value, kinds):
                yield steps, _problem(model, (steps, value, error), types)


def _is_echo(kind: str, value: object, kinds: list[str]) -> bool:
    """True for an error that only follows from the others of a value.

    That is the type error of the union member that does not apply, a word expected in place of a number that is out
    of bounds, and a list too short because its items are wrong.
    """
    if kind == "too_short":
        return bool(value)
    if kind == "literal_error":
        return not _BOUNDS.keys().isdisjoint(kinds)
    return kind in _EXPECTED and len(kinds) > 1


def _wrong_type(expected: list[str], value: object) -> str:
    types = " or ".join(dict.fromkeys(expected))
    number = isinstance(value, str) and value.lstrip("-").replace(".", "", 1).isdigit()
    remedy = "; remove the quotes" if number and any("number" in word for word in expected) else ""
    if value is None and "a mapping" in expected:
        remedy = "; write {} where nothing is to be set"
    return f"expected {types}, found {value_text(value)}{remedy}"


def _problem(model: type[Section], detail: _Detail, types: Sequence[str]) -> str:
    """The problem in words; values of ``types`` would have been right as well."""
    steps, raw, error = detail
    value, kind, context = value_text(raw), error["type"], error.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return _unknown_key(str(steps[-1]), section_at(model, steps[:-1]))
        case "missing":
            return _missing(model, steps)
        case "literal_error":
            field = _field_at(model, steps)
            words = [*(_choices(field) if field else ()), *types]
            return f"is {value}; allowed are {', '.join(words)}{did_you_mean(raw, words, '; ')}"
        case "string_pattern_mismatch" | "string_too_long":
            return _wrong_text(detail)
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


def _wrong_text(detail: _Detail) -> str:
    """The problem of a text that is too long or not of the form that it must have."""
    steps, value, error = detail
    context, is_key = error.get("ctx", {}), error["loc"][-1] == "[key]"
    text = value_text(steps[-1] if is_key else value)
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
