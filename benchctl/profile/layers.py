"""From files and the command line to one document: ``extends``, presets, overlays for engines, ``--set``.

Each source is read once, and where each value was written stays beside it.
"""

import os
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Final

from benchctl.profile.engine_options import ENGINES, engine_spec, guiding_kinds
from benchctl.profile.files import (
    did_you_mean,
    display_path,
    is_path,
    known_profiles_text,
    named_files,
    preset_files,
    profile_directories,
)
from benchctl.profile.model import Profile
from benchctl.profile.yaml import (
    WRITTEN,
    Bounds,
    Document,
    LocatedError,
    Location,
    Step,
    plain_document,
    read_document,
    read_value,
    replaced,
    size_problem,
    value_text,
)
from benchctl.untrusted.limits import EXTENDED_FILES, PROFILE_BYTES

_MODEL_FACTORS: Final = ("model", "value_model", "server.value_model")
_DEFAULT_MODEL: Final = Profile.model_fields["model"].default
_DROPPABLE: Final = ("variants", "sweep")


class Layers:
    """Reads the sources of one profile, and collects their errors.

    ``is_whole`` is false when some source could not be read; keys that are missing then are no error of their own.
    """

    def __init__(self) -> None:
        self.errors: list[LocatedError] = []
        self.is_whole = True
        self._files: dict[Path, Document] = {}

    def text(self, text: str, source: str, bounds: Bounds = WRITTEN) -> Document:
        """One document, by itself."""
        num_errors = len(self.errors)
        document = read_document(text, source, self.errors, bounds)
        if not document.values and len(self.errors) > num_errors:
            self.is_whole = False
        return _with_engine_mapping(document)

    def plain(self, values: Mapping[str, Any], source: str) -> Document:
        """One document of plain values."""
        return _with_engine_mapping(plain_document(values, source))

    def file(self, path: Path) -> Document:
        """One file, by itself; each is read once."""
        if path not in self._files:
            self._files[path] = self._read_file(path)
        return self._files[path]

    def assignment(self, assignment: str) -> Document:
        """The layer of ``--set a.b=c``; c is a YAML value. Below ``sweep`` the rest of the path is one factor."""
        path_part, equals, value_part = assignment.partition("=")
        path = tuple(path_part.strip().split("."))
        if not equals or not all(path):
            problem = f"{value_text(assignment)} is not of the form path=value, for example workload.num_prompts=3"
            self.errors.append(LocatedError(Location("--set"), problem))
            return plain_document({}, "--set")
        if path[0] == "sweep":
            path = ("sweep", ".".join(path[1:])) if path[1:] else path
        num_errors = len(self.errors)
        value = read_value(value_part, Location("--set", path=path), self.errors)
        if len(self.errors) > num_errors:
            self.is_whole = False
            return plain_document({}, "--set")
        return self.plain(replaced({}, path, value), "--set")

    def profile(self, path: Path, above: Sequence[Document]) -> Document:
        """A file over what it extends, as its engine reads them, and ``above`` over it.

        A file without a name is called like the file.
        """
        files = self._chain(path)
        kind = self._kind(reduce(_over, (*files, *above)))
        is_unguided = kind is not None and not engine_spec(kind).guides
        tree: Document | None = None
        for file in files:
            layer = self._for_kind(self._for_guidance(file, is_unguided=is_unguided), kind)
            if tree is None:
                tree = layer
            else:  # a variant that is dropped here may exist for engines that guide only
                tree = _over(tree.without("name").without("description"), layer, drops_idly=is_unguided)
        tree = tree or files[0]
        if "name" not in tree.values:
            tree = tree.with_value(("name",), path.stem, Location(display_path(path), 1, ("name",)))
        return self.with_preset(reduce(_over, above, tree))

    def with_preset(self, tree: Document) -> Document:
        """Replace the name of an engine preset by the preset's own text, with the profile's options over it."""
        if "preset" not in tree.mapping("engine"):
            return tree
        own = tree.without("engine", "preset")
        if "kind" in own.mapping("engine"):
            self._refuse(
                tree, "has both preset and kind; a preset has its own kind, so remove one of the two", "engine"
            )
            return own
        preset = self._preset(tree)
        if preset is None:
            return tree.without("engine")
        substitutes = preset.mapping("models")
        preset = preset.without("models")
        locations = {("engine", *path): location for path, location in preset.locations.items()}
        below = Document({"engine": preset.values}, {(): tree.location(()), **locations})
        return _with_models(own.over(below), substitutes)

    def refuse(self, error: LocatedError) -> None:
        """Add an error after which the profile is not whole."""
        self.errors.append(error)
        self.is_whole = False

    def _refuse(self, tree: Document, problem: str, *path: Step) -> None:
        self.refuse(tree.error(problem, *path))

    def _read_file(self, path: Path) -> Document:
        source = display_path(path)
        try:
            with path.open("rb") as file:
                content = file.read(PROFILE_BYTES + 1)
                size = max(len(content), os.fstat(file.fileno()).st_size)
            if size <= PROFILE_BYTES:
                return self.text(content.decode(), source)
            problem = size_problem(size)
        except UnicodeDecodeError as error:
            problem = f"not readable as UTF-8: {error.reason} at byte {error.start}; save the file as UTF-8"
        except OSError as error:
            problem = f"not readable: {error.strerror}; check the file and its permissions"
        self.refuse(LocatedError(Location(source), problem))
        return plain_document({}, source)

    def _chain(self, path: Path) -> list[Document]:
        """The files that a file extends, each before the one that extends it, and itself."""
        files, paths = list[Document](), [path]
        while len(paths) > len(files):
            document = self.file(paths[-1])
            if "extends" in document.values:
                base = _base_file(document.values["extends"], paths)
                if isinstance(base, Path):
                    paths.append(base)
                else:
                    self._refuse(document, base, "extends")
            files.append(document.without("extends"))
        return files[::-1]

    def _kind(self, tree: Document) -> str | None:
        """The kind of engine that a document names, itself or by a preset; None for none that exists."""
        engine = tree.mapping("engine")
        kind = engine.get("kind")
        if "preset" in engine and "kind" not in engine:
            preset = self._preset(tree)
            kind = preset.get("kind") if preset else None
        return kind if isinstance(kind, str) and kind in ENGINES else None

    def _preset(self, tree: Document) -> Document | None:
        """The preset that the engine names; for a bare kind without a file, an engine without options."""
        name, files, kinds = tree.get("engine", "preset"), preset_files(), tuple(ENGINES)
        if isinstance(name, str) and name in files:
            return self.file(files[name])
        location = tree.location(("engine", "preset"))
        if name in kinds:
            return Document({"kind": name}, {(): location, ("kind",): location})
        problem = (
            f"{value_text(name)} is neither an engine preset nor a kind of engine; presets are {', '.join(files)}, "
            f"kinds are {', '.join(kinds)}{did_you_mean(name, (*files, *kinds), '; ')}"
        )
        self.refuse(LocatedError(location, problem))
        return None

    def _for_guidance(self, tree: Document, *, is_unguided: bool) -> Document:
        """A file with its section ``for_unguided_engines`` laid over it, or left out."""
        key = "for_unguided_engines"
        if key not in tree.values:
            return tree
        overlay, rest = tree.values[key], tree.without(key)
        if overlay is None and is_unguided:
            self._refuse(tree, f"this experiment needs an engine that guides: {', '.join(guiding_kinds())}", key)
        elif overlay is not None and not isinstance(overlay, dict):
            problem = f"is {value_text(overlay)}; write the keys that replace others on engines that cannot guide"
            self._refuse(tree, problem, key)
        elif overlay is not None and is_unguided:
            return _over(rest, _with_engine_mapping(tree.part(key)))
        return rest

    def _for_kind(self, tree: Document, kind: str | None) -> Document:
        """A file with its section ``per_engine`` of this kind laid over it; those of other kinds are left out."""
        key = "per_engine"
        if key not in tree.values:
            return tree
        overlays, rest = tree.values[key], tree.without(key)
        if not isinstance(overlays, dict):
            problem = f"is {value_text(overlays)}; write kinds of engines, and below each the keys to replace"
            self._refuse(tree, problem, key)
            return rest
        for name, overlay in overlays.items():
            if refusal := _overlay_problem(name, overlay):
                self._refuse(tree, refusal, key, name)
            elif name == kind:
                rest = _over(rest, tree.part(key, name))
        return rest


def _over(below: Document, above: Document, *, drops_idly: bool = False) -> Document:
    """One layer over another; a null drops a variant or a factor, and another engine replaces all of the engine.

    With ``drops_idly`` a null may stand for a variant or factor that is not there.
    """
    if above.mapping("engine").keys() & {"kind", "preset"}:
        below = below.without("engine")
    for section in _DROPPABLE:
        for key in [key for key, value in above.mapping(section).items() if value is None]:
            if key in below.mapping(section) or drops_idly:
                below, above = below.without(section, key), above.without(section, key)
    return above.over(below)


def _with_engine_mapping(tree: Document) -> Document:
    """``engine: sim`` as ``engine: {preset: sim}``."""
    engine, location = tree.values.get("engine"), tree.location(("engine",))
    if not isinstance(engine, str):
        return tree
    return tree.with_value(("engine",), {"preset": engine}).with_value(("engine", "preset"), engine, location)


def _with_models(tree: Document, substitutes: Mapping[str, Any]) -> Document:
    """The profile with every model replaced that has a substitute."""
    if not substitutes:
        return tree

    def substitute(value: Any) -> Any:
        if isinstance(value, list):
            return [substitute(item) for item in value]
        return substitutes.get(value, value) if isinstance(value, str) else value

    model = tree.values.get("model", _DEFAULT_MODEL)
    tree = tree.with_value(("model",), substitute(model), tree.location(("model",)))
    paths: list[tuple[str, ...]] = [("sweep", factor) for factor in _MODEL_FACTORS] + [
        ("engine", "options", "value_model")
    ]
    paths += [("variants", name, "server", "value_model") for name in tree.mapping("variants")]
    for *section, key in paths:
        if key in tree.mapping(*section):
            tree = tree.with_value((*section, key), substitute(tree.mapping(*section)[key]))
    return tree


def _overlay_problem(kind: str, overlay: Any) -> str | None:
    """The reason why ``per_engine.<kind>`` cannot go over a profile."""
    if kind not in ENGINES:
        return f"is not a kind of engine; kinds are {', '.join(ENGINES)}{did_you_mean(kind, ENGINES, '; ')}"
    if not isinstance(overlay, dict):
        return f"is {value_text(overlay)}; write the keys to replace on {kind}"
    engine = overlay.get("engine", {})
    if not isinstance(engine, dict) or engine.keys() & {"kind", "preset"}:
        return "chooses another engine; write only its options"
    return None


def _base_file(name: Any, paths: Sequence[Path]) -> Path | str:
    """The file that ``extends`` names in the last of ``paths``, each extending the next; else the problem."""
    if not isinstance(name, str) or not name:
        return f"is {value_text(name)}; write the name or the path of one profile"
    path = paths[-1]
    if is_path(name):
        base = path.parent / name
        if not base.is_file():
            kind = "not a regular" if base.exists() else "no such"
            return f"{display_path(base)}: {kind} file; a path is relative to the file that extends"
    else:
        # A file may carry the name of the one it extends: its own profiles/x.yaml over the built-in x.
        named = named_files(name, (path.parent, *profile_directories()))
        others = [file for file in named if file.resolve() != path.resolve()]
        if not others:
            return f"no other profile is called {name!r}. {known_profiles_text(name)}"
        base = others[0]
    resolved = [file.resolve() for file in paths]
    if base.resolve() in resolved:
        circle = " -> ".join(display_path(file) for file in (*paths[resolved.index(base.resolve()) :], base))
        return f"goes round in a circle: {circle}; remove one"
    if len(paths) > EXTENDED_FILES:
        return f"is the {len(paths)}th file in a row, and {EXTENDED_FILES} may extend one another; join some"
    return base
