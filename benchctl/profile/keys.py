"""The keys of a profile, as its models declare them: for suggestions and for the reference."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from benchctl.profile.choices import Section, meanings
from benchctl.profile.engine_options import options_class
from benchctl.profile.model import Profile, Variant
from benchctl.profile.yaml import Step, Steps


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its dotted path, with ``<name>`` where the writer chooses one, its declaration and its meaning."""

    path: str
    field: FieldInfo
    meaning: str


def section_at(root: type[Section], path: Steps) -> type[Section] | None:
    """The section that stands at ``path`` below ``root``, or None."""
    annotation: Any = root
    for step in path:
        annotation = _below(annotation, step)
    return next(_sections_in(annotation), None)


def profile_keys() -> tuple[Key, ...]:
    """Every key of a profile in the order of declaration, those of a section after the section's own."""
    return tuple(_keys(Profile, ""))


def option_keys(kind: str) -> tuple[Key, ...]:
    """The options of one engine."""
    return tuple(_keys(options_class(kind), "engine.options."))


def _keys(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        yield Key(f"{prefix}{name}", field, field.description or meanings(section).get(name, ""))
        for inner in _sections_in(field.annotation):
            chosen = "<name>." if inner is Variant else ""
            yield from _keys(inner, f"{prefix}{name}.{chosen}")


def _sections_in(annotation: Any) -> Iterator[type[Section]]:  # annotations have no type
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _below(annotation: Any, step: Step) -> Any:  # annotations have no type
    """The declaration one step below another; None where there is none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        field = annotation.model_fields.get(str(step))
        return field.annotation if field else None
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    return next((below for argument in arguments if (below := _below(argument, step)) is not None), None)
