"""YAML of other tools, whose aliases are counted before they are followed: ten lines can be a billion values."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import yaml

from benchctl.untrusted.decoding import DECODING_ERRORS, decoding_problem
from benchctl.untrusted.limits import PROFILE_BYTES
from benchctl.untrusted.reading import MOST_DIGITS, UnreadableError, read_text

_MOST_NODES: Final = 100_000
"""Values of a document with its aliases written out."""
_YAML_ERRORS: Final[tuple[type[Exception], ...]] = (*DECODING_ERRORS, yaml.YAMLError, AttributeError, LookupError)
"""PyYAML raises the last two for a tag whose text is not of it, such as ``!!int ""``."""


def read_yaml(path: Path, max_bytes: int = PROFILE_BYTES) -> tuple[Any, yaml.Node | None]:
    """The document in a file, in plain values, and its node with lines and columns; None for an empty file.

    Raises UnreadableError where it cannot be read, is over ``max_bytes``, or grows too large by its aliases.
    """
    text = read_text(path, max_bytes)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _check_size(node)
        document: Any = loader.construct_document(node)
    except _YAML_ERRORS as error:
        raise UnreadableError(f"{path}: cannot be read as YAML: {_problem(error)}") from error
    return document, node


def _problem(error: Exception) -> str:
    return " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else decoding_problem(error)


def _check_size(root: yaml.Node) -> None:
    """Raise ValueError for a node with itself or too many in it, aliases written out, and for a number too long."""
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
            raise ValueError(f"a number has {len(node.value)} digits")
        if id(node) not in sizes:
            sizes[id(node)] = None
            sizes[id(node)] = 1 + sum(map(size, _children(node)))
        if (num_nodes := sizes[id(node)]) is None:
            raise ValueError("an alias stands inside of what it repeats")
        return num_nodes

    if (num_nodes := size(root)) > _MOST_NODES:
        raise ValueError(f"it has {num_nodes:,} values with its aliases written out, the limit is {_MOST_NODES:,}")


def _children(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for entry in node.value for part in entry]
    return node.value if isinstance(node, yaml.SequenceNode) else ()
