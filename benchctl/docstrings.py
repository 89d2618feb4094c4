"""Docstrings of attributes: the text below a declaration in a class, read from its source."""

import ast
import inspect
import textwrap
from itertools import pairwise


def attribute_docstrings(declaring: type) -> dict[str, str]:
    """The text below each annotated attribute that a class itself declares; nothing for a class without source."""
    try:
        source = textwrap.dedent(inspect.getsource(declaring))
    except OSError:  # made while running
        return {}
    texts: dict[str, str] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ClassDef):
            for declared, below in pairwise(statement.body):
                match declared, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        texts[name] = inspect.cleandoc(text)
    return texts
