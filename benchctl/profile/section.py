"""What every part of a profile shares."""

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise

from pydantic import BaseModel, ConfigDict

LEAST, MOST = 1e-6, 1e6
"""Rates, factors and durations lie between, so that no time computed from them overflows."""


class Section(BaseModel):
    """A part of a profile: frozen, closed, and strict about types (``"5"`` is no number).

    A section's validator is built when something is first validated against it: most commands need few.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


@cache
def meanings(section: type[Section]) -> dict[str, str]:
    """What the text below each key says of it.

    Read from the source when somebody asks: pydantic would read it at every start (``use_attribute_docstrings``).
    """
    found: dict[str, str] = {}
    for declaring in reversed(section.__mro__):
        if issubclass(declaring, Section):
            found |= _meanings_in(declaring)
    return found


def _meanings_in(section: type[Section]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(section))
    except OSError:  # made while running, of sections that have one
        return {}
    found: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef):
            for declared, below in pairwise(statement.body):
                match declared, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
    return found
