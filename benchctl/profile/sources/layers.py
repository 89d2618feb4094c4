"""From files and the command line to one mapping: ``extends``, overlays for engines, ``--engine`` and ``--set``.

Each layer goes over the one below it with the same rules:

* mappings merge key by key, anything else replaces;
* an inherited variant or factor that is set to null is dropped;
* an ``engine`` that names a preset or a kind replaces the engine below, one that has only options adds to it;
* ``name`` and ``description`` are a file's own and are not inherited;
* a file's section ``for_unguided_engines`` goes over the rest of that file where the engine cannot guide; null
  there means that the experiment is about guidance and needs an engine that guides;
* a file's section ``per_engine.<kind>`` goes over the rest of that file where the engine is of that kind.
"""

import os
from pathlib import Path
from typing import Any, Final

from benchctl.profile.engine_table import ENGINES, engine_spec, guiding_kinds
from benchctl.profile.sources.aliases import with_new_words
from benchctl.profile.sources.files import (
    did_you_mean,
    display_path,
    is_path,
    known_profiles_text,
    named_files,
    profile_directories,
)
from benchctl.profile.sources.located import LocatedDict, LocatedError, Location, located, merge, value_text
from benchctl.profile.sources.presets import read_preset, with_models
from benchctl.profile.sources.yaml_text import WRITTEN, Bounds, read_document, read_value, size_problem
from benchctl.untrusted.limits import EXTENDED_FILES, PROFILE_BYTES

_NOT_INHERITED: Final = ("name", "description")
_DROPPABLE: Final = ("variants", "sweep")


class Layers:
    """Reads the sources of one profile, and collects their errors and older words.

    ``is_whole`` is false when some source could not be read; keys that are missing then are no error of their own.
    """

    def __init__(self) -> None:
        self.errors: list[LocatedError] = []
        self.deprecations: list[LocatedError] = []
        self.is_whole = True
        self._documents: dict[Path, LocatedDict] = {}

    def refuse(self, error: LocatedError) -> None:
        """Add an error after which the profile is not whole."""
        self.errors.append(error)
        self.is_whole = False

    def text(self, text: str, source: str, bounds: Bounds = WRITTEN) -> LocatedDict:
        """One document, by itself."""
        num_errors = len(self.errors)
        document = read_document(text, source, self.errors, bounds)
        if not document and len(self.errors) > num_errors:
            self.is_whole = False
        return self._document(document)

    def plain(self, value: Any, location: Location) -> LocatedDict:
        """One document of plain values, all at one location."""
        return self._document(located(value, location))

    def profile_file(self, path: Path, kind: str | None) -> LocatedDict:
        """A file with everything it extends; a file without a name is called like the file.

        ``kind`` is that of the engine in use; None while it is unknown, and then no overlay of an engine counts.
        """
        tree = self._chain(path, (), kind)
        if "name" not in tree:
            tree = tree.with_value("name", path.stem, Location(display_path(path), 1, ("name",)))
        return tree

    def file(self, path: Path) -> LocatedDict:
        """One file, by itself; each is read once."""
        if path not in self._documents:
            self._documents[path] = self._read_file(path)
        return self._documents[path]

    def assignment(self, assignment: str) -> LocatedDict:
        """The layer of ``--set a.b=c``; c is a YAML value. Below ``sweep`` the rest of the path is one factor."""
        path_part, equals, value_part = assignment.partition("=")
        path = tuple(path_part.strip().split("."))
        if not equals or not all(path):
            problem = f"{value_text(assignment)} is not of the form path=value, for example workload.num_prompts=3"
            self.errors.append(LocatedError(Location("--set"), problem))
            return LocatedDict({}, Location("--set"))
        if path[0] == "sweep":
            path = ("sweep", ".".join(path[1:])) if path[1:] else path
        num_errors = len(self.errors)
        value = read_value(value_part, Location("--set", path=path), self.errors)
        if len(self.errors) > num_errors:
            self.is_whole = False
            return LocatedDict({}, Location("--set"))
        return self.option("--set", path, value)

    def option(self, option: str, path: tuple[str, ...], value: Any) -> LocatedDict:
        """The layer of one value that an option of the command line sets."""
        for key in reversed(path):
            value = {key: value}
        return self.plain(value, Location(option))

    def with_preset(self, tree: LocatedDict) -> LocatedDict:
        """Replace the name of an engine preset by the preset's own text, with the profile's options over it."""
        engine = tree.mapping("engine")
        if "preset" not in engine:
            return tree
        own = engine.without("preset")
        if "kind" in engine:
            problem = "has both preset and kind; a preset has its own kind, so remove one of the two"
            self.refuse(tree.error(problem, "engine"))
            return tree.with_value("engine", own)
        file = read_preset(engine)
        if isinstance(file, LocatedError):
            self.refuse(file)
            return tree.without("engine")
        preset = file if isinstance(file, LocatedDict) else self.file(file)
        tree = tree.with_value("engine", merge(preset.without("models"), own))
        return with_models(tree, preset.mapping("models"))

    def _document(self, document: LocatedDict) -> LocatedDict:
        return with_new_words(_with_engine_mapping(document), self.deprecations, self.errors)

    def _read_file(self, path: Path) -> LocatedDict:
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
        return LocatedDict({}, Location(source))

    def _chain(self, path: Path, extending: tuple[Path, ...], kind: str | None) -> LocatedDict:
        """A file over what it extends; ``extending`` holds the files that led here, each extending the next."""
        is_unguided = kind is not None and not engine_spec(kind).guides
        tree = self._for_kind(self._for_guidance(self.file(path), is_unguided=is_unguided), kind)
        if "extends" not in tree:
            return tree
        base = _base_file(tree, path)
        if isinstance(base, LocatedError):
            self.refuse(base)
            return tree.without("extends")
        files = [*extending, path]
        resolved = [file.resolve() for file in files]
        if base.resolve() in resolved:
            circle = " -> ".join(display_path(file) for file in (*files[resolved.index(base.resolve()) :], base))
            self.refuse(tree.error(f"goes round in a circle: {circle}; remove one", "extends"))
            return tree.without("extends")
        if len(files) > EXTENDED_FILES:
            problem = f"is the {len(files)}th file in a row, and {EXTENDED_FILES} may extend one another; join some"
            self.refuse(tree.error(problem, "extends"))
            return tree.without("extends")
        inherited = self._chain(base, tuple(files), kind)
        tree = tree.without("extends")
        if is_unguided:  # a variant that is dropped here may exist for engines that guide only
            tree = _without_idle_drops(inherited, tree)
        return over(inherited.without(*_NOT_INHERITED), tree)

    def _for_guidance(self, tree: LocatedDict, *, is_unguided: bool) -> LocatedDict:
        """A file with its section ``for_unguided_engines`` laid over it, or left out."""
        key = "for_unguided_engines"
        if key not in tree:
            return tree
        overlay, rest = tree[key], tree.without(key)
        if overlay is None and is_unguided:
            problem = f"this experiment needs an engine that guides: {', '.join(guiding_kinds())}"
            self.refuse(tree.error(problem, key))
        elif overlay is not None and not isinstance(overlay, LocatedDict):
            problem = f"is {value_text(overlay)}; write the keys that replace others on engines that cannot guide"
            self.refuse(tree.error(problem, key))
        elif overlay is not None and is_unguided:
            return over(rest, _with_engine_mapping(overlay))
        return rest

    def _for_kind(self, tree: LocatedDict, kind: str | None) -> LocatedDict:
        """A file with its section ``per_engine`` of this kind laid over it; those of other kinds are left out."""
        if "per_engine" not in tree:
            return tree
        overlays, rest = tree["per_engine"], tree.without("per_engine")
        if not isinstance(overlays, LocatedDict):
            problem = f"is {value_text(overlays)}; write kinds of engines, and below each the keys to replace"
            self.refuse(tree.error(problem, "per_engine"))
            return rest
        for name, overlay in overlays.items():
            refusal = _overlay_problem(name, overlay)
            if refusal:
                self.refuse(overlays.error(refusal, name))
            elif name == kind:
                rest = over(rest, overlay)
        return rest


def over(below: LocatedDict, above: LocatedDict) -> LocatedDict:
    """One layer over another."""
    if above.mapping("engine").keys() & {"kind", "preset"}:
        below = below.without("engine")
    for section in _DROPPABLE:
        lower, upper = below.mapping(section), above.mapping(section)
        dropped = [key for key, value in upper.items() if value is None and key in lower]
        if dropped:
            below = below.with_value(section, lower.without(*dropped))
            above = above.with_value(section, upper.without(*dropped))
    merged: LocatedDict = merge(below, above)
    return merged


def _without_idle_drops(below: LocatedDict, above: LocatedDict) -> LocatedDict:
    """``above`` without the nulls of variants and factors that ``below`` does not have."""
    for section in _DROPPABLE:
        lower, upper = below.mapping(section), above.mapping(section)
        idle = [key for key, value in upper.items() if value is None and key not in lower]
        if idle:
            above = above.with_value(section, upper.without(*idle))
    return above


def _with_engine_mapping(tree: LocatedDict) -> LocatedDict:
    """``engine: sim`` as ``engine: {preset: sim}``."""
    engine = tree.get("engine")
    if not isinstance(engine, str):
        return tree
    location = tree.location_of("engine")
    return tree.with_value("engine", LocatedDict({"preset": engine}, location, {"preset": location}))


def _overlay_problem(kind: str, overlay: Any) -> str | None:
    """The reason why ``per_engine.<kind>`` cannot go over a profile."""
    if kind not in ENGINES:
        return f"is not a kind of engine; kinds are {', '.join(ENGINES)}{did_you_mean(kind, ENGINES, '; ')}"
    if not isinstance(overlay, LocatedDict):
        return f"is {value_text(overlay)}; write the keys to replace on {kind}"
    engine = overlay.get("engine", {})
    if not isinstance(engine, dict) or engine.keys() & {"kind", "preset"}:
        return "chooses another engine; write only its options"
    return None


def _base_file(tree: LocatedDict, path: Path) -> Path | LocatedError:
    """The file that ``extends`` names: a path relative to the extending file, or a name, first beside it."""
    name = tree["extends"]
    if not isinstance(name, str) or not name:
        return tree.error(f"is {value_text(name)}; write the name or the path of one profile", "extends")
    if is_path(name):
        base = path.parent / name
        problem = (
            f"{display_path(base)}: {'not a regular' if base.exists() else 'no such'} file; a path is relative to "
            "the file that extends"
        )
        return base if base.is_file() else tree.error(problem, "extends")
    # A file may carry the name of the one it extends: its own profiles/x.yaml over the built-in x.
    for base in named_files(name, (path.parent, *profile_directories())):
        if base.resolve() != path.resolve():
            return base
    return tree.error(f"no other profile is called {name!r}. {known_profiles_text(name)}", "extends")
