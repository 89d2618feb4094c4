"""From files and the command line to one tree: ``extends``, engine presets, ``--engine`` and ``--set``.

Each layer goes over the one below it with the same rules:

* mappings merge key by key, anything else replaces;
* an inherited variant or factor that is set to null is dropped;
* an ``engine`` that names a preset or a kind replaces the engine below, one that has only options adds to it;
* ``name`` and ``description`` are a file's own and are not inherited;
* what a file says under ``unguided`` goes over the rest of that file where the engine cannot guide; null there
  says that the experiment is about guidance and needs an engine that can;
* what a file says under ``per_engine.<kind>`` goes over the rest of that file where the engine is of that kind.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchctl.profile.document import Fault, Node, Place, merge, node_from_plain, read_document, read_value
from benchctl.profile.engine_table import ENGINES, engine_spec, guiding_kinds
from benchctl.profile.faults import shown
from benchctl.profile.locate import (
    is_path,
    known_profiles_text,
    named_files,
    nearest,
    preset_files,
    profile_directories,
    shown_path,
)
from benchctl.profile.stand_ins import with_models

_NOT_INHERITED: Final = ("name", "description")
_DROPPABLE: Final = ("variants", "sweep")


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree on its way to a profile, and what was wrong so far.

    ``is_whole`` is false when some source could not be read; what is missing then is no fault of its own.
    """

    tree: Node
    faults: tuple[Fault, ...] = ()
    is_whole: bool = True

    def with_fault(self, fault: Fault) -> "Draft":
        return replace(self, faults=(*self.faults, fault), is_whole=False)

    def under(self, above: "Draft") -> "Draft":
        """This draft with another one over it."""
        tree = _over(self.tree, above.tree)
        return Draft(tree, (*self.faults, *above.faults), self.is_whole and above.is_whole)


def read_text(text: str, source: str) -> Draft:
    """The draft of one document, by itself."""
    tree, faults = read_document(text, source)
    return Draft(_with_engine_mapping(tree), faults, is_whole=bool(tree.entries()) or not faults)


def read_profile_file(path: Path, kind: str | None) -> Draft:
    """The draft of a file with everything it extends; a file without a name has that of the file.

    ``kind`` is that of the engine in use; None while it is unknown, and then no overlay of an engine counts.
    """
    draft = _read_chain(path, (), kind)
    if draft.tree.child("name") is None:
        name = node_from_plain(path.stem, Place(shown_path(path), 1), ("name",))
        draft = replace(draft, tree=draft.tree.with_entries({"name": name, **draft.tree.entries()}))
    return draft


def read_file(path: Path) -> Draft:
    """The draft of one file, by itself."""
    source = shown_path(path)
    try:
        return read_text(path.read_text(encoding="utf-8"), source)
    except UnicodeDecodeError as error:
        problem = f"not readable as UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8"
    except OSError as error:
        problem = f"not readable: {error.strerror}; check the file and its permissions"
    return Draft(Node({}, Place(source))).with_fault(Fault(Place(source), (), problem))


def _read_chain(path: Path, below: tuple[Path, ...], kind: str | None) -> Draft:
    """``below`` holds the files that led here, each extending the next."""
    is_unguided = kind is not None and not engine_spec(kind).guides
    draft = _for_kind(_for_guidance(read_file(path), is_unguided=is_unguided), kind)
    extends = draft.tree.child("extends")
    if extends is None:
        return draft
    draft = replace(draft, tree=without(draft.tree, {"extends"}))
    base = _find_base(extends, path)
    if isinstance(base, Fault):
        return draft.with_fault(base)
    files = [*below, path]
    known = [file.resolve() for file in files]
    if base.resolve() in known:
        circle = " -> ".join(shown_path(file) for file in (*files[known.index(base.resolve()) :], base))
        return draft.with_fault(Fault(extends.place, extends.path, f"goes round in a circle: {circle}; remove one"))
    inherited = _read_chain(base, tuple(files), kind)
    if is_unguided:  # what is dropped here may be there for engines that guide only
        draft = replace(draft, tree=_without_idle_drops(inherited.tree, draft.tree))
    return replace(inherited, tree=without(inherited.tree, _NOT_INHERITED)).under(draft)


def _for_guidance(draft: Draft, *, is_unguided: bool) -> Draft:
    """A file's draft with what it says under ``unguided`` laid over it, or left out."""
    overlay = draft.tree.child("unguided")
    if overlay is None:
        return draft
    draft = replace(draft, tree=without(draft.tree, {"unguided"}))
    if overlay.value is None:
        problem = f"this experiment needs an engine that guides: {', '.join(guiding_kinds())}"
        return draft.with_fault(Fault(overlay.place, overlay.path, problem)) if is_unguided else draft
    if not isinstance(overlay.plain(), dict):
        problem = f"is {shown(overlay.plain())}; write what goes over this profile on engines that cannot guide"
        return draft.with_fault(Fault(overlay.place, overlay.path, problem))
    return draft.under(Draft(_with_engine_mapping(overlay))) if is_unguided else draft


def _for_kind(draft: Draft, kind: str | None) -> Draft:
    """A file's draft with what it says under ``per_engine`` of this kind laid over it; of others it is left out."""
    overlays = draft.tree.child("per_engine")
    if overlays is None:
        return draft
    draft = replace(draft, tree=without(draft.tree, {"per_engine"}))
    if not isinstance(overlays.plain(), dict):
        problem = (
            f"is {shown(overlays.plain())}; write kinds of engines, and under each what goes over this profile"
        )
        return draft.with_fault(Fault(overlays.place, overlays.path, problem))
    for name, overlay in overlays.entries().items():
        fault = _overlay_problem(name, overlay)
        if fault is not None:
            draft = draft.with_fault(Fault(overlay.place, overlay.path, fault))
        elif name == kind:
            draft = draft.under(Draft(overlay))
    return draft


def _overlay_problem(kind: str, overlay: Node) -> str | None:
    """Why what stands under ``per_engine.<kind>`` cannot go over a profile."""
    if kind not in ENGINES:
        near = nearest(kind, tuple(ENGINES))
        hint = f"; did you mean {near!r}?" if near else ""
        return f"is no kind of engine; kinds are {', '.join(ENGINES)}{hint}"
    plain = overlay.plain()
    if not isinstance(plain, dict):
        return f"is {shown(plain)}; write what goes over this profile on {kind}"
    engine = plain.get("engine", {})
    if not isinstance(engine, dict) or engine.keys() & {"kind", "preset"}:
        return "chooses another engine; write only its options"
    return None


def _find_base(extends: Node, path: Path) -> Path | Fault:
    """The file that ``extends`` names: a path relative to the extending file, or a name, first beside it."""
    wanted = extends.value
    if not isinstance(wanted, str) or not wanted:
        problem = f"is {shown(extends.plain())}; write the name or the path of one profile"
        return Fault(extends.place, extends.path, problem)
    if is_path(wanted):
        base = path.parent / wanted
        problem = f"{shown_path(base)}: no such file; a path is relative to the file that extends"
        return base if base.is_file() else Fault(extends.place, extends.path, problem)
    # A file may carry the name of the one it extends: its own profiles/x.yaml over the built-in x.
    for base in named_files(wanted, (path.parent, *profile_directories())):
        if base.resolve() != path.resolve():
            return base
    problem = f"no other profile is called {wanted!r}. {known_profiles_text(wanted)}"
    return Fault(extends.place, extends.path, problem)


def from_option(option: str, path: tuple[str, ...], value: object) -> Draft:
    """The draft that says one thing, given by an option of the command line."""
    return _from_value(node_from_plain(value, Place(option), path), path)


def from_assignment(assignment: str) -> Draft:
    """The draft of ``--set a.b=c``; c is a YAML value. Below ``sweep`` the rest of the path is one factor."""
    place = Place("--set")
    path_part, equals, value_part = assignment.partition("=")
    path = tuple(path_part.strip().split("."))
    if not equals or not all(path):
        problem = f"{assignment!r} is no assignment; write path=value, for example workload.num_prompts=3"
        return Draft(Node({}, place), (Fault(place, (), problem),))
    if path[0] == "sweep":
        path = ("sweep", ".".join(path[1:])) if path[1:] else path
    value, faults = read_value(value_part, place, path)
    return Draft(Node({}, place), faults, is_whole=False) if faults else _from_value(value, path)


def _from_value(value: Node, path: tuple[str, ...]) -> Draft:
    for depth in range(len(path), 0, -1):
        value = Node({path[depth - 1]: value}, value.place, path[: depth - 1])
    return Draft(_with_engine_mapping(value))


def with_engine(draft: Draft) -> Draft:
    """Replace the name of an engine preset by what the preset says, with the profile's own options over it."""
    engine = draft.tree.child("engine")
    preset = engine.child("preset") if engine else None
    if engine is None or preset is None:
        return draft
    own = without(engine, {"preset"})
    if engine.child("kind"):
        problem = "has both preset and kind; a preset knows its kind, so remove one of the two"
        fault = Fault(engine.place, engine.path, problem)
        return replace(draft, tree=_with_entry(draft.tree, "engine", own)).with_fault(fault)
    found = _read_preset(preset)
    if isinstance(found, Fault):
        return replace(draft, tree=without(draft.tree, {"engine"})).with_fault(found)
    tree = _with_entry(draft.tree, "engine", merge(without(found.tree, {"models"}), own))
    tree = with_models(tree, found.tree.child("models"))
    return Draft(tree, (*draft.faults, *found.faults), draft.is_whole and found.is_whole)


def _read_preset(preset: Node) -> Draft | Fault:
    """The draft of a preset, or of a bare kind of engine."""
    wanted, files, kinds = preset.value, preset_files(), tuple(ENGINES)
    if isinstance(wanted, str) and wanted in files:
        return read_file(files[wanted])
    if wanted in kinds:
        return Draft(Node({"kind": preset}, preset.place, preset.path))
    near = nearest(wanted, (*files, *kinds)) if isinstance(wanted, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    problem = (
        f"{shown(preset.plain())} is no engine preset and no kind of engine; "
        f"presets are {', '.join(files)}, kinds are {', '.join(kinds)}{hint}"
    )
    return Fault(preset.place, preset.path, problem)


def _with_engine_mapping(tree: Node) -> Node:
    """``engine: sim`` as ``engine: {preset: sim}``."""
    engine = tree.child("engine")
    if engine is None or not isinstance(engine.value, str):
        return tree
    return _with_entry(tree, "engine", engine.with_entries({"preset": engine}))


def _over(below: Node, above: Node) -> Node:
    engine = above.child("engine")
    replaced = {"engine"} if engine and engine.entries().keys() & {"kind", "preset"} else set[str]()
    below = without(below, replaced)
    for section in _DROPPABLE:
        lower, upper = below.child(section), above.child(section)
        if lower is None or upper is None:
            continue
        dropped = {key for key, node in upper.entries().items() if node.value is None and lower.child(key)}
        below = _with_entry(below, section, without(lower, dropped))
        above = _with_entry(above, section, without(upper, dropped))
    return merge(below, above)


def _without_idle_drops(below: Node, above: Node) -> Node:
    """``above`` without the nulls of variants and factors that ``below`` does not have."""
    for section in _DROPPABLE:
        lower, upper = below.child(section), above.child(section)
        if upper is None:
            continue
        idle = {
            key for key, node in upper.entries().items() if node.value is None and not (lower and lower.child(key))
        }
        above = _with_entry(above, section, without(upper, idle))
    return above


def _with_entry(node: Node, key: str, child: Node) -> Node:
    return node.with_entries({**node.entries(), key: child})


def without(node: Node, keys: Collection[str]) -> Node:
    """A mapping without some of its keys."""
    if not keys:
        return node
    return node.with_entries({key: child for key, child in node.entries().items() if key not in keys})
