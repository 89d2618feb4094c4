"""The base of every part of a profile, and the meanings of its keys."""

from functools import cache

from pydantic import BaseModel, ConfigDict

from benchctl.docstrings import attribute_docstrings


class Section(BaseModel):
    """A part of a profile: frozen, closed, and strict about types (``"5"`` is text).

    A section's validator is built when something is first validated against it: most commands need few.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True, allow_inf_nan=False)


@cache
def meanings(section: type[Section]) -> dict[str, str]:
    """The text below each key.

    Read from the source when it is needed: pydantic would read it at every start (``use_attribute_docstrings``).
    """
    sections = [declaring for declaring in reversed(section.__mro__) if issubclass(declaring, Section)]
    return {name: text for declaring in sections for name, text in attribute_docstrings(declaring).items()}
