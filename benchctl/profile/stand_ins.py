"""Models that an engine preset puts in the place of those that a profile names.

A profile for a device of today names models of seven billion parameters. A preset for a small machine says under
``models`` which directory stands in for each name, and the profile then *is* about those: results, costs and
comparisons know no other. A name that the preset does not list stays.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from benchctl.profile.document import Node, node_from_plain
from benchctl.profile.model import Profile

_FACTORS: Final = ("model", "value_model", "server.value_model")
_DEFAULT_MODEL: Final = Profile.model_fields["model"].default


def with_models(profile: Node, stand_ins: Node | None) -> Node:
    """The profile's tree with every model replaced for which there is a stand-in."""
    named = {key: node.value for key, node in stand_ins.entries().items()} if stand_ins else {}
    if not named:
        return profile

    def replaced(node: Node) -> Node:
        if isinstance(node.value, tuple):
            return replace(node, value=tuple(replaced(item) for item in node.value))
        directory = named.get(node.value) if isinstance(node.value, str) else None
        return node if directory is None else replace(node, value=directory)

    model = profile.child("model") or node_from_plain(_DEFAULT_MODEL, profile.place, ("model",))
    tree = _with(profile, {"model": replaced(model)})
    tree = _changed(tree, ("sweep",), lambda sweep: _at_keys(sweep, _FACTORS, replaced))
    tree = _changed(tree, ("engine", "options"), lambda options: _at_keys(options, ("value_model",), replaced))
    for name in (tree.child("variants") or tree.with_entries({})).entries():
        tree = _changed(
            tree, ("variants", name, "server"), lambda server: _at_keys(server, ("value_model",), replaced)
        )
    return tree


def _at_keys(node: Node, keys: tuple[str, ...], change: Callable[[Node], Node]) -> Node:
    return _with(node, {key: change(child) for key in keys if (child := node.child(key)) is not None})


def _changed(node: Node, path: tuple[str, ...], change: Callable[[Node], Node]) -> Node:
    """``node`` with what is at ``path`` changed, if anything is there."""
    if not path:
        return change(node)
    child = node.child(path[0])
    return node if child is None else _with(node, {path[0]: _changed(child, path[1:], change)})


def _with(node: Node, entries: Mapping[str, Node]) -> Node:
    """A mapping with some of its entries replaced; anything else as it is."""
    return node.with_entries({**node.entries(), **entries}) if entries and isinstance(node.value, Mapping) else node
