"""Older words of profiles: still accepted, with a deprecation warning that names the new word.

Engine presets: the engine that a name stands for, and the models that it substitutes.
From files and the command line to one mapping: ``extends``, overlays for engines, ``--engine`` and ``--set``.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    LocatedDict,
    LocatedError,
    LocatedList,
    Location,
    changed_at,
    dotted,
    located,
    merge,
    read_document,
    read_value,
    size_problem,
    value_text,
)
from benchctl.untrusted.limits import EXTENDED_FILES, PROFILE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """An older key, or older values of a key, with the new ones."""

    key: str
    """The older key as a dotted path."""
    new_key: str
    """Its new name, in the same section; equal to the older one where only values changed."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Older value to new value; for a list of words, of each word. Other values stay."""
    since: str
    """Version of benchctl in which the older word became deprecated."""


ALIASES: Final = (
    Alias(key="unguided", new_key="for_unguided_engines", since="0.2.0"),
    Alias(
        key="workload.if_missing",
        new_key="workload.on_missing_dataset",
        values={"generated": "generate"},
        since="0.2.0",
    ),
    Alias(
        key="workload.prefix_hits",
        new_key="workload.allow_prefix_cache_hits",
        values={"forbidden": False, "allowed": True},
        since="0.2.0",
    ),
)


def with_new_words(
    document: LocatedDict, deprecations: list[LocatedError], errors: list[LocatedError]
) -> LocatedDict:
    """A document of one source with every older word replaced, also in its sections for some engines only."""

    def renew(tree: LocatedDict) -> LocatedDict:
        for alias in ALIASES:
            renew_word = partial(_with_new_word, alias, deprecations, errors)
            tree = changed_at(tree, tuple(alias.key.split(".")[:-1]), renew_word)
        return tree

    document = changed_at(renew(document), ("for_unguided_engines",), renew)
    for kind in document.mapping("per_engine"):
        document = changed_at(document, ("per_engine", kind), renew)
    return document


def _with_new_word(
    alias: Alias, deprecations: list[LocatedError], errors: list[LocatedError], section: LocatedDict
) -> LocatedDict:
    key, new_key = alias.key.split(".")[-1], alias.new_key.split(".")[-1]
    if key not in section:
        return section
    if new_key != key and new_key in section:
        errors.append(section.error(f"is the older name of {new_key}, which is set too; remove it", key))
        return section.without(key)
    value, location = section[key], section.location_of(key)
    words = value if isinstance(value, LocatedList) else [value]
    new_words = {word: alias.values[word] for word in words if isinstance(word, str) and word in alias.values}
    sections = {alias.key: alias.new_key for alias in ALIASES}
    new_path = dotted((*(sections.get(str(step), step) for step in location.path[:-1]), new_key))
    for word, new_word in new_words.items():
        text = str(new_word).lower() if isinstance(new_word, bool) else new_word
        problem = f"{word} is deprecated since {alias.since}; write {new_path}: {text}"
        deprecations.append(LocatedError(location, problem))
    if new_key != key and not new_words:
        problem = f"this key is deprecated since {alias.since}; write {new_path}"
        deprecations.append(LocatedError(location, problem))
    renewed = [new_words.get(word, word) if isinstance(word, str) else word for word in words]
    new_value = LocatedList(renewed, value.locations) if isinstance(value, LocatedList) else renewed[0]
    entries = {new_key if k == key else k: new_value if k == key else v for k, v in section.items()}
    return LocatedDict(entries, section.location, {**section.locations, new_key: location})


_FACTORS: Final = ("model", "value_model", "server.value_model")
_DEFAULT_MODEL: Final = Profile.model_fields["model"].default


def read_preset(engine: LocatedDict) -> Path | LocatedDict | LocatedError:
    """The file of the preset that ``engine`` names; for a bare kind without a file, an engine without options."""
    name, files, kinds = engine["preset"], preset_files(), tuple(ENGINES)
    if isinstance(name, str) and name in files:
        return files[name]
    location = engine.location_of("preset")
    if name in kinds:
        return LocatedDict({"kind": name}, location, {"kind": location})
    problem = (
        f"{value_text(name)} is neither an engine preset nor a kind of engine; presets are {', '.join(files)}, "
        f"kinds are {', '.join(kinds)}{did_you_mean(name, (*files, *kinds), '; ')}"
    )
    return LocatedError(location, problem)


def with_models(profile: LocatedDict, substitutes: LocatedDict) -> LocatedDict:
    """The profile with every model replaced that has a substitute."""
    if not substitutes:
        return profile

    def substitute(value: Any) -> Any:
        if isinstance(value, LocatedList):
            return LocatedList([substitute(item) for item in value], value.locations)
        return substitutes.get(value, value) if isinstance(value, str) else value

    def at_keys(*keys: str) -> Callable[[LocatedDict], LocatedDict]:
        def change(section: LocatedDict) -> LocatedDict:
            for key in keys:
                if key in section:
                    section = section.with_value(key, substitute(section[key]))
            return section

        return change

    model = profile.get("model", _DEFAULT_MODEL)
    location = profile.locations.get("model", Location(profile.location.source, profile.location.line, ("model",)))
    profile = profile.with_value("model", substitute(model), location)
    profile = changed_at(profile, ("sweep",), at_keys(*_FACTORS))
    profile = changed_at(profile, ("engine", "options"), at_keys("value_model"))
    for variant in profile.mapping("variants"):
        profile = changed_at(profile, ("variants", variant, "server"), at_keys("value_model"))
    return profile


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
